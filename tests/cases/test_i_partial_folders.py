"""Folders that are not whole are no snapshots (C74)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases.bits import Facts, bits, soil
from tests.faults.scenario import Job, open_store
from tests.ranks import run_ranks


def _save_1_and_9(rank: int, folder: str) -> dict[str, Facts]:
    store = open_store(folder, memory=0)
    job = Job(rank)
    job.fill(1)
    old = bits(job.state)
    store.save(job.state, step=1).wait(20)
    job.fill(9)
    store.save(job.state, step=9).wait(20)
    store.close()
    return old


def _halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def _only_shards(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "rank-00001.safetensors").unlink()


HALF_FOLDERS: dict[str, Callable[[Path], object]] = {
    "empty": _empty,
    "shards without manifest": _only_shards,
    "a shard missing": lambda folder: (folder / "rank-00001.safetensors").unlink(),
    "manifest of no bytes": lambda folder: (folder / "manifest.json").write_bytes(b""),
    "manifest cut at half": lambda folder: _halve(folder / "manifest.json"),
}


def _look(rank: int, folders: list[str]) -> list[dict[str, Any]]:
    found = []
    for folder in folders:
        store = open_store(folder, memory=0)
        job = Job(rank)
        soil(job.state)
        listed = [info.step for info in store.snapshots()]
        step = store.restore(job.state).step
        found.append({"listed": listed, "step": step, "bits": bits(job.state)})
        store.close()
    return found


@pytest.fixture(scope="module")
def half_folders(shared_folder: str) -> dict[str, list[dict[str, Any]]]:
    """What a restart finds beside step 1, by kind of damage and rank."""
    saved = Path(shared_folder) / "saved"
    saved.mkdir()
    old = run_ranks(2, _save_1_and_9, str(saved))
    folders = []
    for number, damage in enumerate(HALF_FOLDERS.values()):
        copy = Path(shared_folder) / f"copy-{number}"
        shutil.copytree(saved, copy)
        damage(next((copy / "root").glob("step-000000000009.*")))
        folders.append(str(copy))
    by_rank = run_ranks(2, _look, folders)
    for rank, found in enumerate(by_rank):
        for one in found:
            one["old_ok"] = one.pop("bits") == old[rank]
    return {name: [found[i] for found in by_rank] for i, name in enumerate(HALF_FOLDERS)}


@pytest.mark.parametrize("kind", HALF_FOLDERS)
def test_a_folder_that_is_not_whole_is_no_snapshot(
    half_folders: dict[str, list[dict[str, Any]]], kind: str
) -> None:
    """C74. (Shards of all ranks without a manifest are whole, by the commit protocol.)"""
    for found in half_folders[kind]:
        assert found["step"] == 1
        assert found["old_ok"]
        assert found["listed"] == [1]
