"""Deletes by the store itself: retention, `delete`, and what runs before it left half written."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardstore import Keep, SnapshotStore, list_snapshots
from shardstore.engine.orphans import find_orphans
from shardstore.engine.pruning import prune
from shardstore.tiers.fileops import FileOps, use_ops
from tests.faults.breaking_ops import WatchedOps, raise_at
from tests.faults.orphans import (
    WRITER,
    CrashError,
    catalog_of,
    crashing,
    save_steps,
    state,
    tear,
)
from tests.faults.scenario import Job, open_store
from tests.ranks import RanksFailedError, run_ranks


def _listed(folder: str) -> list[int]:
    return [info.step for info in list_snapshots(Path(folder, "root"))]


def _on_disk(folder: str) -> list[str]:
    """Folders on the root, in any state, by what their names say of state and step."""
    return sorted(p.name.split(".")[0] for p in Path(folder, "root").glob("*step-*"))


def _step(number: int) -> str:
    return f"step-{number:012d}"


def _save(store: SnapshotStore, *steps: int) -> None:
    for step in steps:
        store.save(state(step), step=step).wait()
    store.drain()


# -------------------------------------------------------------------- retention


@pytest.mark.parametrize("times", [1, 1000], ids=["once", "always"])
@pytest.mark.parametrize(
    "where",
    ["unlink rank", "rename step", "remove_folder deleted", "unlink manifest", "replacing"],
)
@pytest.mark.parametrize("code", [errno.ENOTEMPTY, errno.EBUSY])
def test_a_delete_that_fails_warns_and_is_tried_again_while_training_goes_on(
    folder: str, caplog: pytest.LogCaptureFixture, where: str, code: int, times: int
) -> None:
    """C88."""
    error = OSError(code, "busy")
    watched = WatchedOps(raise_at(where, error, times))
    with use_ops(_NoReplacing(error, times) if where == "replacing" else watched):
        store = open_store(folder, memory=0, keep=1)
    _save(store, 1)
    watched.arm()
    _save(store, 2)
    is_healed = where == "rename step" and code == errno.ENOTEMPTY and times == 1
    warned = [r for r in caplog.records if "tried again" in r.getMessage()]
    assert bool(warned) is not is_healed, "another name for the folder will do"
    unlisted = where != "replacing"
    assert _listed(folder) == ([2] if unlisted else [1, 2]), "half deleted is not listed"
    assert [i.step for i in store.snapshots()] == _listed(folder)
    _save(store, 3)
    if times == 1:
        assert _on_disk(folder) == [_step(3)]
    elif unlisted:
        assert _listed(folder) == [3]
    store.close()
    store = open_store(folder, memory=0, keep=1)
    _save(store, 4)
    store.close()
    assert _on_disk(folder) == [_step(4)], "once the fault is gone, so is all that it left"


class _NoReplacing(FileOps):
    """Registers cannot be replaced, the first times."""

    def __init__(self, error: OSError, times: int) -> None:
        self.error, self.left = error, times

    def rename(self, source: str, target: str) -> None:
        if target.endswith("manifest.json") and self.left > 0:
            self.left -= 1
            raise self.error
        super().rename(source, target)


def test_a_folder_that_vanishes_while_it_is_deleted_is_gone_and_no_fault(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    """C88: another process deletes the same one."""

    def vanish(name: str, _at: int) -> None:
        if name.startswith("open_new .manifest"):
            for path in Path(folder, "root").glob(f"{_step(1)}.*"):
                shutil.rmtree(path)

    ops = WatchedOps(vanish)
    with use_ops(ops):
        store = open_store(folder, memory=0, keep=1)
    _save(store, 1)
    ops.arm()
    _save(store, 2)
    assert _listed(folder) == [2]
    assert not [r for r in caplog.records if "tried again" in r.getMessage()]
    store.close()


def test_a_foreign_file_in_an_old_snapshot_stays(folder: str) -> None:
    store = open_store(folder, memory=0, keep=1)
    _save(store, 1)
    (path,) = Path(folder, "root").glob(f"{_step(1)}.*")
    (path / "my notes.txt").write_text("the user's own")
    _save(store, 2, 3)
    store.close()
    (left,) = Path(folder, "root").glob(f"deleted-{_step(1)}.*")
    assert [p.name for p in left.iterdir()] == ["my notes.txt"]
    assert _listed(folder) == [3]


@pytest.mark.parametrize("call", ["prune", "delete"])
def test_a_crash_anywhere_in_a_delete_leaves_the_old_list_or_the_new_one(
    folder: str, call: str
) -> None:
    """Whatever was reached, what is listed is whole, and the next commit or gc removes the rest."""
    number, seen = 0, set()
    while True:
        number += 1
        home = str(Path(folder, str(number)))
        Path(home).mkdir()
        ids = save_steps(home, 1, 2, 3)
        catalog, ops = crashing(home, number)
        try:
            if call == "prune":
                prune(catalog, 1, writer=WRITER, dry_run=False)
            else:
                for snapshot_id in ids[:2]:
                    catalog.unlist(snapshot_id, reason="test", writer=WRITER)
                    catalog.try_remove(snapshot_id)
        except CrashError:
            pass
        listed = _listed(home)
        seen.add(tuple(listed))
        assert listed in ([1, 2, 3], [2, 3], [3])
        store = open_store(home, memory=0)
        for step in listed:
            live = state(-1)
            assert store.restore(live, step=step).step == step
            assert live["w"].tolist() == [step] * 4
        _save(store, 4)
        store.close()
        assert _listed(home) == [*listed, 4]
        assert _on_disk(home) == [_step(step) for step in (*listed, 4)]
        shutil.rmtree(home)
        if len(ops.names) < number:
            break
    assert seen == {(1, 2, 3), (2, 3), (3,)}


def test_retention_waits_for_the_commit_of_the_successor(folder: str) -> None:
    """G6: at every operation up to the link of the new manifest, the old one is listed and whole."""
    seen: list[tuple[str, list[int]]] = []

    def look(name: str, _at: int) -> None:
        seen.append((name, _listed(folder)))

    ops = WatchedOps(look)
    with use_ops(ops):
        store = open_store(folder, memory=0, keep=1)
    _save(store, 1)
    ops.arm()
    _save(store, 2)
    ops.disarm()
    store.close()
    before = [
        listed for name, listed in seen[: [n for n, _ in seen].index("link manifest.json") + 1]
    ]
    assert before
    assert all(listed == [1] for listed in before)
    after = [listed for _, listed in seen[len(before) :]]
    assert all(2 in listed for listed in after)
    assert after[-1] == [2]


# ------------------------------------------------------------------------ prune


def test_prune_says_what_would_go_and_then_deletes_it(folder: str) -> None:
    ids = save_steps(folder, *range(1, 7))
    catalog = catalog_of(folder)
    catalog.pin(ids[0])
    keep = Keep(last=2, every_steps=4)
    planned = prune(catalog, keep, writer=WRITER)
    assert [found.id.step for found in planned] == [2, 3]
    assert all(
        found.nbytes > 0 and "newest 2" in found.why and "4" in found.why for found in planned
    )
    assert _listed(folder) == [1, 2, 3, 4, 5, 6], "it was dry"
    assert prune(catalog, keep, writer=WRITER, dry_run=False) == planned
    assert _listed(folder) == [1, 4, 5, 6]
    assert len(_on_disk(folder)) == 4
    assert prune(catalog, keep, writer=WRITER, dry_run=False) == []
    for bad in (0, None, "3"):
        with pytest.raises(ValueError, match=r"policy|keep must be"):
            prune(catalog, bad, writer=WRITER)  # type: ignore[arg-type]


def test_prune_tells_of_what_it_could_not_delete_and_goes_on(folder: str) -> None:
    save_steps(folder, 1, 2, 3)
    ops = WatchedOps(raise_at("unlink rank", OSError(errno.EACCES, "denied")))
    ops.arm()
    first, second = prune(catalog_of(folder, ops), 1, writer=WRITER, dry_run=False)
    assert "EACCES" in first.problem
    assert second.problem == ""
    assert _listed(folder) == [3]
    (orphan,) = find_orphans(catalog_of(folder), memory_dirs=())
    assert (orphan.kind, orphan.may_go) == ("aborted", True)


# ------------------------------------------- what earlier runs left half written


@pytest.mark.parametrize("keep", [None, 2])
def test_a_job_that_is_killed_again_and_again_does_not_fill_the_root(
    folder: str, keep: int | None
) -> None:
    for number in range(1, 7):
        last = save_steps(folder, 10 * number, 10 * number + 1, keep=keep)[-1]
        tear(folder, last, whole=False)
    torn = [i for i in catalog_of(folder).ids() if catalog_of(folder).state(i) == "torn"]
    assert len(torn) == (6 if keep is None else 1), "a policy clears up, None deletes nothing"


def test_clearing_that_fails_warns_and_the_save_is_committed(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    tear(folder, save_steps(folder, 1, 2)[-1], whole=False)
    ops = WatchedOps(raise_at("unlink rank", OSError(errno.EIO, "broken")))
    with use_ops(ops):
        store = open_store(folder, memory=0, keep=3)
    ops.arm()
    _save(store, 3)
    assert _listed(folder) == [1, 3]
    assert [r for r in caplog.records if "stays on the root for now" in r.getMessage()]
    _save(store, 4)
    assert _on_disk(folder) == [_step(1), _step(3), _step(4)], "tried again"
    store.close()


def _saves_and_dies(rank: int, folder: str) -> None:
    store = open_store(folder, keep=3)
    job = Job(rank)
    for step in (1, 2, 3):
        job.fill(step)
        store.save(job.state, step=step).wait(30)
    store.drain()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _restores_then_saves(rank: int, folder: str) -> dict[str, Any]:
    store = open_store(folder, keep=3)
    job = Job(rank)
    first = store.restore(job.state).step
    job.fill(4)
    store.save(job.state, step=4).wait(30)
    store.drain()
    dist.barrier()
    states = {i.step: catalog_of(folder).state(i) for i in catalog_of(folder).ids()}
    store.pin(1)
    store.delete(1)
    store.close()
    return {"restored": first, "states": states}


def test_what_any_rank_still_holds_in_memory_stays_on_the_root(folder: str) -> None:
    """Rank 1 alone holds step 3; nobody holds step 2: both are torn on the root, of a dead run."""
    with pytest.raises(RanksFailedError):
        run_ranks(2, _saves_and_dies, folder)
    _, second, third = catalog_of(folder).ids()
    for snapshot_id in (second, third):
        (path,) = Path(folder, "memory").rglob(f"{snapshot_id.name}/rank-00000.safetensors")
        path.unlink()
        root = Path(folder, "root", snapshot_id.name)
        (root / "manifest.json").unlink()
        (root / "rank-00001.safetensors").unlink()
        if snapshot_id == second:
            (root / "rank-00000.safetensors").unlink()
            (root / "rank-00000.safetensors.tmp").touch()
            shutil.rmtree(Path(folder, "memory") / path.parent)
    results = run_ranks(2, _restores_then_saves, folder)
    assert results[0] == results[1]
    assert results[0]["restored"] == 3, "rank 0 from the root, rank 1 from memory"
    assert results[0]["states"] == {1: "committed", 3: "torn", 4: "committed"}
