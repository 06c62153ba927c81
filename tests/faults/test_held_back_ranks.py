"""A writer held back on some ranks: saves go on until memory is full, then all ranks do the same."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from shardstore import SaveFailedError, SnapshotStore, TierFullError
from shardstore.tiers.fileops import use_ops
from tests.faults.held_writer import HeldWriter
from tests.faults.scenario import open_store
from tests.ranks import run_ranks

MIB = 1 << 20
NUM_SLOTS = 3
BUDGET = NUM_SLOTS * 4 * MIB + MIB


def _fill(state: dict[str, torch.Tensor], rank: int, step: int) -> None:
    state["w"].fill_(100 * step + rank)


def _values(state: dict[str, torch.Tensor]) -> set[float]:
    return set(state["w"].unique().tolist())  # type: ignore[no-untyped-call]


def _restore_all(store: SnapshotStore, rank: int) -> list[int]:
    """Every listed snapshot, each with the values of its own step only."""
    state = {"w": torch.zeros(MIB)}
    steps = [info.step for info in store.snapshots()]
    for step in reversed(steps):
        state["w"].zero_()
        assert store.restore(state, step=step).step == step
        assert _values(state) == {100.0 * step + rank}, step
    return steps


def _held(rank: int, folder: str, held: tuple[int, ...], on_full: str) -> dict[str, Any]:
    ops = HeldWriter(held=rank in held)
    with use_ops(ops):
        store = open_store(folder, memory=BUDGET, on_full=on_full, timeout_s=40.0)
    state = {"w": torch.zeros(MIB)}
    handles, in_time = [], []
    for step in range(1, NUM_SLOTS + 1):
        _fill(state, rank, step)
        handles.append(store.save(state, step=step))
        in_time.append(not ops.go.is_set())
    if rank in held:
        assert ops.writing.wait(30)
    torch.distributed.barrier()
    # One more than there is room for: on a thread of its own, because "wait" returns once we let go.
    _fill(state, rank, NUM_SLOTS + 1)
    after_go: list[bool] = []

    def one_more() -> None:
        handles.append(store.save(state, step=NUM_SLOTS + 1))
        after_go.append(ops.go.is_set())

    saver = threading.Thread(target=one_more)
    saver.start()
    if on_full != "wait":
        saver.join(30)
        assert not saver.is_alive(), "it waits for the writer"
    torch.distributed.barrier()  # nobody lets go before every rank has come to its last save
    ops.go.set()
    saver.join(30)
    _fill(state, rank, -1)
    found = {
        "in_time": in_time,
        "after_go": after_go,
        "taken": [handle.wait(40) is not None for handle in handles],
        "steps": _restore_all(store, rank),
        "skipped": store.stats().num_skipped,
    }
    _fill(state, rank, 9)
    assert store.save(state, step=9).wait(40) is not None
    store.close()
    with SnapshotStore(Path(folder) / "root", memory=0, timeout_s=40.0) as reopened:
        found["on_root"] = _restore_all(reopened, rank)
    return found


@pytest.mark.parametrize("held", [(0, 1), (1,)], ids=["both held", "rank 1 held"])
@pytest.mark.parametrize("on_full", ["wait", "skip", "direct"])
def test_saves_behind_a_held_writer_go_on_until_memory_is_full(
    folder: str, on_full: str, held: tuple[int, ...]
) -> None:
    one, other = run_ranks(2, _held, folder, held, on_full, timeout_s=100.0)
    assert one == other
    assert one["in_time"] == [True] * NUM_SLOTS, "none of them waited for the writer"
    assert one["after_go"] == [on_full == "wait"]
    taken = [True] * NUM_SLOTS + [on_full != "skip"]
    assert one["taken"] == taken
    assert one["steps"] == [step for step, is_taken in enumerate(taken, 1) if is_taken]
    assert one["skipped"] == (on_full == "skip")
    assert one["on_root"] == [*one["steps"], 9]


def _never_let_go(rank: int, folder: str) -> dict[str, Any]:
    ops = HeldWriter()
    with use_ops(ops):
        store = open_store(folder, memory=BUDGET, timeout_s=3.0)
    state = {"w": torch.zeros(MIB)}
    outcomes: list[str] = []
    for step in range(1, NUM_SLOTS + 2):
        _fill(state, rank, step)
        try:
            store.save(state, step=step)
            outcomes.append("taken")
        except (TierFullError, SaveFailedError) as error:
            outcomes.append(type(error).__name__)
    torch.distributed.barrier()
    ops.go.set()
    for _ in range(2):
        try:
            store.drain()
        except SaveFailedError:
            pass
    torch.distributed.barrier()
    steps = _restore_all(store, rank)
    store.take_leave("the test ends")
    return {"outcomes": outcomes, "steps": steps}


def test_a_writer_that_nobody_lets_go_is_told_on_all_ranks_and_mixes_nothing(folder: str) -> None:
    one, other = run_ranks(2, _never_let_go, folder, timeout_s=100.0)
    assert one["outcomes"][:NUM_SLOTS] == other["outcomes"][:NUM_SLOTS] == ["taken"] * NUM_SLOTS
    assert one["outcomes"][-1] == other["outcomes"][-1] != "taken"
    assert one["steps"] == other["steps"]
