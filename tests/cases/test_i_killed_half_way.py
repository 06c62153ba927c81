"""Real bug reports of the kind "killed half way, partial and corrupt snapshots are trusted" (C73 to C80)."""

from __future__ import annotations

import errno
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from shardstore import SaveFailedError, SnapshotNotFoundError, list_snapshots
from shardstore.tiers.fileops import use_ops
from tests.cases.bits import Outcomes, Refusal, assert_refused, bits, refusal, soil
from tests.faults.breaking_ops import Action, WatchedOps, raise_at
from tests.faults.scenario import Job, open_store, share_pids
from tests.ranks import RanksFailedError, run_ranks

KILLS: dict[str, tuple[str, bool]] = {
    # name: (operation of save 2 at which it happens, whether all ranks die or rank 1 alone)
    "all at the first write": ("write_at", True),
    "all before the manifest's link": ("link manifest.json", True),
    "all right after the manifest's link": ("unlink .manifest.json", True),
    "rank 1 before its rename": ("rename rank-00001", False),
}


def _kill_at(match: str, pids: list[int]) -> Action:
    def act(name: str, _at: int) -> None:
        if name.startswith(match):
            for pid in sorted(pids, key=lambda p: p == os.getpid()):  # this process last
                os.kill(pid, signal.SIGKILL)

    return act


def _die_in_save_2(rank: int, folder: str, match: str, everybody: bool) -> None:
    pids = share_pids(rank, folder)
    ops = WatchedOps()
    if everybody or rank == 1:
        ops = WatchedOps(_kill_at(match, pids if everybody else [pids[1]]))
    with use_ops(ops):
        store = open_store(folder, memory=0, timeout_s=20.0 if everybody else 1.5)
    job = Job(rank)
    job.fill(1)
    store.save(job.state, step=1).wait(20)
    job.fill(2)
    ops.arm()
    store.save(job.state, step=2).wait(20)


def _restart(rank: int, folders: list[str]) -> list[tuple[int, set[int], list[int], bool]]:
    found = []
    for folder in folders:
        store = open_store(folder, memory=0)
        job = Job(rank)
        soil(job.state)
        step = store.restore(job.state).step
        seen = job.steps_seen()
        job.fill(3)
        saved = bits(job.state)
        store.save(job.state, step=3).wait(20)
        soil(job.state)
        store.restore(job.state)
        listed = [info.step for info in store.snapshots()]
        found.append((step, seen, listed, bits(job.state) == saved))
        store.close()
    return found


def test_sigkill_in_a_save_leaves_the_old_or_the_new_step_whole_on_all_ranks(folder: str) -> None:
    """C73. (Points counted over a whole save, with the memory tier: tests/faults/test_sigkill.py.)"""

    def kill(name: str) -> str:
        own = Path(folder) / name.replace(" ", "-")
        own.mkdir()
        with pytest.raises(RanksFailedError, match="exit code -9"):
            run_ranks(2, _die_in_save_2, str(own), *KILLS[name])
        return str(own)

    with ThreadPoolExecutor(len(KILLS)) as pool:
        folders = list(pool.map(kill, KILLS))
    results = run_ranks(2, _restart, folders)
    for name, found_0, found_1 in zip(KILLS, *results, strict=True):
        assert found_0 == found_1, name
        step, seen, listed, is_equal = found_0
        assert seen == {step}, f"{name}: a mixture of {seen}"
        expected = 2 if "after the manifest" in name else 1
        assert step == expected or (step == 2 and name == "all before the manifest's link"), name
        assert listed == ([1, 2, 3] if step == 2 else [1, 3]), name
        assert is_equal, name


def _failed_commit(rank: int, folder: str) -> dict[str, Any]:
    ops = WatchedOps(
        raise_at("link manifest.json", OSError(errno.EIO, "broken disk")) if rank == 0 else None
    )
    with use_ops(ops):
        store = open_store(folder)
    job = Job(rank)
    job.fill(10)
    store.save(job.state, step=10).wait(20)
    ops.arm()
    job.fill(20)
    failed = refusal(lambda: store.save(job.state, step=20).wait(20), job.state)
    with pytest.raises(SaveFailedError):
        store.drain()
    lists = [[info.step for info in store.snapshots()]]
    assert store.restore(job.state).step == 10
    assert job.steps_seen() == {10}
    for step in (12, 20):
        job.fill(step)
        store.save(job.state, step=step).wait(20)
    lists.append([info.step for info in store.snapshots()])
    assert store.restore(job.state).step == 20
    seen = job.steps_seen()
    store.close()
    return {"failed": failed, "lists": lists, "seen": seen}


def _failed_rename(rank: int, folder: str) -> dict[str, Any]:
    ops = WatchedOps(
        raise_at("rename rank-00001", OSError(errno.EIO, "no rename")) if rank == 1 else None
    )
    with use_ops(ops):
        store = open_store(folder, memory=0)
    job = Job(rank)
    job.fill(1)
    store.save(job.state, step=1).wait(20)
    old = bits(job.state)
    ops.arm()
    job.fill(2)
    failed = refusal(lambda: store.save(job.state, step=2).wait(20), job.state)
    with pytest.raises(SaveFailedError):
        store.drain()
    soil(job.state)
    store.restore(job.state)
    result = {
        "failed": failed,
        "folders": sorted(path.name for path in Path(folder, "root").glob("step-*")),
        "old_ok": bits(job.state) == old,
    }
    store.close()
    return result


