"""Roots that hosts do not share (P4): ranks are threads, each pair of them with a root of its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardstore import (
    CorruptSnapshotError,
    SaveFailedError,
    SnapshotNotFoundError,
    SnapshotStore,
    list_snapshots,
)
from shardstore.engine.catalog import Catalog
from shardstore.engine.orphans import find_orphans
from shardstore.engine.pruning import prune
from shardstore.testing import FileOps, ThreadRank, run_rank_threads, use_ops
from shardstore.tiers.disk import DiskTier

NUM_RANKS = 4


class Hosts:
    """Two hosts of two ranks; `life` runs one function on all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.roots = [folder / "root-a", folder / "root-b"]
        self.order = [0, 1]
        (folder / "memory").mkdir()

    def open(self, rank: ThreadRank, **options: Any) -> SnapshotStore:
        options = {"memory": 0, "shared": False, "timeout_s": 10.0, **options}
        root = self.roots[self.order[rank.rank // 2]]
        return SnapshotStore(root, memory_dir=self.folder / "memory", process_group=rank, **options)

    def save(self, *steps: int, **options: Any) -> list[str]:
        """Save on all ranks; by rank, "" or how the last one failed."""

        def life(rank: ThreadRank) -> str:
            store, told = self.open(rank, on_error="warn", **options), ""
            for step in steps:
                try:
                    store.save(_state(step, rank.rank), step=step).wait(20)
                except SaveFailedError as error:
                    told = str(error)
            store.close()
            return told

        return run_rank_threads(NUM_RANKS, life)

    def restore(self, *, required: bool = True, **options: Any) -> list[int | str]:
        """By rank: the step, or why it was refused, with the live state untouched."""

        def life(rank: ThreadRank) -> int | str:
            store, live = self.open(rank, **options), _state(-7, rank.rank)
            try:
                report = store.restore(live, required=required)
            except (CorruptSnapshotError, SnapshotNotFoundError) as error:
                assert _step(live, rank.rank) == -7
                return f"{type(error).__name__}: {error}"
            finally:
                store.close()
            step = _step(live, rank.rank)
            assert step == (report.step if report else -7)
            return step

        return run_rank_threads(NUM_RANKS, life)

    def catalog(self, host: int) -> Catalog:
        return Catalog(DiskTier(str(self.roots[host]), name="root", ops=FileOps()))

    def manifest(self, host: int, step: int) -> Path:
        (found,) = self.roots[host].glob(f"step-{step:012d}.*")
        return found / "manifest.json"

    def listed(self) -> list[list[int]]:
        return [[info.step for info in list_snapshots(root)] for root in self.roots]


def _state(step: int, rank: int) -> dict[str, Any]:
    return {"w": torch.full((50,), float(10 * step + rank)), "step": {"n": step}}


def _step(live: dict[str, Any], rank: int) -> int:
    (value,) = {int(v) - rank for v in live["w"].tolist()}
    assert value == 10 * live["step"]["n"]
    return value // 10


@pytest.fixture
def hosts(folder: str) -> Hosts:
    return Hosts(Path(folder))


def test_each_root_has_its_ranks_and_says_so_and_retention_goes_on_all(hosts: Hosts) -> None:
    assert hosts.save(1, 2, 3, keep=2) == [""] * 4
    assert hosts.listed() == [[2, 3], [2, 3]]
    for root, here in zip(hosts.roots, [(0, 1), (2, 3)], strict=True):
        assert {info.here for info in list_snapshots(root)} == {here}
        files = {path.name for path in root.rglob("rank-*")}
        assert files == {f"rank-{rank:05d}.safetensors" for rank in here}
    assert hosts.restore() == [3] * 4


@pytest.mark.parametrize("required", [True, False])
def test_ranks_that_changed_hosts_are_refused_with_who_holds_what(
    hosts: Hosts, required: bool
) -> None:
    """C31."""
    hosts.save(1)
    hosts.order = [1, 0]
    for told in hosts.restore(required=required):
        assert "CorruptSnapshotError" in str(told)
        assert "the root of ranks 0-1 (host" in str(told)
        assert "has the files of ranks 2-3" in str(told)
        assert "Start every rank on the host that has its file" in str(told)
    hosts.order = [0, 1]
    assert hosts.restore() == [1] * 4


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_root_is_told_and_not_taken_for_a_fresh_start(hosts: Hosts, lost: int) -> None:
    hosts.save(1)
    shutil.rmtree(hosts.roots[lost])
    ranks = ("0-1", "2-3")[lost]
    for told in hosts.restore(required=False):
        assert f"no root has the files of ranks {ranks}, saved on host" in str(told)


def test_an_older_snapshot_is_taken_only_where_all_ranks_can_read_it(hosts: Hosts) -> None:
    hosts.save(1, 2)
    shutil.rmtree(hosts.manifest(1, 2).parent)
    assert hosts.restore() == [1] * 4


def test_nothing_on_any_root_is_a_fresh_start(hosts: Hosts) -> None:
    assert hosts.restore(required=False) == [-7] * 4


class _NoManifestOn(FileOps):
    """One host's root takes no second manifest."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root, self.num_left = str(root), 1

    def link(self, source: str, target: str) -> None:
        if target.startswith(self.root) and target.endswith("manifest.json"):
            if not self.num_left:
                raise OSError(5, "Input/output error")
            self.num_left -= 1
        super().link(source, target)


@pytest.mark.parametrize("host", [0, 1])
def test_a_save_that_one_host_cannot_commit_is_committed_on_none(hosts: Hosts, host: int) -> None:
    with use_ops(_NoManifestOn(hosts.roots[host])):
        told = hosts.save(1, 2)
    assert all("Input/output error" in text for text in told)
    assert hosts.restore() == [1] * 4
    assert hosts.save(3) == [""] * 4
    assert hosts.listed() == [[1, 3], [1, 3]]


@pytest.mark.parametrize("host", [0, 1])
def test_what_one_host_has_committed_is_restored_and_committed_on_all_by_the_next_save(
    hosts: Hosts, host: int
) -> None:
    hosts.save(1, 2)
    hosts.manifest(host, 2).unlink()  # rank 0, or another first rank, died before it came to that
    assert hosts.restore() == [2] * 4
    assert hosts.save(3) == [""] * 4
    assert hosts.listed() == [[1, 2, 3], [1, 2, 3]]


def test_one_host_alone_removes_nothing_that_another_may_count_on(hosts: Hosts) -> None:
    """`gc` and `prune` of the command line see one root; what they cannot know of the others stays."""
    hosts.save(1, 2)
    hosts.manifest(1, 2).unlink()
    orphans = find_orphans(hosts.catalog(1), memory_dirs=(), including_unknown=True)
    assert [(orphan.kind, orphan.may_go) for orphan in orphans] == [("torn", False)]
    assert "several hosts" in orphans[0].why
    (kept,) = prune(hosts.catalog(0), 1, writer={}, dry_run=False)
    assert "other hosts have the files" in kept.problem
    assert hosts.restore() == [2] * 4


def test_pins_and_delete_work_on_all_hosts(hosts: Hosts) -> None:
    def life(rank: ThreadRank) -> None:
        with hosts.open(rank, keep=1) as store:
            for step in (1, 2):
                store.save(_state(step, rank.rank), step=step).wait(20)
                if step == 1:
                    store.pin(1)
            store.save(_state(3, rank.rank), step=3).wait(20)
            store.drain()
            store.delete(3)

    run_rank_threads(NUM_RANKS, life)
    assert hosts.listed() == [[1], [1]]
    for host in (0, 1):
        assert hosts.catalog(host).pinned()
    assert hosts.restore() == [1] * 4


def test_one_folder_under_two_names_is_found_to_be_shared(hosts: Hosts) -> None:
    """Whatever `shared=False` says."""
    hosts.roots[0].mkdir()
    hosts.roots[1].symlink_to(hosts.roots[0])
    assert hosts.save(1) == [""] * 4
    (info,) = list_snapshots(hosts.roots[0])
    assert info.here is None
    assert len(list(hosts.roots[0].rglob("rank-*"))) == NUM_RANKS
    assert len(list(hosts.roots[0].glob("run-*"))) == 1
