"""Spilling of persist=False snapshots on several ranks, of which one needs the room, and may die."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shardstore.tiers.fileops import use_ops
from tests.faults.breaking_ops import WatchedOps, kill_at_point, raise_at
from tests.faults.scenario import Job, open_store, share_pids
from tests.ranks import RanksFailedError, run_ranks

_POINTS = ("spill kept", "post kept", "publish kept")


def _budget(rank: int, small: int) -> str:
    return "70KiB" if rank == small else "64MiB"  # two snapshots of this job


def _keep_many(rank: int, folder: str, small: int) -> list[Any]:
    store = open_store(folder, memory=_budget(rank, small))
    job = Job(rank)
    for step in range(1, 7):
        job.fill(step)
        store.save(job.state, step=step, persist=False).wait(20)
    found: list[Any] = []
    for step in range(1, 7):
        report = store.restore(job.state, step=step)
        found.append((report.step, job.steps_seen()))
    found.append(store.stats().num_spilled)
    store.close()
    return found


@pytest.mark.parametrize("small", [0, 1])
def test_one_rank_without_room_makes_all_ranks_spill(folder: str, small: int) -> None:
    one, other = run_ranks(2, _keep_many, folder, small)
    assert one == other
    assert one[:-1] == [(step, {step}) for step in range(1, 7)]
    assert one[-1] >= 2


def _fail_on_one_rank(rank: int, folder: str, broken: int) -> list[Any]:
    ops = WatchedOps(raise_at("write_at", OSError(5, "broken")))
    with use_ops(ops):
        store = open_store(folder, memory=_budget(rank, 0), on_full="skip")
    job = Job(rank)
    step = 0
    while True:
        step += 1
        job.fill(step)
        if rank == broken and step > 1:
            ops.arm()
        if store.save(job.state, step=step, persist=False).wait(20) is None:
            break
    store._pipeline._kept.stop(20)
    found: list[Any] = []
    for kept in range(1, step):
        report = store.restore(job.state, step=kept)
        found.append((report.step, job.steps_seen(), report.tier))
    store.close()
    return found


@pytest.mark.parametrize("broken", [0, 1])
def test_a_spill_that_fails_on_one_rank_takes_no_copy_from_any(folder: str, broken: int) -> None:
    one, other = run_ranks(2, _fail_on_one_rank, folder, broken)
    assert one == other
    assert one == [(step, {step}, "memory (2 ranks)") for step in range(1, len(one) + 1)]


def _die_while_spilling(rank: int, folder: str, point: str, victim: int | None) -> None:
    pids = share_pids(rank, folder)
    ops = WatchedOps()
    if victim is None or victim == rank:
        ops = WatchedOps(kill_at_point(point, pids if victim is None else [pids[rank]]))
        ops.arm()
    with use_ops(ops):
        store = open_store(folder, memory=_budget(rank, 0), timeout_s=20.0)
    job = Job(rank)
    for step in range(1, 9):
        job.fill(step)
        store.save(job.state, step=step, persist=False).wait(20)


def _come_back(rank: int, folder: str) -> list[tuple[int, set[int]]]:
    store = open_store(folder)
    job = Job(rank)
    steps = [info.step for info in store.snapshots()]
    newest = store.restore(job.state).step
    found = [(newest, job.steps_seen())]
    for step in steps:
        report = store.restore(job.state, step=step)
        found.append((report.step, job.steps_seen()))
    store.close()
    return found


def _kill_and_come_back(point: str, victim: int | None) -> None:
    folder = tempfile.mkdtemp(prefix="shardstore-test-", dir="/dev/shm")
    case = f"{victim} killed at {point}"
    try:
        with pytest.raises(RanksFailedError, match="exit code -9"):
            run_ranks(2, _die_while_spilling, folder, point, victim)
        one, other = run_ranks(2, _come_back, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert one == other, case
    steps = [step for step, _ in one[1:]]
    assert len(steps) >= 2, case
    assert steps == list(range(1, len(steps) + 1)), f"{case}: every step that was complete is there"
    assert one[0] == (steps[-1], {steps[-1]}), case
    assert one[1:] == [(step, {step}) for step in steps], case


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_kill_while_spilling_loses_no_snapshot() -> None:
    cases = [(point, victim) for point in _POINTS for victim in (None, 0, 1)]
    cases.remove(("publish kept", 1))  # rank 0 alone publishes
    with ThreadPoolExecutor(len(cases)) as pool:  # who outlives another rank waits for a deadline
        list(pool.map(_kill_and_come_back, *zip(*cases, strict=True)))
