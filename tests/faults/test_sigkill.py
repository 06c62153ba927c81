"""Real SIGKILL at points spread over a save: a restart finds the old or the new step, whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from shardstore.tiers.fileops import use_ops
from tests.faults.breaking_ops import WatchedOps, kill_at
from tests.faults.scenario import Job, open_store, share_pids
from tests.ranks import RanksFailedError, run_ranks

NUM_POINTS = 20 if os.environ.get("SHARDSTORE_NIGHTLY") == "1" else 10
"""Of each kind; test_named_points and test_crash_everywhere end lives at hundreds of others."""
NUM_AT_A_TIME = 4


def _save_two(
    rank: int, folder: str, at: int, only_rank: int | None, memory: str | int
) -> list[str]:
    """Commit step 1, then save step 2 and die at operation `at` of it."""
    pids = share_pids(rank, folder)
    ops = WatchedOps()
    if only_rank is None or only_rank == rank:
        victims = pids if only_rank is None else [pids[rank]]
        ops = WatchedOps(kill_at(at, victims))
    with use_ops(ops):
        store = open_store(folder, timeout_s=20.0 if only_rank is None else 5.0, memory=memory)
    job = Job(rank)
    job.fill(1)
    store.save(job.state, step=1).wait(20)
    job.fill(2)
    ops.arm()
    store.save(job.state, step=2).wait(20)
    ops.disarm()
    store.close(keep_memory=True)
    return ops.names


def _restart(rank: int, folder: str) -> tuple[int, set[int], int]:
    store = open_store(folder)
    job = Job(rank)
    report = store.restore(job.state)
    seen = job.steps_seen()
    job.fill(3)
    store.save(job.state, step=3).wait(20)
    job.fill(-1)
    again = store.restore(job.state).step
    assert job.steps_seen() == {3}
    store.close()
    return report.step, seen, again


def _count_operations(victim: int | None, memory: str | int) -> int:
    """Operations of the victim, or of rank 0, which commits; the last may come after the test's end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        names = run_ranks(2, _save_two, folder, 0, None, memory)
    return len(names[victim or 0]) - 1


def _points(victim: int | None, memory: str | int) -> list[int]:
    total = _count_operations(victim, memory)
    assert total >= 10, f"a save has only {total} operations: what became of the rest?"
    num_points = NUM_POINTS if memory else NUM_POINTS // 2  # streamed: fewer operations
    return sorted({1 + round(i * (total - 1) / (num_points - 1)) for i in range(num_points)})


def _kill_and_restart(victim: int | None, memory: str | int, at: int) -> int:
    """One life that ends at operation `at`, and the next one; returns the step that was restored."""
    folder = tempfile.mkdtemp(prefix="shardstore-test-", dir="/dev/shm")
    try:
        with pytest.raises(RanksFailedError, match="exit code -9"):
            run_ranks(2, _save_two, folder, at, victim, memory)
        results = run_ranks(2, _restart, folder)
        steps = {step for step, _, _ in results}
        assert len(steps) == 1, f"ranks restored different steps after a kill at {at}: {results}"
        assert steps <= {1, 2}
        for step, seen, again in results:
            assert seen == {step}, f"kill at operation {at}: {results}"
            assert again == 3
        left = [p for p in (Path(folder) / "memory").rglob("*") if p.is_file()]
        assert not left, f"close left memory files: {left}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return steps.pop()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("victim", "memory"),
    [(None, "64MiB"), (0, "64MiB"), (1, "64MiB"), (None, 0)],
    ids=["all ranks", "rank 0", "rank 1", "all ranks, streamed"],
)
def test_a_restart_after_sigkill_restores_one_whole_step_on_all_ranks(
    victim: int | None, memory: str | int
) -> None:
    # Start-up needs the processors; who outlives another rank waits for a deadline.
    num_at_a_time = NUM_AT_A_TIME if victim is None else 2 * NUM_AT_A_TIME
    with ThreadPoolExecutor(num_at_a_time) as pool:
        restored = set(
            pool.map(partial(_kill_and_restart, victim, memory), _points(victim, memory))
        )
    if victim is None:
        assert restored == {1, 2}, "the points did not reach both sides of the commit"
