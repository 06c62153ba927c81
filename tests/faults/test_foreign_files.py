"""A root, disk or memory folder full of things that are not ours works as an empty one does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardstore import SnapshotStore, list_snapshots
from tests.cases.bits import bits, soil
from tests.faults.foreign import names_below, plant_near, plant_root


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.full((100,), float(step)), "step": {"n": step}}


def _open(folder: Path, **options: Any) -> SnapshotStore:
    memory_dir = folder / "memory"
    memory_dir.mkdir(exist_ok=True)
    return SnapshotStore(
        folder / "root", memory_dir=memory_dir, timeout_s=20, name="job", **options
    )


@pytest.mark.parametrize("tiers", ["root", "memory", "disk"])
def test_foreign_things_are_neither_followed_nor_waited_for_nor_removed(
    folder: str, disk_folder: Path, tiers: str
) -> None:
    here = Path(folder)
    outside = here / "outside"
    outside.mkdir()
    (outside / "rank-00007.safetensors").write_bytes(b"theirs")
    own = f"shardstore-{os.getuid()}/job"
    plant_root(here / "root")
    planted = names_below(here / "root")
    options: dict[str, Any] = {"keep": 2, "memory": 0}
    if tiers == "memory":
        options["memory"] = "1MiB"
        (here / "memory" / f"shardstore-{os.getuid()}").mkdir(parents=True, mode=0o700)
        (here / "memory" / own).mkdir(mode=0o700)
        plant_near(here / "memory" / own)
        link = here / "memory" / own / "step-000000000009.00000000-000009-0badcafe"
        link.symlink_to(outside)
    if tiers == "disk":
        options["disk"] = disk_folder
        plant_near(disk_folder / own)
    assert list_snapshots(here / "root") == []
    for first in (1, 4):
        with _open(here, **options) as store:
            for step in range(first, first + 3):
                live = _state(step)
                saved = bits(live)
                store.save(live, step=step).wait(20)
                soil(live)
                assert store.restore(live).step == step
                assert bits(live) == saved
            store.drain()
            assert [info.step for info in store.snapshots()] == [first + 1, first + 2]
    assert [info.step for info in list_snapshots(here / "root")] == [5, 6]
    left = names_below(here / "root")
    assert {name for name in planted if name not in left} == set(), "what is not ours was removed"
    assert (outside / "rank-00007.safetensors").exists()
    with _open(here, **options) as store:
        live = _state(0)
        assert store.restore(live).step == 6
        assert bits(live) == bits(_state(6))


def test_a_root_of_only_foreign_things_is_an_empty_one(folder: str) -> None:
    here = Path(folder)
    plant_root(here / "root")
    shutil.rmtree(here / "root" / "many")
    for name in names_below(here / "root"):  # attempts that hold unreadable things do exist
        if b"-0badcafe" in name and os.path.isdir(name) and not os.path.islink(name):
            shutil.rmtree(name, ignore_errors=True)
    with _open(here, memory=0) as store:
        assert store.snapshots() == []
        assert store.restore(_state(0), required=False) is None
