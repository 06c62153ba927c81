"""Ranks of which some have memory for the state and others stream it to the root."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from shardstore.tiers.fileops import use_ops
from tests.faults.breaking_ops import WatchedOps, hold_at, raise_at
from tests.faults.scenario import Job, open_store
from tests.ranks import run_ranks


def _budget(rank: int, streaming: tuple[int, ...]) -> str:
    return "1KiB" if rank in streaming else "64MiB"


def _save_and_leave(rank: int, folder: str, streaming: tuple[int, ...]) -> list[Any]:
    store = open_store(folder, memory=_budget(rank, streaming))
    job = Job(rank)
    found: list[Any] = []
    for step in (1, 2, 3):
        job.fill(step)
        snapshot = store.save(job.state, step=step)
        job.fill(-1)
        report = store.restore(job.state)  # waits for what only the root has
        found.append((report.step, job.steps_seen(), report.tier))
        info = snapshot.wait(20)
        assert info is not None
        found.append(info.tiers)
    store.close(keep_memory=True)
    return found


def _come_back(rank: int, folder: str) -> tuple[int, set[int], str]:
    store = open_store(folder)
    job = Job(rank)
    report = store.restore(job.state)
    store.close()
    return report.step, job.steps_seen(), report.tier


@pytest.mark.parametrize("streaming", [(0,), (1,), (0, 1)])
def test_a_snapshot_that_some_ranks_stream_is_one_snapshot(
    folder: str, streaming: tuple[int, ...]
) -> None:
    found = run_ranks(2, _save_and_leave, folder, streaming)
    for rank, steps in enumerate(found):
        assert [s[:2] for s in steps[::2]] == [(1, {1}), (2, {2}), (3, {3})], (rank, steps)
        assert steps[1::2] == [("root",)] * 3
    tier = "root (2 ranks)" if len(streaming) == 2 else "memory (1 rank), root (1 rank)"
    assert [steps[0][2] for steps in found] == [tier] * 2
    assert run_ranks(2, _come_back, folder) == [(3, {3}, tier)] * 2


def _one_cannot_write(rank: int, folder: str) -> list[Any]:
    ops = WatchedOps(raise_at("write_at", OSError(5, "broken")))
    with use_ops(ops):
        store = open_store(folder, memory=_budget(rank, (1,)))
    job = Job(rank)
    job.fill(1)
    store.save(job.state, step=1).wait(20)
    if rank == 1:
        ops.arm()
    job.fill(2)
    handle = store.save(job.state, step=2)
    error = handle.committed.exception(20)
    raised = []
    for step in (3, 4, 5):
        job.fill(step)
        try:
            store.save(job.state, step=step)
        except Exception as late:  # noqa: BLE001 - compared below
            raised.append((step, str(late)))
    store.drain()
    listed = [info.step for info in store.snapshots()]
    store.close()
    return [type(error).__name__, str(error), raised, listed]


def test_a_streaming_rank_that_cannot_write_is_told_at_the_same_save_on_all_ranks(
    folder: str,
) -> None:
    one, other = run_ranks(2, _one_cannot_write, folder)
    assert one == other
    kind, text, raised, listed = one
    assert kind == "SaveFailedError"
    assert "rank 1: TierError: root: write" in text
    assert "EIO" in text
    assert len(raised) == 1
    assert listed == [1, 3, 4, 5]


def _one_skips(rank: int, folder: str) -> list[Any]:
    reached, go = threading.Event(), threading.Event()
    ops = WatchedOps(hold_at("point:spill", reached, go))
    with use_ops(ops):
        store = open_store(folder, memory="64MiB" if rank == 0 else "45KiB", on_full="skip")
    job = Job(rank)
    handles = []
    ops.arm()
    for step in range(1, 8):
        job.fill(step)
        handles.append(store.save(job.state, step=step))
    go.set()
    found = [handle.wait(20) is not None for handle in handles]
    steps = [info.step for info in store.snapshots()]
    assert steps == [step for step, taken in enumerate(found, 1) if taken]
    for step in steps:
        assert store.restore(job.state, step=step).step == step
        assert job.steps_seen() == {step}
    job.fill(9)
    assert store.save(job.state, step=9).wait(20) is not None
    store.close()
    return found


def test_a_save_that_one_rank_skips_is_skipped_on_all(folder: str) -> None:
    one, other = run_ranks(2, _one_skips, folder)
    assert one == other
    assert one[0], "the first one has room"
    assert not all(one), "rank 1 has no room for seven"
