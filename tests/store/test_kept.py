"""Snapshots of persist=False: in memory while there is room, on the root when their memory is needed."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch

from shardstore import SnapshotStore, TierFullError, list_snapshots
from shardstore.cluster.coordination import Coordinator
from shardstore.engine.kept import KeptSnapshots
from shardstore.format.records import SnapshotId
from shardstore.tiers.fileops import FileOps, use_ops
from tests.store.conftest import OpenStore

_MEBI = 1 << 20


def _state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((_MEBI,), float(value))}


def _restored(store: SnapshotStore, step: int) -> tuple[float, str]:
    live = _state(-1.0)
    report = store.restore(live, step=step)
    (value,) = live["w"].unique().tolist()  # type: ignore[no-untyped-call]
    return value, report.tier


class OneBrokenWrite(FileOps):
    """Fails the next large write once armed."""

    def __init__(self) -> None:
        self.armed = False

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        if self.armed and len(data) > _MEBI:
            self.armed = False
            raise OSError(28, "no space left on device")
        super().write_at(fd, data, offset)


class HeldWrites(FileOps):
    """Holds every large write until released, or what comes before it: making the folder on the root."""

    def __init__(self, root: str = "") -> None:
        self.root = root
        self.writing, self.go = threading.Event(), threading.Event()

    def _hold(self) -> None:
        self.writing.set()
        assert self.go.wait(60)

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        if len(data) > _MEBI:
            self._hold()
        super().write_at(fd, data, offset)

    def make_folder(self, path: str, mode: int = 0o777) -> None:
        if self.root and path.startswith(self.root):
            self._hold()
        super().make_folder(path, mode)


def test_more_snapshots_than_memory_holds_are_all_restorable(open_store: OpenStore) -> None:
    store = open_store(memory="13MiB")  # three
    for step in range(1, 8):
        info = store.save(_state(step), step=step, persist=False).wait(20)
        assert info is not None
        assert info.tiers == ("memory",)
    assert [info.step for info in store.snapshots()] == list(range(1, 8))
    found = [_restored(store, step) for step in range(1, 8)]
    assert [value for value, _ in found] == list(range(1, 8))
    tiers = [tier.split()[0] for _, tier in found]
    assert tiers == ["root"] * 4 + ["memory"] * 3, (
        "the oldest have left, and only as many as needed"
    )
    stats = store.stats()
    assert (stats.num_spilled, stats.num_streamed, stats.num_failed) == (4, 0, 0)
    assert stats.memory_used_bytes <= 13 * _MEBI
    store.close()


def test_nothing_is_written_while_memory_has_room(open_store: OpenStore, folder: str) -> None:
    store = open_store(memory="13MiB")
    for step in (1, 2, 3):
        store.save(_state(step), step=step, persist=False).wait(20)
    assert not list((Path(folder) / "root").rglob("*.safetensors"))
    store.close()


def test_a_save_that_persists_makes_room_and_retention_never_counts_what_it_pushed_out(
    open_store: OpenStore, folder: str
) -> None:
    store = open_store(memory="9MiB", keep=1)  # two
    for step in (1, 2):
        store.save(_state(step), step=step, persist=False).wait(20)
    for step in (3, 4, 5, 6):
        store.save(_state(step), step=step).wait(20)
    assert store.stats().num_streamed == 0
    assert [info.step for info in store.snapshots()] == [1, 2, 6]
    assert [_restored(store, step)[0] for step in (1, 2, 6)] == [1, 2, 6]
    root = Path(folder) / "root"
    assert [info.step for info in list_snapshots(root)] == [1, 2, 6]
    store.delete(1)
    assert [info.step for info in list_snapshots(root)] == [2, 6]
    store.close()


def test_a_spill_that_fails_leaves_the_copy_in_memory_and_is_tried_again(
    open_store: OpenStore, folder: str
) -> None:
    ops = OneBrokenWrite()
    with use_ops(ops):
        store = open_store(memory="5MiB")  # one
    store.save(_state(1), step=1, persist=False).wait(20)
    ops.armed = True
    with pytest.raises(TierFullError, match="no room"):
        store.save(_state(2), step=2, persist=False)
    assert not ops.armed
    assert not list((Path(folder) / "root").rglob("*.safetensors*"))
    assert _restored(store, 1) == (1.0, "memory (1 rank)")
    info = store.save(_state(3), step=3, persist=False).wait(20)
    assert info is not None
    assert _restored(store, 1) == (1.0, "root (1 rank)")
    assert _restored(store, 3)[0] == 3.0
    store.close()


@pytest.mark.parametrize("on_full", ["skip", "direct"])
def test_on_full_holds_while_a_spill_makes_room(open_store: OpenStore, on_full: str) -> None:
    ops = HeldWrites()
    with use_ops(ops):
        store = open_store(memory="5MiB", on_full=on_full)
    store.save(_state(1), step=1, persist=False).wait(20)
    if on_full == "skip":
        assert store.save(_state(2), step=2).wait(20) is None
        assert ops.writing.wait(20), "the spill was asked for all the same"
        ops.go.set()
    else:
        ops.go.set()
        store.save(_state(2), step=2).wait(20)
        assert store.stats().num_streamed == 1
        assert _restored(store, 2)[0] == 2.0
    assert _restored(store, 1)[0] == 1.0
    store.close()


@pytest.mark.parametrize("has_folder", [True, False], ids=["writing", "before its folder"])
def test_a_snapshot_that_is_deleted_while_it_is_spilled_does_not_come_back(
    open_store: OpenStore, folder: str, has_folder: bool
) -> None:
    ops = HeldWrites("" if has_folder else f"{folder}/root/step-")
    with use_ops(ops):
        store = open_store(memory="9MiB", on_full="skip")
    for step in (1, 2):
        store.save(_state(step), step=step, persist=False).wait(20)
    assert store.save(_state(3), step=3).wait(20) is None
    assert ops.writing.wait(20)
    store.delete(1)
    ops.go.set()
    store.drain()
    kept = store._pipeline._kept
    assert kept.stop(20)
    assert [info.step for info in store.snapshots()] == [2]
    assert list_snapshots(Path(folder) / "root") == []
    assert not list((Path(folder) / "root").rglob("*.safetensors*"))
    store.close()


def test_what_a_killed_run_kept_in_memory_is_spilled_by_the_next(open_store: OpenStore) -> None:
    first = open_store(memory="9MiB")
    for step in (1, 2):
        first.save(_state(step), step=step, persist=False).wait(20)
    first.take_leave("a restart")
    second = open_store(memory="9MiB")
    assert [info.step for info in second.snapshots()] == [1, 2]
    for step in (3, 4):
        second.save(_state(step), step=step, persist=False).wait(20)
    assert [_restored(second, step)[0] for step in (1, 2, 3, 4)] == [1, 2, 3, 4]
    assert second.stats().num_spilled == 2
    second.close(keep_memory=True)
    third: Any = open_store(memory="9MiB")
    assert [info.step for info in third.snapshots()] == [1, 2, 3, 4]
    third.close()


class Prompt:
    """A coordinator that has found a key that is there by the time that `watch` returns."""

    def __init__(self, real: Coordinator) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def watch(self, keys: list[str], *, every_s: float = 0.0) -> Future[Any]:
        found = self.real.watch(keys, every_s=every_s)
        wait([found], timeout=0.3)
        return found


def test_a_question_that_was_asked_before_a_rank_listens_is_heard(open_store: OpenStore) -> None:
    store = open_store(memory="64MiB")
    store.save(_state(1), step=1, persist=False).wait(20)
    (snapshot_id,) = store._session.memory.ids()
    store._pipeline._kept.stop(20)
    session = replace(store._session, coordinator=cast("Any", Prompt(store._session.coordinator)))
    # Another rank was faster with its questions: of one that is gone here, and of this one.
    gone = SnapshotId(9, 1, 9, "00000000")
    for number, asked in enumerate((gone, snapshot_id)):
        session.coordinator.propose(f"kept-{number}/ask", msgspec.json.encode(asked))
    kept = KeptSnapshots(replace(session, complete={}), FileOps())
    with ThreadPoolExecutor(1) as pool:
        assert wait([pool.submit(kept.watch)], timeout=30).done, "it waits for itself"
    assert kept.stop(30)
    assert _restored(store, 1)[0] == 1.0
    assert store.stats().num_spilled == 1
