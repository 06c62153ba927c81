"""Roots with 1,000 snapshots on S3: what listing, restoring and saving ask of the server; and bad indexes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import fsspec
import pytest
import torch
from click.testing import CliRunner

from shardstore import SnapshotInfo, SnapshotStore, list_snapshots
from shardstore.cli.app import cli
from shardstore.engine.catalog import Catalog
from shardstore.format.manifest import MANIFEST_NAME
from shardstore.testing import ThreadRank, run_rank_threads
from shardstore.testing.wrapped import WrappedTier
from shardstore.tiers.base import RootTier
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.roots import open_root
from tests.servers.proxy import Proxy
from tests.servers.s3 import ACCESS_KEY, SECRET_KEY, MotoServer
from tests.store.many_snapshots import aborted, make_snapshots, manifest_of, put_all, snapshot_id
from tests.unit.tiers.remote.test_s3 import fast_session

NUM_OLD = 1000
NUM_RANKS = 2
INDEX = "index-00000002.json"
REGISTER = "/step-[^/]*/manifest.json"
PAGES = 3
"""Of a listing of all objects: S3 gives 1,000 at a time."""
MOST_FIRST = 30
MOST_NEXT = 9


@dataclass
class Root:
    """One with many snapshots, and a proxy for each rank that counts what that asks."""

    server: MotoServer
    proxies: list[Proxy]
    url: str
    index: bytes = b""
    """As two saves of a run have left it."""
    opened: list[int] = field(default_factory=list)
    """Requests of each rank to open the store of that run."""
    saved: list[list[int]] = field(default_factory=list)
    """Requests of each rank for each save of that run."""

    def options(self, rank: int = 0) -> dict[str, Any]:
        return {**self.server.options_at(self.proxies[rank].port), "session": fast_session()}

    def counts(self) -> list[int]:
        """Requests of each rank since the last time."""
        found = [len(proxy.requests()) for proxy in self.proxies]
        for proxy in self.proxies:
            proxy.forget()
        return found

    def listed(self) -> list[SnapshotInfo]:
        return list_snapshots(self.url, storage_options=self.options())

    def put(self, name: str, data: bytes) -> None:
        put_all(self.server, [(f"{self.url.removeprefix('s3:/')}/{name}", data)])

    def delete(self, name: str) -> None:
        bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
        self.server.client.delete_object(Bucket=bucket, Key=f"{prefix}/{name}")

    def keep_index(self) -> None:
        """Note what is in it, and count from zero."""
        bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
        found = self.server.client.get_object(Bucket=bucket, Key=f"{prefix}/{INDEX}")
        self.index = found["Body"].read()
        self.counts()

    def life(
        self, folder: str, use: Callable[[SnapshotStore, ThreadRank], None], **options: Any
    ) -> None:
        """Two ranks open a store; what one process keeps in memory is gone before the next life."""

        def one(rank: ThreadRank) -> None:
            with SnapshotStore(
                self.url, memory="16MiB", memory_dir=folder, name=f"life-{id(use)}", process_group=rank,
                storage_options=self.options(rank.rank), **{"timeout_s": 60, **options},
            ) as store:  # fmt: skip
                use(store, rank)

        run_rank_threads(NUM_RANKS, one)


def state_of(rank: ThreadRank) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), float(rank.rank + 1))}


class Turns:
    """Lets one rank do something while no other does anything."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(NUM_RANKS)

    def alone(self, rank: ThreadRank, do: Callable[[], None]) -> None:
        self._barrier.wait(60)
        if rank.rank == 0:
            do()
        self._barrier.wait(60)


def forget(root: Root) -> None:
    for proxy in root.proxies:
        proxy.forget()


@pytest.fixture(scope="module")
def proxies(s3_server: MotoServer) -> Iterator[list[Proxy]]:
    with Proxy(s3_server.port) as first, Proxy(s3_server.port) as second:
        yield [first, second]


@pytest.fixture(scope="module")
def root(
    s3_server: MotoServer, proxies: list[Proxy], tmp_path_factory: pytest.TempPathFactory
) -> Root:
    """1,000 snapshots of a first run, and two of a second."""
    root = Root(s3_server, proxies, f"s3://{s3_server.fresh_bucket()}/a/run")
    make_snapshots(s3_server, root.url, range(NUM_OLD), with_index=True)
    turns, saved = Turns(), root.saved

    def save_two(store: SnapshotStore, rank: ThreadRank) -> None:
        turns.alone(rank, lambda: root.opened.extend(root.counts()))
        for step in (NUM_OLD, NUM_OLD + 1):
            turns.alone(rank, lambda: forget(root))
            store.save(state_of(rank), step=step)
            store.drain(60)
            turns.alone(rank, lambda: saved.append(root.counts()))

    root.life(str(tmp_path_factory.mktemp("memory")), save_two)
    root.keep_index()
    return root