def _stale_staging(rank: int, folder: str) -> dict[str, Any]:
    root = Path(folder, "root")
    stale = root / "step-000000000003.00000001-000001-deadbeef"
    if rank == 0:
        stale.mkdir(parents=True)
        (stale / "rank-00001.safetensors.tmp").write_bytes(b"stale")
        (stale / "rank-00001.safetensors").write_bytes(b"stale")
    torch.distributed.barrier()

    def act(name: str, _at: int) -> None:
        """Rank 0 begins to write when rank 1 is done."""
        if rank == 0 and name.startswith("open_new rank-00000"):
            while not [p for p in root.glob("step-*/rank-00001.safetensors") if p.parent != stale]:
                os.sched_yield()

    ops = WatchedOps(act)
    with use_ops(ops):
        store = open_store(folder, memory=0)
    ops.arm()
    job = Job(rank)
    job.fill(3)
    saved = bits(job.state)
    store.save(job.state, step=3).wait(20)
    soil(job.state)
    report = store.restore(job.state)
    store.close()
    return {
        "equal": bits(job.state) == saved,
        "seen": job.steps_seen(),
        "skipped": len(report.skipped),
        "listed": [info.step for info in list_snapshots(root)],
    }


def _pointers(rank: int, folder: str) -> dict[str, Any]:
    store = open_store(folder, memory=0)
    nothing = refusal(lambda: store.restore({"w": torch.zeros(1)}))
    assert store.restore({"w": torch.zeros(1)}, required=False) is None
    job = Job(rank)
    for step in (1, 2, 3):
        job.fill(step)
        store.save(job.state, step=step).wait(20)
    store.delete(3)
    store.close()
    root = Path(folder, "root")
    if rank == 0:
        for path in root.glob("run-*.json"):
            path.unlink()
        (root / "latest").write_text("step-000000000003")
        (root / "latest_checkpointed_iteration.txt").write_text("17")
    torch.distributed.barrier()
    store = open_store(folder, memory=0)
    soil(job.state)
    step = store.restore(job.state).step
    store.close()
    return {"nothing": nothing, "step": step, "seen": job.steps_seen()}


@pytest.fixture(scope="module")
def outcomes(shared_folder: str) -> Outcomes:
    cases = (_failed_commit, _failed_rename, _stale_staging, _pointers)
    return Outcomes(2, shared_folder, *cases)


def test_a_step_whose_commit_failed_can_be_saved_again_and_so_can_steps_below_it(
    outcomes: Outcomes,
) -> None:
    """C76."""
    results = outcomes.of(_failed_commit)
    failed: list[Refusal] = [result["failed"] for result in results]
    assert_refused(failed, "rank 0", "EIO", kind="SaveFailedError")
    for result in results:
        assert result["lists"] == [[10], [10, 12, 20]]
        assert result["seen"] == {20}


def test_without_pointer_files_the_newest_committed_step_is_found(outcomes: Outcomes) -> None:
    """C77."""
    results = outcomes.of(_pointers)
    assert_refused([r["nothing"] for r in results], kind=SnapshotNotFoundError.__name__)
    for result in results:
        assert result["step"] == 2
        assert result["seen"] == {2}


def test_a_rename_that_fails_on_one_rank_commits_nothing(outcomes: Outcomes) -> None:
    """C78."""
    results = outcomes.of(_failed_rename)
    assert_refused([r["failed"] for r in results], "rank 1", "EIO", kind="SaveFailedError")
    for result in results:
        assert result["old_ok"]
        assert len(result["folders"]) == 1, "the failed attempt left files"


def test_what_a_dead_run_left_of_a_step_does_not_disturb_the_next_save_of_it(
    outcomes: Outcomes,
) -> None:
    """C79."""
    for result in outcomes.of(_stale_staging):
        assert result["equal"]
        assert result["seen"] == {3}
        assert result["skipped"] == 0
        assert result["listed"] == [3]


@pytest.mark.parametrize("memory", ["64MiB", 0], ids=["memory and disk", "disk only"])
def test_restored_tensors_do_not_hang_on_the_file(folder: str, memory: str | int) -> None:
    """C80."""
    store = open_store(folder, memory=memory)
    live: dict[str, Any] = {"w": torch.arange(5000.0), "b": torch.ones(3, dtype=torch.bool)}
    store.save(live, step=1).wait()
    kept = bits(live)
    soil(live)
    store.restore(live, step=1)
    other = {"w": torch.full((5000,), 7.0), "b": torch.zeros(3, dtype=torch.bool)}
    store.save(other, step=1).wait()
    assert bits(live) == kept
    store.delete(1)
    assert bits(live) == kept
    store.save(live, step=1).wait()
    store.drain()
    for path in [*Path(folder).rglob("rank-*.safetensors")]:
        if path.is_relative_to(Path(folder, "root")):  # a mapped memory file is ours alone
            path.write_bytes(b"")
    assert bits(live) == kept
    store.save(live, step=1).wait()
    soil(live)
    store.restore(live, step=1)
    assert bits(live) == kept
    store.close()
