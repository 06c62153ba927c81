"""SIGTERM to real ranks: one stop step, a committed snapshot, whatever the main threads are doing (P6, P7)."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardstore import list_snapshots
from shardstore.tiers.fileops import use_ops
from tests.faults.breaking_ops import WatchedOps
from tests.faults.scenario import Job, open_store
from tests.ranks import RanksFailedError, run_ranks

NUM_STEPS = 50
NUM_SEEDS = 20


def _train(job: Job, step: int) -> None:
    """A step that no rank finishes without the others."""
    job.fill(step)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()


def _note(calls: list[int], signum: int, _frame: object) -> None:
    calls.append(signum)


def _signal_self_later(delay_s: float) -> None:
    threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGTERM)).start()


def _stop_at_random_moments(rank: int, folder: str) -> list[dict[str, Any]]:
    job, results = Job(rank), []
    for seed in range(NUM_SEEDS):
        rng = random.Random(seed)
        victims = rng.choice([[0], [1], [0, 1]])
        at, delay_s = rng.randrange(NUM_STEPS - 5), rng.uniform(0.0, 0.003)
        calls: list[int] = []
        signal.signal(signal.SIGTERM, partial(_note, calls))
        mine = signal.getsignal(signal.SIGTERM)
        place = Path(folder, str(seed))
        place.mkdir(exist_ok=True)
        stopped, answers = None, []
        with open_store(str(place)) as store, store.guard_preemption(grace_s=20.0) as guard:
            for step in range(NUM_STEPS):
                if step == at and rank in victims:
                    _signal_self_later(delay_s)
                _train(job, step)
                stop = guard.should_stop(step)
                answers.append(stop)
                if stop or step % 7 == 0:
                    store.save(job.state, step=step)
                if stop:
                    stopped = step
                    break
            is_known = guard.is_preempted
        dist.barrier()
        newest = list_snapshots(place / "root")[-1].step
        with open_store(str(place)) as again:
            job.fill(-1)
            restored = again.restore(job.state).step
        results.append(
            {
                "stopped": stopped,
                "newest": newest,
                "restored": restored,
                "seen": job.steps_seen(),
                "calls": len(calls) - (rank in victims),
                "handler is back": signal.getsignal(signal.SIGTERM) is mine,
                "known": is_known,
            }
        )
    return results


@pytest.mark.slow
def test_all_ranks_stop_at_one_step_with_a_committed_snapshot(folder: str) -> None:
    """C106, 20 seeds."""
    of_ranks = run_ranks(2, _stop_at_random_moments, folder, timeout_s=100.0)
    for seed, (first, second) in enumerate(zip(*of_ranks, strict=True)):
        what = f"seed {seed}: {first}, {second}"
        assert first == second, what
        assert first["stopped"] is not None, what
        assert first["newest"] == first["stopped"] == first["restored"], what
        assert first["seen"] == {first["stopped"]}, what
        assert first["calls"] == 0, what
        assert first["handler is back"], what
        assert first["known"], what


class SlowDisk(WatchedOps):
    """Takes its time for each piece that goes to the root, once armed."""

    def __init__(self, piece_s: float) -> None:
        super().__init__(lambda name, _at: time.sleep(piece_s) if name == "write_at" else None)


_PIECES = 3
_BIG_BYTES = _PIECES * (64 << 20) - (8 << 20)
"""Written in so many pieces of 64 MiB."""


def _big(step: int) -> dict[str, Any]:
    return {"w": torch.full((_BIG_BYTES,), step, dtype=torch.uint8), "step": {"is": step}}


def _native_call(rank: int, folder: str) -> None:
    """Rank 0 computes for 20 s in one native call, rank 1 waits for it in a collective."""
    ops = SlowDisk(0.7)
    with use_ops(ops):
        store = open_store(folder, memory="2GiB")
    guard = store.guard_preemption(grace_s=10.0)
    root = Path(folder, "root")
    with guard:
        store.save(_big(0), step=0).wait(30)
        ops.arm()
        for step in (1, 2, 3):
            store.save(_big(step), step=step)
            guard.should_stop(step)
        pids = [0, 0]
        dist.all_gather_object(pids, os.getpid())

        def watch() -> None:
            signalled = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)
            while time.monotonic() - signalled < 10.0:
                steps = [info.step for info in list_snapshots(root)]
                if 3 in steps:
                    Path(folder, "committed").write_text(str(steps))
                    break
                time.sleep(0.05)
            for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
                os.kill(pid, signal.SIGKILL)

        if rank == 0:
            threading.Thread(target=watch, daemon=True).start()
            while True:
                hashlib.pbkdf2_hmac("sha256", b"x", b"y", 50_000_000)
        dist.barrier()


def _restored(rank: int, folder: str) -> tuple[int, set[int], list[int]]:
    with open_store(folder, memory="2GiB") as store:
        live = _big(255)
        report = store.restore(live)
        listed = [info.step for info in store.snapshots() if "root" in info.tiers]
    return report.step, {*live["w"].unique().tolist(), live["step"]["is"]}, listed


@pytest.mark.slow
def test_the_newest_is_committed_during_a_long_native_call(folder: str) -> None:
    """C108: past older ones, which a slow disk would have written first."""
    with pytest.raises(RanksFailedError, match="exit code -9"):
        run_ranks(2, _native_call, folder, timeout_s=60.0)
    assert Path(folder, "committed").read_text() == "[0, 3]"
    for step, seen, _listed in run_ranks(2, _restored, folder):
        assert step == 3
        assert seen == {3}


def _too_little_time(rank: int, folder: str) -> dict[str, Any]:
    ops = SlowDisk(1.5)
    with use_ops(ops):
        store = open_store(folder, memory="2GiB")
    calls: list[int] = []
    signal.signal(signal.SIGTERM, partial(_note, calls))
    with store, store.guard_preemption(grace_s=2.0) as guard:
        store.save(_big(1), step=1).wait(30)
        ops.arm()
        store.save(_big(2), step=2)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        step = 3
        while not guard.should_stop(step):
            step += 1
        os.kill(os.getpid(), signal.SIGTERM)  # a second one, during the flush
        started = time.monotonic()
    dist.barrier()
    return {
        "calls": len(calls) - (rank == 0),
        "in time": time.monotonic() - started < 10.0,
        "listed": [info.step for info in list_snapshots(Path(folder, "root"))],
    }


@pytest.mark.slow
def test_what_is_not_written_in_time_is_invisible_and_stays_in_memory(folder: str) -> None:
    """A second signal meanwhile ends nothing; the user's handler runs once for each."""
    expected = {"calls": 1, "in time": True, "listed": [1]}
    assert run_ranks(2, _too_little_time, folder) == [expected] * 2
    for step, seen, _listed in run_ranks(2, _restored, folder):
        assert step == 2, "memory outlives the process"
        assert seen == {2}


