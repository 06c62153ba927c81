"""Slots are not written to while a held writer still reads them, whatever the budget and the number of saves."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from shardstore import SnapshotStore
from shardstore.tiers.fileops import FileOps, use_ops

MIB = 1 << 20


class OneStepAtATime(FileOps):
    """Every large write stops half way, and goes on when the next save is at its door or has to wait."""

    def __init__(self) -> None:
        self.turns = threading.Semaphore(0)
        self.is_free = False

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        if len(data) > 1 << 20 and not self.is_free:
            half = len(data) // 2 // 4096 * 4096
            super().write_at(fd, data[:half], offset)
            assert self.turns.acquire(timeout=60)
            data, offset = data[half:], offset + half
        super().write_at(fd, data, offset)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("on_full", ["wait", "skip"])
def test_no_snapshot_holds_values_of_another(folder: str, on_full: str, num_slots: int) -> None:
    ops = OneStepAtATime()
    with use_ops(ops):
        store = SnapshotStore(
            Path(folder) / "root", memory=num_slots * 4 * MIB + MIB, memory_dir=folder,
            on_full=on_full, timeout_s=60.0,  # type: ignore[arg-type]
        )  # fmt: skip
    state = {"w": torch.zeros(MIB)}
    handles = []
    for step in range(1, 16):
        state["w"].fill_(step)
        if on_full == "wait" or step % 4 == 0:
            ops.turns.release()  # one write may end, at some point during this save or after it
        handles.append(store.save(state, step=step))
    state["w"].fill_(-1)
    ops.is_free = True
    ops.turns.release(100)
    taken = [step for step, handle in enumerate(handles, 1) if handle.wait(60) is not None]
    assert taken[0] == 1
    if on_full == "wait":
        assert taken == list(range(1, 16))
    assert [info.step for info in store.snapshots()] == taken
    for step in [*reversed(taken), *taken]:
        store.restore(state, step=step)
        assert set(state["w"].unique().tolist()) == {step}  # type: ignore[no-untyped-call]
    store.close()
    with SnapshotStore(Path(folder) / "root", memory=0) as reopened:
        for step in taken:
            reopened.restore(state, step=step)
            assert set(state["w"].unique().tolist()) == {step}  # type: ignore[no-untyped-call]


def test_a_save_behind_a_held_writer_copies_and_returns(folder: str) -> None:
    """Shown by counting: while the writer stands, saves do nothing but reserve and stage."""
    done: list[str] = []
    held, go = threading.Event(), threading.Event()

    class Ops(FileOps):
        def point(self, name: str) -> None:
            if threading.current_thread() is threading.main_thread():
                done.append(name)
            if name == "spill":
                held.set()
                assert go.wait(60)

        def write_at(self, fd: int, data: memoryview, offset: int) -> None:
            if threading.current_thread() is threading.main_thread():
                done.append("write")
            super().write_at(fd, data, offset)

    with use_ops(Ops()):
        store = SnapshotStore(
            Path(folder) / "root", memory="64MiB", memory_dir=folder, on_full="skip", timeout_s=60.0
        )
    state = {"w": torch.zeros(MIB)}
    store.save(state, step=0)
    assert held.wait(30)
    done.clear()
    for step in range(1, 10):
        state["w"].fill_(step)
        assert store.save(state, step=step).staged.done()
    assert done == ["stage", "staged"] * 9
    assert store.stats().num_skipped == 0
    assert all(not handle.settled.is_set() for handle in store._pipeline.pending)
    go.set()
    store.close()


@pytest.mark.slow
def test_a_save_behind_a_writer_held_for_10_s_takes_as_long_as_a_copy(
    disk_folder: Path, folder: str
) -> None:
    """Until the budget is full; then `save` waits for the writer. Limits are wide: 10 s are 100 copies."""
    go = threading.Event()

    class Ops(FileOps):
        def write_at(self, fd: int, data: memoryview, offset: int) -> None:
            if len(data) > MIB:
                assert go.wait(60)
            super().write_at(fd, data, offset)

    state = {f"w{i}": torch.zeros(4 * MIB) for i in range(16)}
    copy = {name: tensor.clone() for name, tensor in state.items()}
    with use_ops(Ops()):
        store = SnapshotStore(
            disk_folder / "root", memory=3 * (257 * MIB), memory_dir=folder, timeout_s=60.0
        )
    store.warmup(state)
    timer = threading.Timer(10.0, go.set)
    timer.start()
    saves_s, copies_s = [], []
    for step in range(3):
        store._session.memory.wait_prepared(30.0)
        for tensor in state.values():
            tensor.fill_(step)
        started = time.perf_counter()
        warm = [copy[name].copy_(tensor) for name, tensor in state.items()]
        copies_s.append(time.perf_counter() - started)
        started = time.perf_counter()
        store.save(state, step=step)
        saves_s.append(time.perf_counter() - started)
        assert len(warm) == 16
    print("save / bare copy:", *(f"{s / c:.2f}" for s, c in zip(saves_s, copies_s, strict=True)))
    assert not go.is_set(), "the writer was still held"
    assert min(s / c for s, c in zip(saves_s, copies_s, strict=True)) < 3
    assert max(saves_s) < 3
    store.save(state, step=3)
    assert go.is_set(), "the budget was full: it waited"
    timer.join()
    store.drain()
    for step in range(3):
        store.restore(state, step=step)
        assert all(bool((tensor == step).all()) for tensor in state.values())
    store.close()
