"""Damage anywhere is found before a live tensor is touched, named, and passed over by all ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardstore import CorruptSnapshotError, ShardStoreError, SnapshotNotFoundError
from tests.faults.scenario import Job, open_store
from tests.ranks import run_ranks

Damage = Callable[[Path], object]


def _save_two(rank: int, folder: str) -> None:
    store = open_store(folder)
    job = Job(rank)
    for step in (1, 2):
        job.fill(step)
        store.save(job.state, step=step).wait(20)
    store.close()


def _restore(rank: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    store = open_store(folder)
    job = Job(rank)
    job.fill(-7)
    before = [t.clone() for t in job.tensors()]
    result: dict[str, Any] = {"error": None, "skipped": []}
    try:
        report = store.restore(job.state, **options)
    except ShardStoreError as error:
        result["error"] = (type(error).__name__, str(error))
        result["unchanged"] = all(
            torch.equal(a, b) for a, b in zip(before, job.tensors(), strict=True)
        )
    else:
        assert report is not None
        result["step"] = report.step
        result["seen"] = job.steps_seen()
        result["skipped"] = [(skip.step, skip.reason) for skip in report.skipped]
    store._abandon("the test ends")
    return result


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def _shard(folder: Path, rank: int = 1) -> Path:
    return folder / f"rank-{rank:05d}.safetensors"


def _payload_offset(path: Path) -> int:
    length = int.from_bytes(path.read_bytes()[:8], "little")
    return 8 + length + 5


DAMAGES: dict[str, tuple[Damage, str]] = {
    "payload byte": (
        lambda f: _flip(_shard(f), _payload_offset(_shard(f))),
        "rank-00001.safetensors",
    ),
    "header byte": (lambda f: _flip(_shard(f), 200), "rank-00001.safetensors"),
    "header length": (lambda f: _flip(_shard(f), 1), "rank-00001.safetensors"),
    "manifest byte": (lambda f: _flip(f / "manifest.json", 150), "manifest"),
    "truncated shard": (
        lambda f: _shard(f).write_bytes(_shard(f).read_bytes()[:-9]),
        "rank-00001.safetensors",
    ),
    "longer shard": (
        lambda f: _shard(f).write_bytes(_shard(f).read_bytes() + b"x"),
        "rank-00001.safetensors",
    ),
    "empty shard": (lambda f: _shard(f).write_bytes(b""), "rank-00001.safetensors"),
    "missing shard": (lambda f: _shard(f).unlink(), "rank-00001.safetensors"),
    "truncated manifest": (
        lambda f: (f / "manifest.json").write_bytes((f / "manifest.json").read_bytes()[:300]),
        "manifest",
    ),
    "empty manifest": (lambda f: (f / "manifest.json").write_bytes(b""), "manifest"),
    "another rank's file": (
        lambda f: shutil.copy(_shard(f, 0), _shard(f, 1)),
        "rank-00001.safetensors",
    ),
    "manifest of garbage": (
        lambda f: (f / "manifest.json").write_text(json.dumps({"state": "committed"})),
        "manifest",
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, _save_two, str(folder))
    return folder


@pytest.mark.parametrize("damage", DAMAGES, ids=list(DAMAGES))
def test_damage_in_the_newest_is_passed_over_by_all_ranks_to_the_older_one(
    saved: Path, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    newest = max((folder / "root").glob("step-*2.*"))
    act, named = DAMAGES[damage]
    act(newest)
    results = run_ranks(2, _restore, str(folder), {})
    for result in results:
        assert result["error"] is None, result["error"]
        assert result["step"] == 1
        assert result["seen"] == {1}
        assert [step for step, _ in result["skipped"]] == [2]
        assert named in result["skipped"][0][1]
    assert results[0]["skipped"] == results[1]["skipped"]


def test_without_fallback_damage_is_raised_on_all_ranks_and_nothing_is_touched(
    saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    newest = max((folder / "root").glob("step-*2.*"))
    _flip(_shard(newest), _payload_offset(_shard(newest)))
    for result in run_ranks(2, _restore, str(folder), {"fallback": False}):
        kind, text = result["error"]
        assert kind == "CorruptSnapshotError"
        assert "rank 1" in text
        assert "tensor" in text
        assert result["unchanged"]


def test_when_every_snapshot_is_damaged_it_raises_whatever_required_says(
    saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    for snapshot in (folder / "root").glob("step-*"):
        _flip(_shard(snapshot), _payload_offset(_shard(snapshot)))
    for result in run_ranks(2, _restore, str(folder), {"required": False}):
        assert result["error"][0] == CorruptSnapshotError.__name__
        assert result["unchanged"]


def test_an_absent_step_and_an_empty_root_are_not_found(saved: Path, tmp_path: Path) -> None:
    for result in run_ranks(2, _restore, str(saved), {"step": 17}):
        assert result["error"][0] == SnapshotNotFoundError.__name__
        assert "17" in result["error"][1]
    for result in run_ranks(2, _restore, str(tmp_path), {}):
        assert result["error"][0] == SnapshotNotFoundError.__name__
