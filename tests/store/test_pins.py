"""Pins: small files beside snapshots that `keep` never deletes, wherever they live."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardstore import CoordinationError, Keep, SnapshotNotFoundError, SnapshotStore, list_snapshots
from shardstore.engine.catalog import Catalog
from shardstore.format.records import SnapshotId
from shardstore.tiers.disk import DiskTier
from shardstore.tiers.fileops import FileOps, use_ops
from tests.faults.breaking_ops import WatchedOps, raise_at
from tests.store.conftest import OpenStore

PLACES: dict[str, dict[str, Any]] = {
    "root": {},
    "root, no memory": {"memory": 0},
    "root and disk": {"disk": "disk"},
    "disk": {"root": None, "disk": "disk"},
    "disk, no memory": {"root": None, "disk": "disk", "memory": 0},
    "memory": {"root": None, "name": "job"},
}
"""Arguments of a store whose snapshots survive the process, by where they are."""


def _state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4,), float(value))}


def _save(store: SnapshotStore, *steps: int, **options: Any) -> None:
    for step in steps:
        store.save(_state(step), step=step, **options).wait()
    store.drain()


def _value(store: SnapshotStore, step: int) -> float:
    live = _state(-1)
    store.restore(live, step=step)
    (value,) = live["w"].unique().tolist()  # type: ignore[no-untyped-call]
    return float(value)


def _pins(store: SnapshotStore) -> dict[int, bool]:
    return {info.step: info.pinned for info in store.snapshots()}


def _options(place: str, disk_folder: Path) -> dict[str, Any]:
    options = dict(PLACES[place])
    if "disk" in options:
        options["disk"] = disk_folder / options["disk"]
    return options


@pytest.mark.parametrize("place", PLACES)
def test_a_pinned_snapshot_outlives_retention_and_restarts_until_it_is_unpinned(
    folder: str, disk_folder: Path, open_store: OpenStore, place: str
) -> None:
    options = _options(place, disk_folder)
    store = open_store(keep=2, **options)
    _save(store, 1, 2)
    store.pin(1)
    store.pin(1)
    assert _pins(store) == {1: True, 2: False}
    _save(store, 3, 4)
    assert _pins(store) == {1: True, 3: False, 4: False}
    store.close(keep_memory=True)
    store = open_store(keep=2, **options)
    assert _pins(store) == {1: True, 3: False, 4: False}
    _save(store, 5)
    assert _pins(store) == {1: True, 4: False, 5: False}
    assert _value(store, 1) == 1
    store.unpin(1)
    store.unpin(1)
    assert not any(_pins(store).values())
    store.close(keep_memory=True)
    store = open_store(keep=2, **options)
    _save(store, 6)
    assert _pins(store) == {5: False, 6: False}
    store.close(keep_memory=True)
    assert not [*Path(folder).rglob("*pinned*"), *disk_folder.rglob("*pinned*")]


@pytest.mark.parametrize("place", [*PLACES, "private memory"])
def test_every_save_of_a_step_is_pinned_and_delete_takes_pinned_ones_as_well(
    folder: str, disk_folder: Path, open_store: OpenStore, place: str
) -> None:
    options = {"root": None} if place == "private memory" else _options(place, disk_folder)
    store = open_store(keep=1, **options)
    _save(store, 1)
    store.pin(1)
    _save(store, 1)
    store.pin(1)
    _save(store, 2, 3)
    assert [(i.step, i.pinned) for i in store.snapshots()] == [(1, True), (1, True), (3, False)]
    store.delete(1)
    assert _pins(store) == {3: False}
    for call in (store.pin, store.unpin, store.delete):
        with pytest.raises(SnapshotNotFoundError, match="step 1") as caught:
            call(1)
        assert caught.value.step == 1
    store.close(keep_memory=True)
    names = {p.name for p in (*Path(folder).rglob("*"), *disk_folder.rglob("*"))}
    assert not [name for name in names if name.startswith("step-000000000001") or "pinned" in name]


@pytest.mark.parametrize("place", ["root", "disk"])
def test_a_pin_goes_along_when_a_snapshot_leaves_memory(
    folder: str, disk_folder: Path, open_store: OpenStore, place: str
) -> None:
    options = _options(place, disk_folder)
    store = open_store(memory=4 << 20, keep=1, **options)
    big = {"w": torch.full((1 << 18,), 1.0)}
    store.save(big, step=1, persist=False).wait()
    store.pin(1)
    assert [(i.step, i.tiers, i.pinned) for i in store.snapshots()] == [(1, ("memory",), True)]
    for step in (2, 3, 4, 5, 6):
        store.save(big, step=step, persist=False).wait()
    (first,) = (info for info in store.snapshots() if info.step == 1)
    assert (first.tiers, first.pinned) == ((place,), True)
    store.close()
    store = open_store(memory=4 << 20, keep=1, **options)
    (first,) = (info for info in store.snapshots() if info.step == 1)
    assert first.pinned
    if place == "root":
        assert list_snapshots(Path(folder, "root"))[0].pinned


def test_a_pin_goes_where_the_folder_goes(folder: str, open_store: OpenStore) -> None:
    store = open_store(memory=0)
    _save(store, 1, 2)
    store.pin(1)
    store.close()
    moved = shutil.copytree(Path(folder, "root"), Path(folder, "a copy"))
    assert [(i.step, i.pinned) for i in list_snapshots(moved)] == [(1, True), (2, False)]
    store = open_store("a copy", memory=0, keep=1)
    _save(store, 3)
    assert _pins(store) == {1: True, 3: False}
    store.unpin(1)
    assert [i.pinned for i in list_snapshots(Path(folder, "root"))] == [True, False]


def test_pins_keep_a_step_beside_a_policy_of_multiples(folder: str, open_store: OpenStore) -> None:
    store = open_store(memory=0, keep=Keep(last=1, every_steps=4))
    _save(store, *range(1, 4))
    store.pin(3)
    _save(store, *range(4, 11))
    assert [i.step for i in store.snapshots()] == [3, 4, 8, 10]


def test_a_pin_that_cannot_be_written_is_an_error_and_no_pin(
    folder: str, open_store: OpenStore
) -> None:
    ops = WatchedOps(raise_at("open_new pinned", OSError(errno.EROFS, "read-only")))
    with use_ops(ops):
        store = open_store(memory=0)
    _save(store, 1)
    ops.arm()
    with pytest.raises(CoordinationError, match="EROFS") as caught:
        store.pin(1)
    assert "pinned" in str(caught.value), "it says which file"
    assert _pins(store) == {1: False}
    store.pin(1)
    assert _pins(store) == {1: True}


def _catalog(folder: str) -> Catalog:
    return Catalog(DiskTier(str(Path(folder, "root")), name="root", ops=FileOps()))


def test_another_process_may_pin_while_a_job_runs(folder: str, open_store: OpenStore) -> None:
    store = open_store(memory=0, keep=1)
    _save(store, 1)
    catalog = _catalog(folder)
    (first,) = catalog.ids()
    catalog.pin(first)
    catalog.pin(first)
    assert catalog.pinned() == {first}
    _save(store, 2, 3)
    assert _pins(store) == {1: True, 3: False}
    catalog.unpin(first)
    _save(store, 4)
    assert _pins(store) == {4: False}
    with pytest.raises(SnapshotNotFoundError):
        catalog.pin(first)
    with pytest.raises(SnapshotNotFoundError):
        catalog.unpin(first)
    assert not Path(folder, "root", first.name).exists()


def test_a_pin_beside_what_is_no_snapshot_is_ignored(folder: str, open_store: OpenStore) -> None:
    store = open_store(memory=0)
    _save(store, 1)
    torn = SnapshotId(2, 1, 9, "00000001")
    Path(folder, "root", torn.name).mkdir()
    Path(folder, "root", torn.name, "pinned").touch()
    catalog = _catalog(folder)
    assert catalog.pinned() == set()
    assert [i.step for i in list_snapshots(Path(folder, "root"))] == [1]
    assert catalog.abort(torn, reason="test", writer={})
    assert catalog.pinned() == set()
    catalog.remove_aborted()
    assert torn not in catalog.ids()


def test_a_pin_set_just_before_the_register_is_closed_saves_the_snapshot(
    folder: str, open_store: OpenStore
) -> None:
    """Retention looks once more right before it takes one off the list."""
    catalog = _catalog(folder)

    class PinsMeanwhile(FileOps):
        left = 2

        def list_folder(self, path: str) -> list[str]:
            names = super().list_folder(path)
            is_first = "step-000000000001" in path and "manifest.json" in names
            self.left -= is_first and self.left > 0 and armed
            if is_first and armed and self.left == 1:
                catalog.pin(next(i for i in catalog.ids() if i.step == 1))
            return names

    armed = False
    with use_ops(PinsMeanwhile()):
        store = open_store(memory=0, keep=1)
    _save(store, 1)
    armed = True
    _save(store, 2)
    assert _pins(store) == {1: True, 2: False}


@pytest.mark.parametrize("reopens", [False, True], ids=["at once", "after a restart"])
def test_a_pinned_snapshot_that_only_memory_has_left_is_not_given_up(
    folder: str, open_store: OpenStore, reopens: bool
) -> None:
    """Older than what is committed, it would serve other saves; pinned, it does not."""
    store = open_store(memory="1MiB")
    _save(store, 1, 2)
    store.close(keep_memory=True)
    shutil.rmtree(next(Path(folder, "root").glob("step-000000000001.*")))
    store = open_store(memory="1MiB")
    assert next((i.step, i.tiers) for i in store.snapshots()) == (1, ("memory",))
    store.pin(1)
    if reopens:
        store.close(keep_memory=True)
        store = open_store(memory="1MiB")
    _save(store, *range(3, 9))
    assert _pins(store)[1]
    assert _value(store, 1) == 1
