"""Memory, disks and a root on S3 together: the nearest whole copy wins, the root alone is enough."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import pytest

from shardstore import SnapshotNotFoundError, list_snapshots
from tests.faults.threaded import Stores, state_of, step_of
from tests.remote.conftest import MakeHost
from tests.remote.job import Host, flip, s3_keys
from tests.servers.s3 import MotoServer

Damage = Literal["gone", "flipped", "cut"]


def _saved(host: Host, *steps: int, keep_memory: bool = True, **options: Any) -> None:
    stores = host.open(**options)
    for step in steps:
        assert stores.save(step) == ["", ""]
    stores.drain()
    stores.close(keep_memory=keep_memory)


def _restored(stores: Stores) -> tuple[int, str]:
    """The step, of which every element is, and what each rank read it from."""

    def one(store: Any, rank: int) -> tuple[int, str]:
        live = state_of(-7, rank, 3000)
        report = store.restore(live)
        assert step_of(live, rank) == report.step
        return report.step, report.tier

    (found,) = set(stores.each(one))
    return found


def _break(path: Path, how: Damage) -> None:
    if how == "gone":
        path.unlink()
    elif how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        flip(path)


@pytest.mark.parametrize("with_memory", [True, False])
@pytest.mark.parametrize("with_disk", [True, False])
def test_the_nearest_copy_is_restored_from_whichever_tiers_there_are(
    make_host: MakeHost, with_memory: bool, with_disk: bool
) -> None:
    host = make_host(with_disk=with_disk, **({} if with_memory else {"memory": 0}))
    _saved(host, 1, 2)
    nearest = "memory" if with_memory else "disk" if with_disk else "root"
    stores = host.open()
    assert _restored(stores) == (2, f"{nearest} (2 ranks)")
    assert stores.listed() == [1, 2]
    stores.close()


def test_without_anything_near_the_root_restores_alone_and_is_saved_to(
    make_host: MakeHost,
) -> None:
    host = make_host()
    _saved(host, 1, 2)
    host.lose_memory()
    host.lose_disk()
    stores = host.open()
    assert _restored(stores) == (2, "root (2 ranks)")
    assert stores.save(3) == ["", ""]
    stores.close()
    elsewhere = make_host()
    stores = elsewhere.open()
    assert _restored(stores) == (3, "root (2 ranks)")
    stores.close()


@pytest.mark.parametrize("how", ["gone", "flipped", pytest.param("cut", marks=pytest.mark.nightly)])
def test_a_bad_copy_in_memory_gives_way_to_the_next_one_of_the_same_snapshot_on_that_rank(
    make_host: MakeHost, how: Damage
) -> None:
    host = make_host()
    _saved(host, 1, 2)
    _break(host.in_memory(2, 1), how)
    stores = host.open()
    assert _restored(stores) == (2, "disk (1 rank), memory (1 rank)")
    stores.close(keep_memory=True)


@pytest.mark.parametrize("how", ["cut", "flipped", pytest.param("gone", marks=pytest.mark.nightly)])
def test_each_rank_reads_its_own_nearest_whole_copy(make_host: MakeHost, how: Damage) -> None:
    """Rank 0 from its disk, rank 1 from the root."""
    host = make_host()
    _saved(host, 1, 2, keep_memory=False)
    _break(host.on_disk(2, 1), how)
    stores = host.open()
    assert _restored(stores) == (2, "disk (1 rank), root (1 rank)")
    stores.close()
    host.lose_memory()
    _break(host.on_disk(2, 0), "gone")
    stores = host.open()
    assert _restored(stores) == (2, "root (2 ranks)")
    stores.close()


def test_a_copy_in_memory_the_disk_and_the_root_at_once(make_host: MakeHost) -> None:
    """One rank has lost memory, and its disk's file is damaged; the other has its memory."""
    host = make_host()
    _saved(host, 1, 2)
    host.in_memory(2, 1).unlink()
    flip(host.on_disk(2, 1))
    stores = host.open()
    assert _restored(stores) == (2, "memory (1 rank), root (1 rank)")
    stores.close()


def test_a_newer_snapshot_on_all_disks_is_preferred_to_an_older_one_on_the_root(
    make_host: MakeHost, s3_server: MotoServer
) -> None:
    """C93: local 5 complete, remote 4; then a cut local 5, and remote 4."""
    host = make_host()
    _saved(host, 4, 5, keep_memory=False)
    prefix = host.root.partition(f"{s3_server.bucket}/")[2]
    newest = [k for k in s3_keys(s3_server) if k.startswith(f"{prefix}/step-000000000005.")]
    newest += [k for k in s3_keys(s3_server) if k.startswith(f"{prefix}/index-")]
    assert len(newest) >= 3
    for key in newest:
        s3_server.client.delete_object(Bucket=s3_server.bucket, Key=key)
    stores = host.open()
    assert _restored(stores) == (5, "disk (2 ranks)")
    stores.close()
    host.lose_memory()
    _break(host.on_disk(5, 1), "cut")
    stores = host.open()
    assert _restored(stores)[0] == 4
    stores.close()


def test_each_tier_keeps_what_its_own_retention_says(make_host: MakeHost) -> None:
    """`keep` on the root and, for what it deletes, on the disk; the disk alone loses what it has no room for."""
    host = make_host(keep=2)
    stores = host.open()
    for step in range(1, 6):
        assert stores.save(step) == ["", ""]
    stores.drain()
    assert [
        info.step for info in list_snapshots(host.root, storage_options=host.storage_options)
    ] == [4, 5]
    assert host.steps_on_disk() == {4, 5}
    stores.each(lambda store, _: store.pin(4))
    for step in (6, 7):
        assert stores.save(step) == ["", ""]
    stores.drain()
    assert stores.listed() == [4, 6, 7]
    with pytest.raises(SnapshotNotFoundError):
        stores.restore(step=5)
    stores.close()
    host.lose_memory()
    host.lose_disk()
    stores = host.open()
    assert stores.restore(step=4) == 4
    assert _restored(stores) == (7, "root (2 ranks)")
    stores.close()
