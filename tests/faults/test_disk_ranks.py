"""Two ranks with a disk between memory and the root: killed at each step of a spill, memory lost or not."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardstore import SaveFailedError
from shardstore.tiers.fileops import FileOps, use_ops
from tests.faults.breaking_ops import WatchedOps, hold_at, kill_at_point, raise_at
from tests.faults.scenario import Job, open_store, share_pids
from tests.ranks import RanksFailedError, run_ranks

_POINTS = ("spill", "post on disk", "pass on", "post durable", "remove old")


def _open(folder: str, disk: str, **options: Any) -> Any:
    return open_store(folder, disk=disk, **options)


def _die(rank: int, folder: str, disk: str, point: str, victim: int | None) -> None:
    """Commit step 1, then die at a point of step 2."""
    pids = share_pids(rank, folder)
    ops = WatchedOps()
    if victim is None or victim == rank:
        ops = WatchedOps(kill_at_point(point, pids if victim is None else [pids[rank]]))
    with use_ops(ops):
        store = _open(folder, disk, timeout_s=20.0)
    job = Job(rank)
    job.fill(1)
    store.save(job.state, step=1).wait(20)
    store.drain()  # what the first one entails comes after it is told: "remove old" is to be the second's
    ops.arm()
    job.fill(2)
    store.save(job.state, step=2).wait(20)
    store.drain()


def _come_back(rank: int, folder: str, disk: str, root: str) -> tuple[int, set[int], str]:
    store = _open(folder, disk, root=root)
    job = Job(rank)
    report = store.restore(job.state)
    seen = job.steps_seen()
    job.fill(3)
    store.save(job.state, step=3).wait(20)
    job.fill(-1)
    assert store.restore(job.state).step == 3
    assert job.steps_seen() == {3}
    store.close()
    return report.step, seen, report.tier


def _kill_and_come_back(point: str, victim: int | None, loses_memory: bool) -> int:
    folder = tempfile.mkdtemp(prefix="shardstore-test-", dir="/dev/shm")
    disk = tempfile.mkdtemp(prefix="shardstore-test-")
    case = f"{victim} killed at {point}, memory lost: {loses_memory}"
    try:
        with pytest.raises(RanksFailedError, match="exit code -9"):
            run_ranks(2, _die, folder, disk, point, victim)
        if loses_memory:
            shutil.rmtree(Path(folder) / "memory")
        one, other = run_ranks(2, _come_back, folder, disk, "root")
        assert one[0] == other[0], case
        assert [one[1], other[1]] == [{one[0]}] * 2, case
        left = list(Path(disk).rglob("*.tmp"))
        assert not left, f"{case}: {left}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(disk, ignore_errors=True)
    return one[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_kill_at_any_step_of_a_spill_leaves_the_old_or_the_new_snapshot() -> None:
    cases = [
        (point, victim, loses_memory)
        for point in _POINTS
        for victim in (None, 0, 1)
        for loses_memory in (False, True)
        if loses_memory or victim is None
        if not (point == "remove old" and victim == 1)  # rank 0 alone removes
    ]
    with ThreadPoolExecutor(8) as pool:  # who outlives another rank waits for a deadline
        found = dict(
            zip(cases, pool.map(_kill_and_come_back, *zip(*cases, strict=True)), strict=True)
        )
    assert set(found.values()) <= {1, 2}
    for (point, victim, _), step in found.items():
        if point == "remove old" and victim is None:
            assert step == 2, "it was committed"


def _die_with_the_root_held(rank: int, folder: str, disk: str) -> None:
    """Step 2 does not get to the root on any rank; all die once it is on both disks."""
    pids = share_pids(rank, folder)
    go = threading.Event()  # never set
    ops = WatchedOps(hold_at("point:pass on", threading.Event(), go))
    with use_ops(ops):
        store = _open(folder, disk, memory="70KiB")
    job = Job(rank)
    job.fill(1)
    store.save(job.state, step=1).wait(20)
    job.fill(2)
    ops.arm()
    store.save(job.state, step=2)
    told = store._session.coordinator.wait(["ondisk/2"], phase="test", ranks=[0], timeout_s=30)
    assert told == [b"1"]
    dist.barrier()
    if rank == 0:
        for pid in reversed(pids):
            os.kill(pid, signal.SIGKILL)
    go.wait(60)


def test_what_only_the_disks_have_is_restored_although_root_and_memory_are_gone(
    folder: str, disk_folder: Path
) -> None:
    with pytest.raises(RanksFailedError, match="exit code -9"):
        run_ranks(2, _die_with_the_root_held, folder, str(disk_folder))
    shutil.rmtree(Path(folder) / "memory")
    # The same name of memory and disk, but a root that has nothing.
    root = Path(folder) / "root"
    shutil.rmtree(root)
    found = run_ranks(2, _come_back, folder, str(disk_folder), "root")
    assert [(step, seen) for step, seen, _ in found] == [(2, {2}), (2, {2})]
    assert {tier for _, _, tier in found} == {"disk (2 ranks)"}


def _fail_while_the_other_spills(rank: int, folder: str, disk: str) -> int:
    reached, go = threading.Event(), threading.Event()
    at_spill = raise_at("point:spill", OSError(5, "broken"))
    ops = WatchedOps(hold_at("point:post on disk", reached, go) if rank == 0 else at_spill)
    with use_ops(ops):
        store = _open(folder, disk)
    job = Job(rank)
    ops.arm()
    handle = store.save(job.state, step=1)
    (pending,) = store._pipeline.pending
    error = handle.committed.exception(20)
    assert "broken" in str(error)
    if rank == 0:
        assert reached.wait(20)
    go.set()
    assert pending.settled.wait(20)
    for turn in ("one", "two"):  # the client's thread drops what was cancelled between two calls
        store._session.coordinator.propose(f"test/{turn}/{rank}", b"1")
    num_watches = len(store._session.coordinator._owner._watches)
    assert not list(Path(disk).rglob(f"rank-{rank:05d}.safetensors*"))
    dist.barrier()
    with pytest.raises(SaveFailedError, match="broken"):
        store.close()
    return num_watches


def test_a_spill_that_goes_on_after_its_save_failed_leaves_nothing_to_look_out_for(
    folder: str, disk_folder: Path
) -> None:
    assert run_ranks(2, _fail_while_the_other_spills, folder, str(disk_folder)) == [0, 0]


class UnlistedDisk(FileOps):
    """A disk that cannot be listed."""

    def __init__(self, disk: str) -> None:
        self.disk = disk

    def list_folder(self, path: str) -> list[str]:
        if path.startswith(self.disk):
            raise OSError(5, "broken")
        return super().list_folder(path)


def _open_where_one_disk_is_broken(rank: int, folder: str, disk: str) -> str:
    with use_ops(UnlistedDisk(disk) if rank == 1 else FileOps()):
        try:
            _open(folder, disk)
        except Exception as error:  # noqa: BLE001 - compared by the test
            return str(error)
    return "opened"


def test_a_disk_that_one_rank_cannot_read_is_told_on_all(folder: str, disk_folder: Path) -> None:
    for text in run_ranks(2, _open_where_one_disk_is_broken, folder, str(disk_folder)):
        assert "broken" in text, text
