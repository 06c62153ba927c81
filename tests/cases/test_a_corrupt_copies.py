"""A copy that is corrupt in one tier or in all (C09)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardstore import ShardStoreError
from tests.cases.bits import assert_group_works, assert_refused, bits, refusal, soil
from tests.faults.scenario import Job, open_store
from tests.ranks import run_ranks


def _save_one(rank: int, folder: str) -> dict[str, Any]:
    store = open_store(folder, name="job")
    job = Job(rank)
    job.fill(1)
    store.save(job.state, step=1).wait(20)
    store.close(keep_memory=True)
    return bits(job.state)


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def _flip_payload(path: Path) -> None:
    _flip(path, 8 + int.from_bytes(path.read_bytes()[:8], "little") + 5)


def _flip_header(path: Path) -> None:
    _flip(path, 200)


DAMAGES: dict[str, tuple[Callable[[Path], object], str, tuple[str, ...]]] = {
    # name: (damage, file, what the refusal names)
    "payload": (
        _flip_payload,
        "rank-00001.safetensors",
        ("rank 1", "rank-00001.safetensors", "tensor", "digest"),
    ),
    "header": (_flip_header, "rank-00001.safetensors", ("rank 1", "rank-00001.safetensors")),
    "manifest": (lambda p: _flip(p, 150), "manifest.json", ("manifest",)),
}


def _restore_all(rank: int, folders: list[str]) -> list[Any]:
    found: list[Any] = []
    for folder in folders:
        store = open_store(folder, name="job")
        job = Job(rank)
        soil(job.state)
        try:
            report = store.restore(job.state)
        except ShardStoreError:
            found.append(refusal(lambda: store.restore(job.state), job.state))  # noqa: B023
            assert_group_works()
        else:
            found.append((report.tier, bits(job.state)))
        store._abandon("the test goes on")
    return found


def test_a_flipped_byte_is_never_restored_from_any_tier(folder: str, tmp_path: Path) -> None:
    """C09."""
    saved = run_ranks(2, _save_one, folder)
    folders: list[str] = []
    for name, (damage, file, _) in DAMAGES.items():
        copy = Path(folder) / f"copy-{name}"
        shutil.copytree(Path(folder) / "root", copy / "root")
        damage(next(copy.rglob(file)))
        folders.append(str(copy))
    for name in ("payload", "header"):  # the memory copy alone is damaged
        copy = Path(folder) / f"memory-{name}"
        for part in ("root", "memory"):
            shutil.copytree(Path(folder) / part, copy / part)
        DAMAGES[name][0](next((copy / "memory").rglob("rank-00001.safetensors")))
        folders.append(str(copy))
    by_rank = run_ranks(2, _restore_all, folders)
    for i, (_, _, named) in enumerate(DAMAGES.values()):
        assert_refused([found[i] for found in by_rank], *named, kind="CorruptSnapshotError")
    for i in range(len(DAMAGES), len(folders)):
        for rank, found in enumerate(by_rank):
            tier, now = found[i]
            assert tier == "memory (1 rank), root (1 rank)"
            assert now == saved[rank]