def make_small(server: MotoServer, proxies: list[Proxy], folder: str) -> Root:
    """20 snapshots of a first run, two of a second, and their index."""
    root = Root(server, proxies, f"s3://{server.fresh_bucket()}/run")
    make_snapshots(server, root.url, range(20))

    def save_two(store: SnapshotStore, rank: ThreadRank) -> None:
        for step in (20, 21):
            store.save(state_of(rank), step=step).wait(60)

    root.life(folder, save_two)
    root.keep_index()
    return root


@pytest.fixture
def small(s3_server: MotoServer, proxies: list[Proxy], folder: str) -> Root:
    return make_small(s3_server, proxies, folder)


@pytest.fixture(scope="module")
def unchanging(
    s3_server: MotoServer, proxies: list[Proxy], tmp_path_factory: pytest.TempPathFactory
) -> Root:
    """The same, for tests that replace its index and nothing else."""
    return make_small(s3_server, proxies, str(tmp_path_factory.mktemp("memory")))


@pytest.fixture
def untouched(root: Root) -> Iterator[Root]:
    """The same; the index that a test replaces is put back."""
    root.counts()
    yield root
    root.put(INDEX, root.index)


def steps(listed: list[SnapshotInfo]) -> list[int]:
    return [info.step for info in listed]


ALL = [*range(NUM_OLD + 2)]


def test_a_list_takes_a_handful_of_requests(untouched: Root) -> None:
    assert steps(untouched.listed()) == ALL
    assert untouched.counts()[0] <= PAGES + 3  # the index: its beginning, its size, all of it


def test_the_list_command_takes_as_few(untouched: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("AWS_ACCESS_KEY_ID", ACCESS_KEY),
        ("AWS_SECRET_ACCESS_KEY", SECRET_KEY),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{untouched.proxies[0].port}"),
    ):
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(cli, ["list", untouched.url, "--json"])
    assert result.exit_code == 0, result.output
    assert untouched.counts()[0] <= PAGES + 5


def test_the_first_save_after_a_restart_and_the_next_take_few_requests(root: Root) -> None:
    for found, most in zip(root.saved, ((MOST_FIRST, 6), (MOST_NEXT, 3)), strict=True):
        assert found[0] <= most[0]
        assert found[1] <= most[1]


def test_opening_a_store_takes_few_requests(root: Root) -> None:
    found, most = root.opened, (PAGES + 4, 1)
    assert found[0] <= most[0]
    assert found[1] <= most[1]


def test_a_restore_on_fresh_hosts_takes_few_requests_per_rank(untouched: Root, folder: str) -> None:
    turns = Turns()
    restored: list[int] = []

    def restore(store: SnapshotStore, rank: ThreadRank) -> None:
        turns.alone(rank, lambda: forget(untouched))
        state = {"w": torch.zeros(1000)}
        assert store.restore(state).step == NUM_OLD + 1
        assert torch.equal(state["w"], state_of(rank)["w"])
        turns.alone(rank, lambda: restored.extend(untouched.counts()))
        if rank.rank == 0:
            assert steps(store.snapshots()) == ALL
            assert untouched.counts()[0] <= PAGES + 3
            assert steps(store.snapshots()) == ALL
            assert untouched.counts()[0] <= PAGES

    untouched.life(folder, restore)
    assert max(restored) <= 10


@pytest.mark.nightly
def test_without_an_index_a_thousand_registers_are_read_several_at_a_time(untouched: Root) -> None:
    untouched.delete(INDEX)
    assert steps(untouched.listed()) == ALL
    proxy = untouched.proxies[0]
    assert len(proxy.requests()) <= NUM_OLD + 2 + PAGES
    assert proxy.totals().max_parallel > 4


def test_without_an_index_registers_are_read_several_at_a_time(unchanging: Root) -> None:
    unchanging.delete(INDEX)
    assert steps(unchanging.listed()) == [*range(22)]
    assert unchanging.proxies[0].totals().max_parallel > 4


def _lying(root: Root) -> bytes:
    """Says of every snapshot something else, under tags that none has."""
    index = json.loads(root.index)
    for entry in index["entries"]:
        entry["tag"] = "0" * 32
        entry["register"]["state"] = "aborted"
    return json.dumps(index).encode()


def _deep(_root: Root) -> bytes:
    return b'{"format":1,"entries":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def _of_others(root: Root) -> bytes:
    """Its entries are of snapshots that are not there, under tags of those that are."""
    index = json.loads(root.index)
    for entry in index["entries"]:
        entry["register"]["count"] += 5000
    return json.dumps(index).encode()


def _impossible(root: Root) -> bytes:
    """Its registers have sizes, types and numbers that none can have."""
    index = json.loads(root.index)
    for number, entry in enumerate(index["entries"]):
        register = entry["register"]
        register.update(
            [
                {"world_size": 10**12},
                {"shards": []},
                {"format": 99},
                {"persist": True},
            ][number % 4]
        )
    return json.dumps(index).encode()


