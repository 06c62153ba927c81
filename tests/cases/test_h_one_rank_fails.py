"""Real bug reports of the kind "one rank fails, and the others hang or disagree" (C64 to C72)."""

from __future__ import annotations

import datetime
import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardstore import SaveFailedError, ShardStoreError, SnapshotStore
from shardstore.tiers.fileops import use_ops
from tests.cases.bits import (
    Outcomes,
    Refusal,
    assert_group_works,
    assert_refused,
    bits,
    refusal,
    soil,
)
from tests.faults.breaking_ops import WatchedOps, raise_at
from tests.faults.scenario import Job, open_store, share_pids

_DISK = OSError(errno.EIO, "broken disk")


def _open_breaking(folder: str, ops: WatchedOps, **options: Any) -> SnapshotStore:
    with use_ops(ops):
        return open_store(folder, **options)


def _breaking_on_rank_1(rank: int, match: str, error: OSError, times: int = 1) -> WatchedOps:
    return WatchedOps(raise_at(match, error, times) if rank == 1 else None)


def _error_in_write(rank: int, folder: str) -> dict[str, Any]:
    ops = _breaking_on_rank_1(rank, "write_at", _DISK)
    store = _open_breaking(folder, ops, memory=0)
    job = Job(rank)
    job.fill(1)
    store.save(job.state, step=1).wait(20)
    old = bits(job.state)
    job.fill(2)
    ops.arm()
    started = time.monotonic()
    failed = refusal(lambda: store.save(job.state, step=2).wait(20), job.state)
    took_s = time.monotonic() - started
    assert_group_works()
    with pytest.raises(SaveFailedError):
        store.drain()
    listed = [info.step for info in store.snapshots()]
    soil(job.state)
    store.restore(job.state)
    old_ok = bits(job.state) == old
    job.fill(3)
    store.save(job.state, step=3).wait(20)
    listed_after = [info.step for info in store.snapshots()]
    store.close()
    return {
        "failed": failed,
        "took_s": took_s,
        "listed": (listed, listed_after),
        "old_ok": old_ok,
    }


def _no_wait_next_save(rank: int, folder: str) -> tuple[int, Refusal]:
    ops = _breaking_on_rank_1(rank, "write_at", _DISK)
    store = _open_breaking(folder, ops, memory=0)
    job = Job(rank)
    ops.arm()
    job.fill(1)
    assert store.save(job.state, step=1).committed.exception(20) is not None
    for step in range(2, 6):
        assert_group_works()
        job.fill(step)
        try:
            store.save(job.state, step=step)
        except SaveFailedError as error:
            store.drain()
            steps = [info.step for info in store.snapshots()]
            store.close()
            assert steps == list(range(2, step + 1)), "the other saves must commit"
            return step, Refusal(type(error).__name__, str(error))
    raise AssertionError("no later save raised")


def _no_wait_close(rank: int, folder: str) -> Refusal:
    ops = _breaking_on_rank_1(rank, "write_at", _DISK)
    store = _open_breaking(folder, ops, memory=0)
    job = Job(rank)
    ops.arm()
    job.fill(1)
    store.save(job.state, step=1)
    assert_group_works()
    found = refusal(store.close, job.state)
    assert_group_works()
    return found


def _reported_once(rank: int, folder: str) -> list[str]:
    ops = _breaking_on_rank_1(rank, "fsync", _DISK)
    store = _open_breaking(folder, ops, memory=0)
    job = Job(rank)
    job.fill(1)
    ops.arm()
    first = store.save(job.state, step=1)
    assert isinstance(first.committed.exception(20), SaveFailedError)
    dist.barrier()  # every rank has heard of it: the next save raises it
    heard: list[str] = []
    job.fill(2)
    try:
        store.save(job.state, step=2)
    except SaveFailedError as error:
        heard.append(f"save 2: {error}")
    for name, call in (("drain", store.drain), ("close", store.close)):
        try:
            if name == "close":
                heard.append(str([info.step for info in store.snapshots()]))
            call()
        except SaveFailedError as error:
            heard.append(f"{name}: {error}")
    return heard


def _full_disk_only_warns(rank: int, folder: str) -> dict[str, Any]:
    ops = _breaking_on_rank_1(rank, "write_at", OSError(errno.ENOSPC, "no space"))
    store = _open_breaking(folder, ops, on_error="warn", memory=0)
    job = Job(rank)
    job.fill(1)
    ops.arm()
    error = store.save(job.state, step=1).committed.exception(20)
    assert_group_works()
    job.fill(2)
    store.save(job.state, step=2).wait(20)
    saved = bits(job.state)
    soil(job.state)
    report = store.restore(job.state)
    store.close()
    return {
        "failure": Refusal(type(error).__name__, str(error)),
        "step": report.step,
        "equal": bits(job.state) == saved,
    }


