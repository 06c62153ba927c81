"""One rank fails or stops: every rank raises within the deadline and names it; live state is unchanged."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardstore import (
    CoordinationError,
    CoordinationTimeoutError,
    SaveFailedError,
    ShardStoreError,
    StateMismatchError,
)
from shardstore.tiers.fileops import use_ops
from tests.faults.breaking_ops import WatchedOps, raise_at
from tests.faults.scenario import Job, open_store
from tests.ranks import run_ranks


def _write_fails_on_rank_1(rank: int, folder: str) -> dict[str, Any]:
    ops = WatchedOps()
    if rank == 1:
        ops = WatchedOps(raise_at("open_new rank-00001", OSError(errno.EIO, "broken disk")))
    with use_ops(ops):
        store = open_store(folder)
    job = Job(rank)
    job.fill(1)
    store.save(job.state, step=1).wait(20)
    ops.arm()
    job.fill(2)
    started = time.monotonic()
    with pytest.raises(SaveFailedError) as at_wait:
        store.save(job.state, step=2).wait(20)
    took_s = time.monotonic() - started
    value = torch.ones(())
    dist.all_reduce(value)  # training goes on in between
    job.fill(3)
    with pytest.raises(SaveFailedError) as at_save:
        store.save(job.state, step=3)
    store.drain()
    listed = [info.step for info in store.snapshots()]
    job.fill(-1)
    restored = store.restore(job.state, step=1).step
    seen = job.steps_seen()
    store.close()
    return {
        "wait": str(at_wait.value),
        "save": str(at_save.value),
        "ranks": at_wait.value.failed_ranks,
        "took_s": took_s,
        "sum": value.item(),
        "listed": listed,
        "restored": (restored, seen),
        "files": sorted(p.name for p in Path(folder, "root").glob("step-*")),
    }


def test_a_failed_write_on_one_rank_fails_the_save_everywhere_once_and_the_next_one_works(
    folder: str,
) -> None:
    results = run_ranks(2, _write_fails_on_rank_1, folder)
    assert results[0]["wait"] == results[1]["wait"]
    assert results[0]["save"] == results[1]["save"]
    for result in results:
        assert "rank 1" in result["wait"]
        assert "EIO" in result["wait"]
        assert result["ranks"] == (1,)
        assert result["took_s"] < 15
        assert result["sum"] == 2
        assert result["listed"] == [1, 3]
        assert result["restored"] == (1, {1})
        assert len(result["files"]) == 2


def _save_raises_on_rank_1(rank: int, folder: str) -> list[str]:
    store = open_store(folder)
    job = Job(rank)
    job.fill(1)
    bad = {
        **job.state,
        "odd": torch.eye(2).to_sparse() if rank == 1 else torch.zeros(1),
    }
    texts = []
    with pytest.raises(ShardStoreError) as caught:
        store.save(bad, step=1).wait(20)
    texts.append(str(caught.value))
    raised_at = []
    for step in range(2, 8):
        job.fill(step)
        dist.barrier()  # ranks train in step
        try:
            store.save(job.state, step=step).wait(20)
        except SaveFailedError as error:
            raised_at.append(step)
            texts.append(str(error))
    store.drain()
    texts += [str(raised_at), str([info.step for info in store.snapshots()])]
    store.close()
    return texts


def test_a_save_that_raises_on_one_rank_only_is_told_to_the_others_and_raised_by_the_same_save(
    folder: str,
) -> None:
    results = run_ranks(2, _save_raises_on_rank_1, folder)
    for texts in results:
        assert "odd" in texts[0]
        assert "rank 1" in texts[1]
        assert len(texts) == 4, f"it must be raised once: {texts}"
        assert texts[3] == "[2, 3, 4, 5, 6, 7]"
    assert results[0][1:] == results[1][1:]


def _all_raise(rank: int, folder: str) -> list[int]:
    store = open_store(folder)
    job = Job(rank)
    job.fill(1)
    with pytest.raises(TypeError, match="odd"):
        store.save({**job.state, "odd": object()}, step=1)
    store.save(job.state, step=2).wait(20)
    store.drain()
    steps = [info.step for info in store.snapshots()]
    store.close()
    return steps


def test_what_every_rank_raised_in_its_own_save_is_not_raised_again(folder: str) -> None:
    assert run_ranks(2, _all_raise, folder) == [[2], [2]]


def _only_warn(rank: int, folder: str) -> list[int]:
    ops = WatchedOps()
    if rank == 1:
        ops = WatchedOps(raise_at("allocate", OSError(errno.ENOSPC, "disk full")))
    with use_ops(ops):
        store = open_store(folder, on_error="warn", memory=0)
    job = Job(rank)
    job.fill(1)
    store.save(job.state, step=1).wait(20)
    ops.arm()
    job.fill(2)
    handle = store.save(job.state, step=2)
    assert isinstance(handle.committed.exception(20), SaveFailedError)
    job.fill(3)
    store.save(job.state, step=3).wait(20)
    store.close()
    return [info.step for info in __import__("shardstore").list_snapshots(Path(folder) / "root")]


def test_on_error_warn_lets_training_go_on_after_a_full_disk(folder: str) -> None:
    assert run_ranks(2, _only_warn, folder) == [[1, 3], [1, 3]]


def _restore_fails_on_rank_1(rank: int, folder: str) -> tuple[str, bool, str]:
    store = open_store(folder)
    job = Job(rank)
    job.fill(1)
    store.save(job.state, step=1).wait(20)
    job.fill(7)
    before = [t.clone() for t in job.tensors()]
    state = job.state
    if rank == 1:
        state["extra"] = torch.zeros(2)
    with pytest.raises(StateMismatchError) as caught:
        store.restore(state)
    unchanged = all(torch.equal(a, b) for a, b in zip(before, job.tensors(), strict=True))
    report = store.restore(job.state)
    assert job.steps_seen() == {1}
    store.close()
    return str(caught.value), unchanged, str(report)


def test_a_mismatch_on_one_rank_is_raised_by_all_and_touches_nothing(folder: str) -> None:
    for text, unchanged, report in run_ranks(2, _restore_fails_on_rank_1, folder):
        assert "rank 1" in text
        assert "extra" in text
        assert unchanged
        assert report.startswith("step 1 from memory (2 ranks)")


class _Fussy:
    """A Stateful that refuses what it is given."""

    def __init__(self, *, refuse: bool) -> None:
        self.refuse = refuse

    def state_dict(self) -> dict[str, int]:
        return {"value": 1}

    def load_state_dict(self, _state: dict[str, int]) -> None:
        if self.refuse:
            raise KeyError("fussy")


def _apply_fails_on_rank_1(rank: int, folder: str) -> tuple[str, tuple[int, ...]]:
    store = open_store(folder)
    state = {"fussy": _Fussy(refuse=rank == 1)}
    store.save(state, step=1).wait(20)
    with pytest.raises(CoordinationError) as caught:
        store.restore(state)
    store.close()
    return str(caught.value), caught.value.failed_ranks


def test_a_load_state_dict_that_raises_is_told_everywhere_as_partly_applied(folder: str) -> None:
    for text, ranks in run_ranks(2, _apply_fails_on_rank_1, folder):
        assert "partly applied" in text
        assert "KeyError: 'fussy'" in text
        assert ranks == (1,)


def _stopped(rank: int, folder: str, victim: int, phase: str) -> tuple[str, str, float, bool]:
    store = open_store(folder, timeout_s=3.0)
    job = Job(rank)
    job.fill(1)
    store.save(job.state, step=1).wait(20)
    pids = Path(folder) / f"stopped-{rank}"
    pids.write_text(str(os.getpid()))
    dist.barrier()
    other = int((Path(folder) / f"stopped-{victim}").read_text())
    if rank == victim:
        waker = threading.Event()
        waker.wait(0.2)  # a head start for the other rank: both orders are right
        signal.raise_signal(signal.SIGSTOP)
    job.fill(5)
    before = [t.clone() for t in job.tensors()]
    started = time.monotonic()
    try:
        if phase == "restore":
            store.restore(job.state)
        else:
            store.save(job.state, step=2).wait(30)
        text, kind = "nothing was raised", ""
    except (CoordinationError, SaveFailedError) as error:
        text, kind = str(error), type(error).__name__
    took_s = time.monotonic() - started
    unchanged = all(torch.equal(a, b) for a, b in zip(before, job.tensors(), strict=True))
    if rank != victim:
        os.kill(other, signal.SIGCONT)
    store._abandon("the test ends")
    return text, kind, took_s, unchanged


@pytest.mark.parametrize("phase", ["restore", "save"])
def test_a_stopped_rank_is_named_within_the_deadline_and_raises_when_it_goes_on(
    folder: str, phase: str
) -> None:
    results = run_ranks(2, _stopped, folder, 1, phase)
    text, kind, took_s, unchanged = results[0]
    assert "rank 1" in text, text
    assert phase in text
    assert took_s < 20
    assert unchanged
    assert kind == ("CoordinationTimeoutError" if phase == "restore" else "SaveFailedError")
    late_text, late_kind, _, late_unchanged = results[1]
    assert late_kind in (kind, "CoordinationError"), late_text
    assert late_unchanged


@pytest.mark.parametrize("phase", ["restore", "save"])
def test_a_stopped_store_host_is_named_within_the_deadline(folder: str, phase: str) -> None:
    text, _, took_s, unchanged = run_ranks(2, _stopped, folder, 0, phase)[1]
    assert "rank 0" in text, text
    assert took_s < 20
    assert unchanged


def _different_calls(rank: int, folder: str) -> list[str]:
    store = open_store(folder)
    job = Job(rank)
    texts = []
    job.fill(1)
    with pytest.raises(SaveFailedError) as caught:
        store.save(job.state, step=5 + rank).wait(20)
    texts.append(str(caught.value))
    with pytest.raises(SaveFailedError):
        store.drain()
    store.save(job.state, step=9).wait(20)
    with pytest.raises(CoordinationError) as different:
        store.restore(job.state, step=9 if rank else None)
    texts.append(str(different.value))
    store.close()
    return texts


def test_ranks_that_disagree_on_step_or_arguments_are_told_both(folder: str) -> None:
    for save_text, restore_text in run_ranks(2, _different_calls, folder):
        assert "step-000000000005" in save_text
        assert "step-000000000006" in save_text
        assert "step=9" in restore_text
        assert "step=None" in restore_text


def _private_roots(rank: int, folder: str) -> tuple[str, str]:
    own = Path(folder) / f"host-{rank}"
    own.mkdir()
    with pytest.raises(CoordinationError) as caught:
        open_store(str(own))
    return str(caught.value), type(caught.value).__name__


def test_a_root_for_each_rank_is_refused_when_the_store_opens(folder: str) -> None:
    for text, _ in run_ranks(2, _private_roots, folder):
        assert "host-0" in text
        assert "host-1" in text


def _count_threads(rank: int, folder: str) -> bool:
    store = open_store(folder)
    job = Job(rank)
    for step in range(6):
        job.fill(step)
        store.save(job.state, step=step).wait(20)
    store.close()
    names = [t.name for t in threading.enumerate() if t.name.startswith("shardstore")]
    return not names


def test_close_leaves_no_thread_behind(folder: str) -> None:
    assert run_ranks(2, _count_threads, folder) == [True, True]


def test_timeout_errors_are_timeouts() -> None:
    assert issubclass(CoordinationTimeoutError, TimeoutError)
