"""`flush`: the newest snapshot of all ranks is safe soon, before older ones (P7)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from shardstore import ShardStoreError, SnapshotStore, list_snapshots
from shardstore.tiers.fileops import FileOps, use_ops
from tests.faults.scenario import open_store

_PIECE = 64 << 20


def _state(step: int, nbytes: int = 4096) -> dict[str, Any]:
    return {"w": torch.full((nbytes,), step, dtype=torch.uint8)}


class HeldOps(FileOps):
    """Holds the first write to the root until it is let go, and notes the order of renames there."""

    def __init__(self) -> None:
        self.is_held = threading.Event()
        self.go = threading.Event()
        self.published: list[int] = []
        self._lock = threading.Lock()

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        with self._lock:
            must_wait = "step-" in path and not self.is_held.is_set()
            if must_wait:
                self.is_held.set()
        if must_wait:
            assert self.go.wait(60.0)
        super().write_at(fd, data, offset)

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        folder = os.path.basename(os.path.dirname(target))
        if folder.startswith("step-"):
            self.published.append(int(folder[5:17]))


@contextmanager
def _held(folder: str, **options: Any) -> Iterator[tuple[SnapshotStore, HeldOps]]:
    ops = HeldOps()
    with use_ops(ops):
        store = open_store(folder, memory="2GiB", **options)
    try:
        with store:
            yield store, ops
    finally:
        ops.go.set()


def test_the_newest_goes_past_older_ones_that_wait(folder: str) -> None:
    with _held(folder) as (store, ops):
        for step in (1, 2, 3):
            store.save(_state(step), step=step)
        assert ops.is_held.wait(10.0)
        info = store.flush()
        assert info is not None
        assert info.step == 3
        assert "root" in info.tiers
        assert [i.step for i in list_snapshots(Path(folder, "root"))] == [3]
        ops.go.set()
        store.drain()
        assert [i.step for i in list_snapshots(Path(folder, "root"))] == [1, 2, 3]


def test_one_in_the_middle_of_its_write_gives_way_between_two_pieces(folder: str) -> None:
    with _held(folder) as (store, ops):
        store.save(_state(1, 3 * _PIECE), step=1)
        assert ops.is_held.wait(10.0)
        store.save(_state(2, 3 * _PIECE), step=2)
        threading.Timer(
            0.1, ops.go.set
        ).start()  # step 1 goes on, in the middle of the flush of step 2
        assert store.flush() is not None
        store.drain()
    assert ops.published == [2, 1]
    with open_store(folder, memory=0) as store:
        for step in (1, 2):
            live = _state(0, 3 * _PIECE)
            store.restore(live, step=step)
            assert live["w"].unique().tolist() == [step]


def test_what_does_not_come_in_time_is_not_listed_and_goes_on_behind(folder: str) -> None:
    with _held(folder) as (store, ops):
        store.save(_state(1), step=1)
        assert ops.is_held.wait(10.0)
        assert store.flush(timeout_s=0.3) is None
        assert list_snapshots(Path(folder, "root")) == []
        ops.go.set()
        store.drain()
        assert [i.step for i in list_snapshots(Path(folder, "root"))] == [1]


def test_what_is_only_in_memory_is_flushed_as_well(folder: str) -> None:
    with open_store(folder) as store:
        store.save(_state(1), step=1).wait()
        store.save(_state(2), step=2, persist=False).wait()
        info = store.flush()
        assert info is not None
        assert info.step == 2
        assert [i.step for i in list_snapshots(Path(folder, "root"))] == [1, 2]


def test_what_a_dead_run_left_in_memory_is_flushed_before_the_first_save(folder: str) -> None:
    with open_store(folder) as store:
        store.save(_state(1), step=1, persist=False).wait()
        store.close(keep_memory=True)
    with open_store(folder) as store:
        assert list_snapshots(Path(folder, "root")) == []
        info = store.flush()
        assert info is not None
        assert info.step == 1
        assert [i.step for i in list_snapshots(Path(folder, "root"))] == [1]


def test_an_older_one_in_memory_is_left_alone(folder: str) -> None:
    with open_store(folder) as store:
        store.save(_state(1), step=1, persist=False).wait()
        store.save(_state(2), step=2).wait()
        info = store.flush()
        assert info is not None
        assert info.step == 2
        assert [i.step for i in list_snapshots(Path(folder, "root"))] == [2]


def test_with_a_disk_in_between_it_goes_to_the_root(folder: str, disk_folder: Path) -> None:
    with _held(folder, disk=disk_folder / "disk") as (store, ops):
        for step in (1, 2):
            store.save(_state(step), step=step)
        assert ops.is_held.wait(10.0)
        info = store.flush()
        assert info is not None
        assert info.step == 2
        assert [i.step for i in list_snapshots(Path(folder, "root"))] == [2]
        ops.go.set()


def test_a_streamed_state_is_flushed(folder: str) -> None:
    with open_store(folder, memory=0) as store:
        store.save(_state(1), step=1)
        info = store.flush()
        assert info is None or info.step == 1  # it may be committed already
        assert [i.step for i in list_snapshots(Path(folder, "root"))] == [1]


def test_with_memory_alone_or_nothing_saved_there_is_nothing_to_flush(folder: str) -> None:
    with open_store(folder) as store:
        assert store.flush() is None
        assert not Path(folder, "root").exists(), "the root is not written before the first save"
    with SnapshotStore(memory="1MiB") as store:
        store.save(_state(1), step=1)
        assert store.flush() is None


def test_a_broken_root_is_told_by_the_save_not_by_the_flush(folder: str) -> None:
    Path(folder, "root").mkdir()
    with open_store(folder) as store:
        store.save(_state(1), step=1).wait()
        os.rename(Path(folder, "root"), Path(folder, "away"))
        Path(folder, "root").write_text("a file")
        saved = store.save(_state(2), step=2)
        assert store.flush(timeout_s=5.0) is None
        with pytest.raises(ShardStoreError, match=r"NOTDIR|EEXIST"):
            saved.wait()
        with pytest.raises(ShardStoreError, match="step 2"):
            store.drain()


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), "20"])
def test_a_flush_takes_seconds(folder: str, timeout_s: Any) -> None:
    with open_store(folder) as store, pytest.raises(ValueError, match="timeout_s"):
        store.flush(timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"grace_s": 0}, "grace_s"),
        ({"grace_s": "25"}, "grace_s"),
        ({"signals": ()}, "signals"),
        ({"signals": "SIGTERM"}, "signals"),
        ({"signals": (signal.SIGKILL,)}, "no process can catch SIGKILL"),
        ({"signals": (4711,)}, "4711 is no signal"),
    ],
)
def test_a_guard_refuses_bad_arguments(folder: str, arguments: Any, text: str) -> None:
    with open_store(folder) as store, pytest.raises(ValueError, match=text):
        store.guard_preemption(**arguments)


def test_a_guard_is_asked_inside_its_with_and_entered_once(folder: str) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with open_store(folder) as store:
        guard = store.guard_preemption(signals=signal.SIGUSR2)  # type: ignore[arg-type]
        with pytest.raises(ShardStoreError, match="outside of the `with`"):
            guard.should_stop(1)
        with guard:
            assert signal.getsignal(signal.SIGUSR2) != before
            assert guard.should_stop(1) is False
            assert guard.remaining_s == float("inf")
            assert not guard.is_preempted
            with pytest.raises(ValueError, match="step"):
                guard.should_stop(-1)
        assert signal.getsignal(signal.SIGUSR2) == before
        with pytest.raises(ShardStoreError, match="entered once"), guard:
            pass
        with store.guard_preemption(signals=[signal.SIGUSR2]) as second:
            assert second.should_stop(1) is False


def test_after_a_signal_the_handler_stays_until_close(folder: str) -> None:
    calls: list[int] = []

    def mine(signum: int, _frame: object) -> None:
        calls.append(signum)

    before = signal.signal(signal.SIGUSR2, mine)
    store = open_store(folder)
    with store.guard_preemption(signals=[signal.SIGUSR2], grace_s=10.0) as guard:
        store.save(_state(1), step=1)
        os.kill(os.getpid(), signal.SIGUSR2)
        step = 1
        while not guard.should_stop(step):
            step += 1
        assert 0.0 < guard.remaining_s <= 10.0
        assert "left" in repr(guard)
    assert signal.getsignal(signal.SIGUSR2) is not mine
    os.kill(os.getpid(), signal.SIGUSR2)
    store.close()
    assert calls == [signal.SIGUSR2] * 2
    assert signal.getsignal(signal.SIGUSR2) is mine
    signal.signal(signal.SIGUSR2, before)
    left = list(Path(folder, "memory").rglob("*.safetensors"))
    assert left, "memory stays for the restart"
    assert [i.step for i in list_snapshots(Path(folder, "root"))] == [1]
