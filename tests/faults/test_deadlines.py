"""Every wait ends: work of others moves a deadline, waiting for each other does not (P2, G4)."""

from __future__ import annotations

import threading
import time

import torch

from shardstore import CoordinationError, SaveFailedError
from shardstore.tiers.fileops import FileOps, use_ops
from tests.faults.scenario import Job, open_store
from tests.ranks import run_ranks


class _Hanging(FileOps):
    """Writes hang after the first chunk of a file until `go`."""

    def __init__(self) -> None:
        self.armed = False
        self.go = threading.Event()

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        if self.armed and offset > 0:
            self.go.wait(60)
        super().write_at(fd, data, offset)


def test_a_disk_that_hangs_half_way_fails_the_save_at_the_deadline(folder: str) -> None:
    ops = _Hanging()
    with use_ops(ops):
        store = open_store(folder, memory="200MiB", timeout_s=2.0)
    ops.armed = True
    started = time.monotonic()
    handle = store.save({"w": torch.zeros(6 << 20)}, step=1)
    error = handle.committed.exception(25)
    assert isinstance(error, SaveFailedError)
    assert "no progress for 2 s" in str(error)
    assert time.monotonic() - started < 12
    ops.go.set()
    store.take_leave("the test ends")


def _cross_calls(rank: int, folder: str) -> tuple[str, float]:
    """Rank 0 saves while rank 1 restores: each waits for the other."""
    store = open_store(folder, timeout_s=1.5)
    job = Job(rank)
    started = time.monotonic()
    text = "nothing was raised"
    try:
        if rank == 0:
            store.save(job.state, step=1).wait(40)
        else:
            store.restore(job.state)
    except (CoordinationError, SaveFailedError) as error:
        text = str(error)
    took_s = time.monotonic() - started
    store._abandon("the test ends")
    return text, took_s


def test_ranks_that_wait_for_each_other_do_not_keep_each_other_waiting(folder: str) -> None:
    for text, took_s in run_ranks(2, _cross_calls, folder):
        assert "no progress" in text
        assert took_s < 20


def _slow_rank(rank: int, folder: str) -> float:
    """Rank 2 works, slowly, for longer than the deadline; nobody gives up on it or on who waits for it."""

    class Slow(FileOps):
        def write_at(self, fd: int, data: memoryview, offset: int) -> None:
            if rank == 2 and len(data) > 1 << 20:
                threading.Event().wait(1.2)  # a slow link
            super().write_at(fd, data, offset)

    with use_ops(Slow()):
        store = open_store(folder, memory="400MiB", timeout_s=2.5)
    state = {"w": torch.full((50 << 20,), float(rank))}
    started = time.monotonic()
    assert store.save(state, step=1).wait(60) is not None
    took_s = time.monotonic() - started
    store.close()
    return took_s


def test_a_slow_rank_that_makes_progress_is_no_failure(folder: str) -> None:
    took = run_ranks(3, _slow_rank, folder, timeout_s=100)
    assert min(took) > 2.5 * 1.25, (
        "the save must take longer than any deadline for this to mean a thing"
    )