def _slow_write_and_a_short_group(rank: int, folder: str) -> int:
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    slow = threading.Event()

    def act(name: str, _at: int) -> None:
        if name.startswith("open_new rank-00001"):
            slow.wait(1.5)  # the write itself is slow: longer than the group's timeout

    ops = WatchedOps(act)
    store = _open_breaking(folder, ops, memory=0, process_group=group)
    ops.arm()
    job = Job(rank)
    job.fill(1)
    info = store.save(job.state, step=1).wait(20)
    assert info is not None
    store.close()
    return info.step


def _stopped(rank: int, folder: str) -> dict[str, tuple[str, str, float, bool]]:
    pids = share_pids(rank, folder)
    job = Job(rank)
    found = {}
    for phase in ("restore", "save"):
        dist.barrier()
        own = Path(folder) / phase
        own.mkdir(exist_ok=True)
        store = open_store(str(own), timeout_s=2.0)
        job.fill(1)
        store.save(job.state, step=1).wait(20)
        job.fill(5)
        before = bits(job.state)
        dist.barrier()
        if rank == 1:
            signal.raise_signal(signal.SIGSTOP)
        else:
            _wait_until_stopped(pids[1])
        started = time.monotonic()
        try:
            if phase == "restore":
                store.restore(job.state)
            else:
                store.save(job.state, step=2).wait(30)
            text, kind = "nothing was raised", ""
        except ShardStoreError as error:
            text, kind = str(error), type(error).__name__
        took_s = time.monotonic() - started
        if rank == 0:
            os.kill(pids[1], signal.SIGCONT)
        found[phase] = (text, kind, took_s, bits(job.state) == before)
        store._abandon("the test goes on")
    return found


def _wait_until_stopped(pid: int) -> None:
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        pass


@pytest.fixture(scope="module")
def outcomes(shared_folder: str) -> Outcomes:
    return Outcomes(
        2,
        shared_folder,
        _error_in_write,
        _no_wait_next_save,
        _no_wait_close,
        _reported_once,
        _full_disk_only_warns,
        _slow_write_and_a_short_group,
    )


def test_an_error_in_one_ranks_write_is_raised_everywhere_and_the_old_snapshot_stays(
    outcomes: Outcomes,
) -> None:
    """C64."""
    results = outcomes.of(_error_in_write)
    assert_refused(
        [result["failed"] for result in results], "rank 1", "EIO", kind="SaveFailedError"
    )
    for result in results:
        assert result["took_s"] < 15
        assert result["listed"] == ([1], [1, 3])
        assert result["old_ok"]


def test_a_background_failure_that_nobody_waits_for_is_raised_by_the_same_save(
    outcomes: Outcomes,
) -> None:
    """C67."""
    (step_0, found_0), (step_1, found_1) = outcomes.of(_no_wait_next_save)
    assert step_0 == step_1
    assert_refused([found_0, found_1], "rank 1", "EIO", kind="SaveFailedError")
    assert found_0.text == found_1.text


def test_a_background_failure_that_no_save_follows_is_raised_by_close(outcomes: Outcomes) -> None:
    """C67, C68."""
    assert_refused(outcomes.of(_no_wait_close), "rank 1", "EIO", kind="SaveFailedError")


def test_a_background_failure_is_reported_once_and_the_next_save_commits(
    outcomes: Outcomes,
) -> None:
    """C68."""
    for heard in outcomes.of(_reported_once):
        assert [text.partition(":")[0] for text in heard] == ["save 2", "[2]"], heard
        assert "step 1" in heard[0]


def test_with_warn_a_full_disk_fails_one_save_and_training_goes_on(outcomes: Outcomes) -> None:
    """C72."""
    results = outcomes.of(_full_disk_only_warns)
    found = [result["failure"] for result in results]
    assert_refused(found, "rank 1", "ENOSPC", kind="SaveFailedError")
    for result in results:
        assert result["step"] == 2
        assert result["equal"]


def test_a_write_slower_than_the_training_groups_timeout_is_no_failure(outcomes: Outcomes) -> None:
    """C70."""
    assert outcomes.of(_slow_write_and_a_short_group) == [1, 1]


def test_a_stopped_rank_is_named_in_restore_and_in_save_and_raises_when_it_goes_on(
    folder: str,
) -> None:
    """C69."""
    (running, late) = Outcomes(2, folder, _stopped).of(_stopped)
    for phase in ("restore", "save"):
        text, _, took_s, unchanged = running[phase]
        assert "rank 1" in text, text
        assert phase in text
        assert took_s < 2.0 + 5.0
        assert unchanged
        _, kind, _, unchanged = late[phase]
        assert kind, "the stopped rank must raise as well"
        assert unchanged