BAD: dict[str, Callable[[Root], bytes]] = {
    "empty": lambda _: b"",
    "garbage": lambda _: b"\xff\x00\x80" * 1000,
    "cut": lambda root: root.index[: len(root.index) // 2],
    "other types": lambda _: b'{"format":1,"entries":[{"tag":1,"register":null}]}',
    "another format": lambda root: root.index.replace(b'"format":1', b'"format":2', 1),
    "wrong tags": _lying,
    "deep": _deep,
    "of others": _of_others,
    "impossible": _impossible,
    "large": lambda root: root.index + b" " * (100 << 20),
}


@pytest.mark.parametrize("kind", [name for name in BAD if name != "large"])
def test_a_bad_index_costs_requests_and_changes_no_answer(unchanging: Root, kind: str) -> None:
    unchanging.put(INDEX, BAD[kind](unchanging))
    unchanging.counts()
    assert steps(unchanging.listed()) == [*range(22)]
    assert unchanging.counts()[0] <= 22 + 3


@pytest.mark.nightly
def test_a_huge_index_is_not_read(unchanging: Root) -> None:
    unchanging.put(INDEX, BAD["large"](unchanging))
    unchanging.counts()
    assert steps(unchanging.listed()) == [*range(22)]
    assert unchanging.proxies[0].totals().nbytes_down < 4 << 20


def test_what_was_deleted_replaced_or_added_since_the_index_was_written_is_seen(
    small: Root,
) -> None:
    small.put(f"{snapshot_id(3).name}/{MANIFEST_NAME}", aborted(3))  # retention of another process
    small.delete(f"{snapshot_id(4).name}/{MANIFEST_NAME}")
    small.delete(f"{snapshot_id(5).name}/rank-00000.safetensors")
    make_snapshots(small.server, small.url, [30])
    changed = json.loads(small.index)
    assert len(changed["entries"]) == 22
    # The order is that of runs: 30 is of the first one.
    assert steps(small.listed()) == [0, 1, 2, *range(6, 20), 30, 20, 21]
    small.counts()


def test_the_first_save_with_keep_deletes_all_that_is_old_several_at_a_time(
    small: Root, folder: str
) -> None:
    done: list[int] = []
    turns = Turns()
    others_passed: list[bool] = []
    proxy = small.proxies[0]

    def save(store: SnapshotStore, rank: ThreadRank) -> None:
        turns.alone(rank, lambda: forget(small))
        store.save(state_of(rank), step=22)
        if rank.rank == 0:
            others_passed.append(_wait_for(lambda: len(proxy.requests("PUT", REGISTER)) >= 10))
            held.remove()
        store.drain(60)
        turns.alone(rank, lambda: done.extend(small.counts()))

    held = proxy.hang(method="PUT", path=REGISTER, skip=2, times=1)  # the first one is of step 22
    small.life(folder, save, keep=3, timeout_s=240)  # a request may hang for 40 s
    assert steps(small.listed()) == [20, 21, 22]
    assert others_passed == [True]
    assert done[0] <= 19 * 6 + 60
    assert done[1] <= 6


def _wait_for(is_so: Callable[[], bool]) -> bool:
    pause, deadline = threading.Event(), time.monotonic() + 20
    while not is_so() and time.monotonic() < deadline:
        pause.wait(0.02)
    return is_so()


class _Racing(WrappedTier):
    """While rank 0 looks at the register that it wrote, another process takes it off the list."""

    def __init__(self, inner: RootTier, replace: Callable[[], None]) -> None:
        super().__init__(inner)
        self._replace: Callable[[], None] | None = replace
        self._has_looked = False

    def enter(self, operation: str, nbytes: int = 0) -> None:
        if operation in ("read_manifest", "register_tag"):
            if self._has_looked and self._replace is not None:
                replace, self._replace = self._replace, None
                replace()
            self._has_looked = True


def test_an_index_written_while_a_snapshot_is_deleted_does_not_bring_it_back() -> None:
    location = "memory://listing/race"
    tier = open_root(location, FileOps())
    kept = Catalog(tier)
    for number in (1, 2):
        tier.create_shard(snapshot_id(number), 0, 27).discard()
        writer = tier.create_shard(snapshot_id(number), 0, 27)
        writer.write(memoryview(b"its bytes are not looked at"), 0)
        writer.publish()
        tier.create_manifest(snapshot_id(number), manifest_of(number), make_folder=False)
    kept.keep_index(1, snapshot_id(1))
    racing = _Racing(tier, lambda: tier.replace_manifest(snapshot_id(2), aborted(2)))
    kept.tier = racing
    kept.keep_index(1, snapshot_id(2))
    fresh = Catalog(open_root(location, FileOps()))
    assert [register.id for register in fresh.committed()] == [snapshot_id(1)]


def test_that_a_remote_root_was_emptied_is_told_once(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    fs = fsspec.filesystem("memory")
    with SnapshotStore("memory://listing/emptied", memory="16MiB", memory_dir=folder) as store:
        for step in range(4):
            store.save({"w": torch.zeros(1)}, step=step)
            store.drain(30)
            if step == 1:
                assert "emptied" not in caplog.text
                fs.rm("/listing/emptied", recursive=True)
    assert caplog.text.count("it was emptied, or its file system was unmounted") == 1
    assert [i.step for i in list_snapshots("memory://listing/emptied")] == [2, 3]
