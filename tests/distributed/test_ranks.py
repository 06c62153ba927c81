"""The launcher itself: results by rank, tracebacks of all ranks, no leftovers."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RanksFailedError, run_ranks


def _sum(rank: int, base: int) -> int:
    value = torch.tensor(base + rank)
    dist.all_reduce(value)
    return int(value)


def _fail_on_one(rank: int) -> None:
    if rank == 1:
        raise KeyError("rank one")
    dist.barrier()


def _die_on_one(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _hang_on_one(rank: int) -> None:
    if rank == 1:
        signal.pause()


def test_results_come_back_in_rank_order_after_a_collective() -> None:
    assert run_ranks(2, _sum, 10) == [21, 21]


def test_a_failing_rank_raises_with_its_traceback() -> None:
    with pytest.raises(RanksFailedError, match="rank one") as caught:
        run_ranks(2, _fail_on_one)
    assert 1 in caught.value.failed_ranks


def test_a_killed_rank_is_reported_with_its_exit_code() -> None:
    with pytest.raises(RanksFailedError, match="exit code -9"):
        run_ranks(2, _die_on_one)


def test_a_hanging_rank_is_killed_at_the_deadline() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailedError, match="killed"):
        run_ranks(2, _hang_on_one, timeout_s=3.0)
    assert time.monotonic() - start < 20
