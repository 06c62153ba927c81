"""`flush`: the newest snapshot of all ranks is safe soon, before older ones (P7)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from shardstore import ShardStoreError, SnapshotStore, TierFullError, list_snapshots
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
            assert bool((live["w"] == step).all())


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


class _SlowRoot(FileOps):
    """Each write to the root takes `seconds`, once armed."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.is_armed = False

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        if self.is_armed and "step-" in os.readlink(f"/proc/self/fd/{fd}"):
            threading.Event().wait(self.seconds)
        super().write_at(fd, data, offset)


def test_a_flush_that_writes_itself_keeps_its_time(folder: str) -> None:
    ops = _SlowRoot(1.0)
    with use_ops(ops):
        store = open_store(folder)
    with store:
        ops.is_armed = True
        for step in (1, 2):
            store.save(_state(step), step=step)
        started = time.monotonic()
        assert store.flush(timeout_s=0.2) is None
        assert time.monotonic() - started < 1.5
        store.drain()


def test_the_newest_in_memory_does_not_wait_for_an_older_one_that_gives_way_to_it(
    folder: str,
) -> None:
    with _held(folder) as (store, ops):
        store.save(_state(1, 3 * _PIECE), step=1, persist=False).wait()
        memory = store._session.memory
        assert memory.ask_spill is not None
        memory.ask_spill(memory.ids()[0])
        assert ops.is_held.wait(10.0), "memory is needed: step 1 goes out"
        store.save(_state(2), step=2, persist=False).wait()
        threading.Timer(0.3, ops.go.set).start()
        info = store.flush(timeout_s=10.0)
        assert info is not None
        assert info.step == 2


def test_a_guard_after_one_that_got_a_signal_knows_of_it(folder: str) -> None:
    """As with a guard per epoch: the signal came after the last question."""
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    with open_store(folder) as store:
        with store.guard_preemption(signals=[signal.SIGUSR2], grace_s=20.0) as guard:
            assert not guard.should_stop(1)
            os.kill(os.getpid(), signal.SIGUSR2)
        with store.guard_preemption(signals=[signal.SIGUSR2], grace_s=20.0) as second:
            assert second.is_preempted
            assert second.remaining_s <= 20.0
            assert second.should_stop(2)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    signal.signal(signal.SIGUSR2, before)


def test_a_handler_that_ends_the_program_does_not_lift_the_guard(folder: str) -> None:
    """A second signal would end the flush."""

    def end(_signum: int, _frame: object) -> None:
        raise SystemExit

    before = signal.signal(signal.SIGUSR2, end)
    store = open_store(folder)
    store.save(_state(1), step=1)
    with pytest.raises(SystemExit), store.guard_preemption(signals=[signal.SIGUSR2]):
        os.kill(os.getpid(), signal.SIGUSR2)
    assert signal.getsignal(signal.SIGUSR2) is not end
    store.close()
    assert signal.getsignal(signal.SIGUSR2) is end
    signal.signal(signal.SIGUSR2, before)
    assert [i.step for i in list_snapshots(Path(folder, "root"))] == [1]


def test_retention_beside_a_flush_keeps_the_newest(folder: str) -> None:
    with _held(folder, keep=1) as (store, ops):
        for step in (1, 2, 3):
            store.save(_state(step), step=step)
        assert ops.is_held.wait(10.0)
        info = store.flush()
        assert info is not None
        assert info.step == 3
        ops.go.set()
        store.drain()
        assert [i.step for i in list_snapshots(Path(folder, "root"))] == [3]


class _SlowRemoval(FileOps):
    """Holds the removal of old snapshots, which comes after a commit."""

    def __init__(self) -> None:
        self.is_held, self.go = threading.Event(), threading.Event()

    def point(self, name: str) -> None:
        super().point(name)
        if name == "remove old":
            self.is_held.set()
            assert self.go.wait(60.0)


def test_a_flush_of_what_has_just_been_committed_ends_at_once(folder: str) -> None:
    """While the commit behind still removes old ones; the ranks' keys of that save are gone by then."""
    ops = _SlowRemoval()
    with use_ops(ops):
        store = open_store(folder)
    with store:
        store.save(_state(1), step=1)
        assert ops.is_held.wait(10.0)
        info = store.flush(timeout_s=5.0)
        ops.go.set()
        assert info is not None
        assert info.step == 1


def test_a_forked_child_that_leaves_the_with_of_its_parent_ends_nothing(folder: str) -> None:
    with (
        open_store(folder) as store,
        store.guard_preemption(signals=[signal.SIGUSR2]) as guard,
    ):
        store.save(_state(1), step=1).wait()
        pid = os.fork()
        if pid == 0:
            try:
                store.__exit__(KeyError, KeyError(), None)
                guard.__exit__(KeyError, KeyError(), None)
                leaving = [t.name for t in threading.enumerate() if "leave" in t.name]
                os._exit(5 if leaving else 3)
            finally:
                os._exit(4)
        deadline = time.monotonic() + 10.0
        pause = threading.Event()
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            pause.wait(0.02)
        assert os.waitstatus_to_exitcode(ended[1]) == 3
        assert not guard.should_stop(1)
        store.save(_state(2), step=2).wait(20.0)


def test_a_signal_while_close_drains_ends_it_in_time(folder: str) -> None:
    """The guard's `with` is over then, as it ends before the store's."""
    before = signal.signal(signal.SIGUSR2, signal.SIG_DFL)  # which would end the process
    with _held(folder) as (store, ops):
        with store.guard_preemption(signals=[signal.SIGUSR2], grace_s=1.0):
            store.save(_state(1), step=1)
        assert ops.is_held.wait(10.0)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        store.close()
    assert signal.signal(signal.SIGUSR2, before) is signal.SIG_DFL
    assert list_snapshots(Path(folder, "root")) == []
    assert list(Path(folder, "memory").rglob("rank-*.safetensors")), "memory stays for the restart"


def test_a_save_that_waits_for_memory_gives_up_with_the_grace_period(folder: str) -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    ops = HeldOps()
    with use_ops(ops):
        store = open_store(folder, memory="9KB", timeout_s=60.0)  # one slot
    guard = store.guard_preemption(signals=[signal.SIGUSR2], grace_s=1.0)
    started = time.monotonic()
    with guard:
        store.save(_state(1), step=1)
        assert ops.is_held.wait(10.0)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        with pytest.raises(TierFullError):
            store.save(_state(2), step=2)
    assert time.monotonic() - started < 30.0
    ops.go.set()
    store.close()
    signal.signal(signal.SIGUSR2, before)
