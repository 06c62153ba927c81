"""An S3 that ignores exclusive create: owners commit, nobody else does, and gc is the operator's."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from shardstore import SnapshotStore
from shardstore.engine.catalog import Catalog
from shardstore.engine.orphans import find_orphans, remove_orphan
from shardstore.testing import kill_at_point, run_forked, use_ops
from shardstore.testing.ops import CountingOps
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.roots import open_root
from tests.faults.clients import client_options, warm_client
from tests.faults.faulty import SMALL
from tests.faults.threaded import state_of, step_of
from tests.servers.s3 import RcloneServer

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


class Root:
    """A fresh root on it."""

    def __init__(self, server: RcloneServer, folder: str) -> None:
        warm_client("s3://")
        self.server = server
        self.url = server.fresh()
        self.folder = folder

    def open(self, **options: Any) -> SnapshotStore:
        given = {
            "memory": "1MiB",
            "memory_dir": self.folder,
            "timeout_s": 20.0,
            "name": "job",
            **options,
        }
        client = client_options(self.url, self.server.storage_options)
        return SnapshotStore(self.url, storage_options=client, **given)

    def catalog(self) -> Catalog:
        client = client_options(self.url, self.server.storage_options)
        return Catalog(open_root(self.url, FileOps(), storage_options=client, timeout_s=20.0))

    def die_before_the_commit(self, step: int) -> None:
        """A life whose shard is on the root, and whose manifest is not."""

        def child() -> None:
            ops = CountingOps(kill_at_point("publish"))
            with use_ops(ops):
                store = self.open(memory=0)
                ops.arm()
                store.save(state_of(step, 0, SMALL), step=step).wait(20)

        assert run_forked(child).was_killed


@pytest.fixture
def root(deviant_s3_server: RcloneServer, folder: str) -> Root:
    return Root(deviant_s3_server, folder)


def test_two_jobs_at_once_commit_each_their_own_under_numbers_of_their_own(root: Root) -> None:
    start = threading.Barrier(2)
    found: dict[str, list[str]] = {}

    def train(name: str, first: int) -> None:
        store = root.open(name=name)
        start.wait(30)
        infos = [
            store.save(state_of(s, 0, SMALL), step=s).wait(30) for s in range(first, first + 3)
        ]
        found[name] = [info.id for info in infos if info is not None]
        store.close()

    threads = [threading.Thread(target=train, args=(n, f)) for n, f in (("a", 10), ("b", 20))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(len, found.values())) == [3, 3]
    catalog = root.catalog()
    registers = {register.id.name: register for register in catalog.committed()}
    assert {*registers} == {*found["a"], *found["b"]}
    for register in registers.values():
        data = catalog.tier.read_manifest(register.id)
        assert data is not None
        assert json.loads(data)["exclusive"] is False
    for step in (10, 12, 20, 22):
        with root.open(name="reader") as store:
            live = state_of(-7, 0, SMALL)
            store.restore(live, step=step)
            assert step_of(live, 0) == step


def test_what_a_dead_run_left_is_committed_by_nobody_and_goes_only_by_the_operators_word(
    root: Root,
) -> None:
    root.die_before_the_commit(1)
    with root.open(keep=1) as store:
        assert store.save(state_of(2, 0, SMALL), step=2).wait(30) is not None
        store.drain()
    catalog = root.catalog()
    assert [register.step for register in catalog.committed()] == [2], "committed late"
    (orphan,) = find_orphans(catalog, memory_dirs=[root.folder])
    assert (orphan.kind, orphan.liveness, orphan.may_go) == ("torn", "unknown", False)
    assert "exclusive create" in orphan.why
    (orphan,) = find_orphans(catalog, memory_dirs=[root.folder], including_unknown=True)
    assert remove_orphan(catalog, orphan, writer={}) == ""
    assert find_orphans(catalog, memory_dirs=[root.folder], including_unknown=True) == []
    assert [register.step for register in catalog.committed()] == [2]
