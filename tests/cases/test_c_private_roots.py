"""Real bug reports on roots that the hosts do not share (C31, C32): two mounts under one path."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardstore import list_snapshots
from tests.cases.bits import Refusal, assert_group_works, assert_refused, bits, refusal, soil
from tests.faults.scenario import Job, open_store
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="mounting a tmpfs needs root")
_CLONE_NEWNS = 0x00020000


def _own_root(folder: str) -> None:
    """From now on this process has another file system at the root than everybody else."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    root = Path(folder, "root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(root)], check=True)


def _save_without_sharing(rank: int, folder: str) -> dict[str, Any]:
    if rank == 1:
        _own_root(folder)
    dist.barrier()
    store = open_store(folder, memory=0, timeout_s=4.0, on_error="warn", shared=True)
    job = Job(rank)
    job.fill(1)
    saved = bits(job.state)
    failed = refusal(lambda: store.save(job.state, step=1).wait(20), job.state)
    listed = [info.step for info in list_snapshots(Path(folder, "root"))]
    soil(job.state)
    absent = store.restore(job.state, required=False)
    assert_group_works()
    store.close()
    return {
        "failed": failed,
        "listed": listed,
        "absent": absent is None,
        "left": sorted(path.name for path in Path(folder, "root").rglob("rank-*")),
        "same": bits(job.state) != saved,
    }


def test_a_root_that_hosts_do_not_share_is_refused_at_the_first_save(folder: str) -> None:
    """C32: never a snapshot that is listed and cannot be restored."""
    Path(folder, "root").mkdir()
    results = run_ranks(2, _save_without_sharing, folder)
    found: list[Refusal] = [result["failed"] for result in results]
    assert_refused(found, "rank 1", f"{folder}/root", "share", kind="SaveFailedError")
    for result in results:
        assert result["listed"] == []
        assert result["absent"]
        assert result["left"] == []


def _save_and_restore_on_own_roots(rank: int, folder: str) -> dict[str, Any]:
    if rank == 1:
        _own_root(folder)
    dist.barrier()
    store = open_store(folder, memory=0, timeout_s=2.0)
    job = Job(rank)
    job.fill(1)
    saved = bits(job.state)
    store.save(job.state, step=1).wait(20)
    store.close()
    soil(job.state)
    again = open_store(folder, memory=0, timeout_s=20.0)
    report = again.restore(job.state)
    again.close()
    return {
        "step": report.step,
        "same": bits(job.state) == saved,
        "listed": [info.here for info in list_snapshots(Path(folder, "root"))],
        "files": sorted(path.name for path in Path(folder, "root").rglob("rank-*")),
    }


def test_roots_that_hosts_do_not_share_keep_their_own_ranks_and_restore_them(folder: str) -> None:
    """C32: every rank's root is self-sufficient, and says which ranks it has."""
    Path(folder, "root").mkdir()
    for rank, result in enumerate(run_ranks(2, _save_and_restore_on_own_roots, folder)):
        assert result == {
            "step": 1,
            "same": True,
            "listed": [(rank,)],
            "files": [f"rank-{rank:05d}.safetensors"],
        }


def _save(rank: int, folder: str) -> None:
    store = open_store(folder, memory=0)
    job = Job(rank)
    job.fill(1)
    store.save(job.state, step=1).wait(20)
    store.close()


def _restore_from_another_host(rank: int, folder: str) -> Refusal:
    """Rank 1's host has a root of its own, on which rank 0's file is under rank 1's name."""
    if rank == 1:
        source = {
            p.name: p.read_bytes() for p in next(Path(folder, "root").glob("step-*")).iterdir()
        }
        name = next(Path(folder, "root").glob("step-*")).name
        _own_root(folder)
        own = Path(folder, "root", name)
        own.mkdir()
        source["rank-00001.safetensors"] = source["rank-00000.safetensors"]
        for file, data in source.items():
            (own / file).write_bytes(data)
    dist.barrier()
    store = open_store(folder, memory=0)
    job = Job(rank)
    job.fill(7)
    found = refusal(lambda: store.restore(job.state), job.state)
    store.take_leave("the test ends")
    return found


def test_a_rank_that_finds_another_ranks_file_on_its_host_refuses_and_so_do_all(
    folder: str,
) -> None:
    """C31."""
    run_ranks(2, _save, folder)
    found = run_ranks(2, _restore_from_another_host, folder)
    assert_refused(found, "rank 0", "rank 1", kind="CorruptSnapshotError")
