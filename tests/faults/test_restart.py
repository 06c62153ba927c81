"""What a restart makes of what earlier runs left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from shardstore import CorruptSnapshotError, SnapshotStore, list_snapshots
from tests.faults.scenario import Job, open_store, share_pids
from tests.ranks import RanksFailedError, run_ranks


def _save_then_lose_manifest(rank: int, folder: str) -> None:
    store = open_store(folder, memory=0)
    job = Job(rank)
    for step in (1, 2):
        job.fill(step)
        store.save(job.state, step=step).wait(20)
    store.close()


def _next_run(rank: int, folder: str, save: bool) -> tuple[int, set[int], list[int]]:
    store = open_store(folder, memory=0)
    job = Job(rank)
    step = store.restore(job.state).step
    seen = job.steps_seen()
    if save:
        job.fill(3)
        store.save(job.state, step=3).wait(20)
    listed = [info.step for info in store.snapshots()]
    store.close()
    return step, seen, listed


def test_a_whole_attempt_without_manifest_is_restored_and_committed_by_the_next_run(
    folder: str,
) -> None:
    run_ranks(2, _save_then_lose_manifest, folder)
    newest = max(Path(folder, "root").glob("step-*"))
    (newest / "manifest.json").unlink()
    assert [i.step for i in list_snapshots(Path(folder) / "root")] == [1]
    assert run_ranks(2, _next_run, folder, False) == [(2, {2}, [1])] * 2
    assert run_ranks(2, _next_run, folder, True) == [(2, {2}, [1, 2, 3])] * 2


def test_an_incomplete_attempt_is_never_listed_or_restored(folder: str) -> None:
    run_ranks(2, _save_then_lose_manifest, folder)
    newest = max(Path(folder, "root").glob("step-*"))
    (newest / "manifest.json").unlink()
    (newest / "rank-00001.safetensors").rename(newest / "rank-00001.safetensors.tmp")
    (Path(folder) / "root" / "step-000000000009").mkdir()
    (Path(folder) / "root" / "step-000000000009.0000000f-000001-00000000").mkdir()
    (Path(folder) / "root" / "notes.txt").write_text("the user's own")
    assert run_ranks(2, _next_run, folder, True) == [(1, {1}, [1, 3])] * 2
    assert (Path(folder) / "root" / "notes.txt").exists()


def _seal_then_die(rank: int, folder: str) -> None:
    pids = share_pids(rank, folder)
    store = open_store(folder)
    job = Job(rank)
    job.fill(1)
    store.save(job.state, step=1, persist=False).wait(20)
    job.fill(2)
    store.save(job.state, step=2).wait(20)
    if rank == 1:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    signal.pause()


def _look(rank: int, folder: str) -> dict[str, Any]:
    store = open_store(folder)
    job = Job(rank)
    found: dict[str, Any] = {"listed": [(i.step, i.tiers) for i in store.snapshots()]}
    try:
        found["step"] = store.restore(job.state, step=1).step
        found["seen"] = job.steps_seen()
    except CorruptSnapshotError as error:
        found["error"] = str(error)
    found["newest"] = store.restore(job.state).step
    store.close(keep_memory=True)
    return found


def test_memory_only_snapshots_outlive_sigkill_of_all_ranks_until_one_loses_its_part(
    folder: str,
) -> None:
    with pytest.raises(RanksFailedError):
        run_ranks(2, _seal_then_die, folder)
    for found in run_ranks(2, _look, folder):
        assert found["listed"] == [(1, ("memory",)), (2, ("memory", "root"))]
        assert (found["step"], found["seen"], found["newest"]) == (1, {1}, 2)
    for path in Path(folder, "memory").glob("*/*/step-000000000001*/rank-00001.safetensors"):
        path.unlink()
    for found in run_ranks(2, _look, folder):
        assert "rank 1" in found["error"]
        assert found["newest"] == 2


def test_kill_and_restart_rounds_do_not_grow_memory(folder: str) -> None:
    sizes = []
    for _ in range(6):
        with pytest.raises(RanksFailedError):
            run_ranks(2, _seal_then_die_big, folder)
        files = [p for p in Path(folder, "memory").rglob("*") if p.is_file()]
        shards = [p for p in files if p.suffix != ".lock"]
        sizes.append((sum(p.stat().st_size for p in shards), len(files)))
    slot_nbytes = 404_096
    # Four saves in flight, the protected one, and one made ready for the next save: six slots a rank,
    # whatever the number of rounds.
    assert max(nbytes for nbytes, _ in sizes) <= 2 * 6 * slot_nbytes, sizes
    # And a lock file for each run that still has one of them, and for the last run itself.
    assert max(number for _, number in sizes) <= 2 * (6 + 7), sizes


def _seal_then_die_big(rank: int, folder: str) -> None:
    pids = share_pids(rank, folder)
    store = open_store(folder)
    state = {"w": torch.ones(100_000)}
    for step in range(4):
        store.save(state, step=step)
    if rank == 1:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    signal.pause()


def _two_jobs(rank: int, folder: str, job_number: int) -> list[set[int]]:
    memory = Path(folder) / f"memory-{job_number}"
    memory.mkdir(exist_ok=True)
    store = SnapshotStore(Path(folder) / "root", memory_dir=memory, memory="8MiB", timeout_s=20)
    job = Job(rank)
    for step in range(6):
        job.fill(10 * job_number + step)
        store.save(job.state, step=step).wait(20)
    seen = []
    for step in range(6):
        store.restore(job.state, step=step)
        seen.append(job.steps_seen())
    store.close()
    return seen


def test_two_jobs_on_one_root_are_never_mixed(folder: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(run_ranks, 2, _two_jobs, folder, number) for number in (1, 2)]
        for future in futures:
            first, second = future.result()
            assert first == second
            assert all(len(seen) == 1 for seen in first), "a restored snapshot mixes two jobs"
    assert len(list_snapshots(Path(folder) / "root")) == 12


SMALL_TMPFS = """
    import logging, subprocess, sys, torch
    logging.basicConfig(level=logging.WARNING)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", sys.argv[1]], check=True)
    from shardstore import SnapshotStore, TierFullError
    state = {"w": torch.arange(2_000_000.0)}
    store = SnapshotStore(sys.argv[2], memory_dir=sys.argv[1], memory="64MiB")
    for step in range(4):
        store.save(state, step=step).wait(30)
    state["w"].fill_(-1)
    print(store.restore(state).step, state["w"][7].item())
    store.close()
    alone = SnapshotStore(name="alone", memory_dir=sys.argv[1], memory="64MiB")
    try:
        alone.save(state, step=1)
    except TierFullError as error:
        print("refused:", error)
    alone.close()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_tmpfs_that_is_too_small_is_told_and_the_root_still_works(
    folder: str, tmp_path: Path
) -> None:
    mount_point = tmp_path / "shm"
    mount_point.mkdir()
    run = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", textwrap.dedent(SMALL_TMPFS),
         str(mount_point), str(tmp_path / "root")],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0] == "3 7.0"
    assert "--shm-size" in run.stderr
    assert "too small" in run.stderr
    assert "refused:" in run.stdout