def _rank_0_dies(rank: int, folder: str) -> bool:
    store = open_store(folder)
    job = Job(rank)
    with store, store.guard_preemption(grace_s=3.0, signals=[signal.SIGUSR1]) as guard:
        job.fill(1)
        store.save(job.state, step=1).wait(20)
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGUSR1)
        started = time.monotonic()
        while not guard.is_preempted:
            time.sleep(0.01)
        assert guard.should_stop(2) is False, "nobody may act alone"
        assert time.monotonic() - started < 10.0
    return True


@pytest.mark.slow
def test_nobody_hangs_when_the_rank_that_decides_is_dead(folder: str) -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(2, _rank_0_dies, folder)
    assert failed.value.failed_ranks == (0,), failed.value


def _raises_in_the_grace_period(rank: int, folder: str) -> None:
    store = open_store(folder)
    job = Job(rank)
    try:
        with store, store.guard_preemption(grace_s=5.0) as guard:
            job.fill(1)
            store.save(job.state, step=1)
            os.kill(os.getpid(), signal.SIGTERM)
            while not guard.is_preempted:
                time.sleep(0.01)
            raise KeyError("the trainer's own")
    except KeyError:
        pass
    for thread in threading.enumerate():  # which the end of the process waits for
        if thread.name == "shardstore-leave":
            thread.join()


@pytest.mark.slow
def test_a_loop_that_raises_in_the_grace_period_leaves_a_snapshot(folder: str) -> None:
    run_ranks(2, _raises_in_the_grace_period, folder)
    assert [info.step for info in list_snapshots(Path(folder, "root"))] == [1]
