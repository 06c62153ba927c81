"""SFTP where the server, the link or the names do not do as asked; OpenSSH behind a TCP proxy."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shardstore.testing.forked import run_forked
from shardstore.tiers.remote.faults import Fault
from shardstore.tiers.remote.link import Link
from shardstore.tiers.remote.sftp import SFTPStore
from shardstore.tiers.remote.sftp_connections import _Wire
from tests.servers.openssh import SftpServer
from tests.servers.proxy import Proxy
from tests.unit.tiers.remote.store_suite import content

PART = 1 << 20
Make = Callable[..., SFTPStore]


@pytest.fixture(scope="module")
def running_proxy(sftp_server: SftpServer) -> Iterator[Proxy]:
    with Proxy(sftp_server.port, is_http=False) as running:
        yield running


@pytest.fixture
def proxy(running_proxy: Proxy) -> Iterator[Proxy]:
    yield running_proxy
    running_proxy.clear()
    running_proxy.reset_connections()


@pytest.fixture
def root(sftp_server: SftpServer) -> Path:
    return Path(sftp_server.files) / f"faults-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def make(sftp_server: SftpServer, root: Path) -> Iterator[Make]:
    made: list[SFTPStore] = []

    def make(
        *, port: int | None = None, stall_s: float = 30.0, path: Path = root, **options: Any
    ) -> SFTPStore:
        store = SFTPStore(
            "127.0.0.1",
            str(path),
            storage_options={**sftp_server.options_at(port or sftp_server.port), **options},
            link=Link(stall_s),
        )
        made.append(store)
        return store

    yield make
    for store in made:
        store.close()


def read(store: SFTPStore, key: str, nbytes: int = 1 << 16) -> bytes:
    into = bytearray(nbytes)
    return bytes(into[: store.get(key, 0, memoryview(into))])


def fault_of(call: Callable[[], object], within_s: float = 30.0) -> Fault:
    start = time.monotonic()
    with pytest.raises(Fault) as caught:
        call()
    assert time.monotonic() - start < within_s
    return caught.value


# ---------------------------------------------------------------------- the link


def test_a_broken_connection_fails_its_request_and_the_next_one_has_a_new_one(
    make: Make, proxy: Proxy
) -> None:
    proxy.reset(stage="request", at=1_500_000, times=1)
    store = make(port=proxy.port)
    data = content(3 * PART)
    upload = store.begin("a", len(data), PART)
    puts = [
        lambda i=i: upload.put(i, memoryview(data)[i * PART : (i + 1) * PART]) for i in range(3)
    ]
    puts[0]()
    assert fault_of(puts[1]).kind == "unreachable"
    puts[1]()
    puts[2]()
    upload.complete()
    assert read(store, "a", 4 * PART) == data


def test_connections_that_died_while_idle_cost_one_request(make: Make, proxy: Proxy) -> None:
    store = make(port=proxy.port)
    barrier = threading.Barrier(3)

    def put(key: str) -> None:
        barrier.wait()
        store.put(key, b"x")

    threads = [threading.Thread(target=put, args=(key,)) for key in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    proxy.reset_connections()
    with contextlib.suppress(Fault):  # whoever has seen the reset in time connects anew at once
        store.put("again", b"x")
    store.put("again", b"y")
    assert read(store, "again") == b"y"


@pytest.mark.parametrize(
    ("stage", "at"), [("head", 0), ("response", 3_000), ("response", 900_000), ("request", 900_000)]
)
def test_a_peer_that_goes_silent_is_given_up(make: Make, proxy: Proxy, stage: Any, at: int) -> None:
    make().put("a", content(8 * PART))
    hang = proxy.hang(stage=stage, at=at)
    proxy.limit(per_connection=50e6)  # with little room on the way, where sending itself blocks
    store = make(port=proxy.port, stall_s=1.0)
    data = content(24 * PART)  # more than fits between here and there

    def use() -> None:
        if stage == "request":
            store.put("b", data)
        else:
            store.get("a", 0, memoryview(bytearray(8 * PART)))

    assert fault_of(use, within_s=20).kind == "slow"
    hang.remove()
    assert make(port=proxy.port).entry("a") is not None


def test_a_slow_link_is_not_a_silent_one(make: Make, proxy: Proxy) -> None:
    data = content(500_000)
    make().put("a", data)
    proxy.limit(per_connection=150_000)
    store = make(port=proxy.port, stall_s=2.0)
    start = time.monotonic()
    with ThreadPoolExecutor(2) as pool:  # each on a connection of its own
        down = pool.submit(read, store, "a", PART)
        pool.submit(store.put, "b", data).result()
        assert down.result() == data
    assert time.monotonic() - start > 3.0  # else nothing was shown
    assert read(make(), "b", PART) == data


def test_a_socket_whose_peer_takes_nothing_is_given_up() -> None:
    """paramiko itself sends for ever, while the channel's window is not used up."""
    ours, theirs = socket.socketpair()
    with theirs, _Wire(ours.family, ours.type, ours.proto, fileno=ours.detach()) as wire:
        wire.settimeout(0.05)
        wire.limit = time.monotonic() + 0.5

        def send_as_paramiko_does() -> None:
            while True:
                with contextlib.suppress(TimeoutError):
                    wire.send(bytes(1 << 16))

        with pytest.raises(ConnectionAbortedError):
            send_as_paramiko_does()
        assert wire.is_late


def test_no_server_is_unreachable_and_found_again_when_it_is_back(make: Make, proxy: Proxy) -> None:
    store = make(port=proxy.port)
    store.put("a", b"x")
    proxy.outage(True)
    assert {fault_of(lambda: store.entry("a")).kind for _ in range(2)} == {"unreachable"}
    assert fault_of(make(port=proxy.port).check).kind == "unreachable"
    proxy.outage(False)
    assert read(store, "a") == b"x"


# ------------------------------------------------------------------- logging in


def test_wrong_credentials_are_denied_without_being_told(make: Make) -> None:
    for options in (
        {"key_filename": None, "password": "correct horse"},
        {"username": "nobody-of-that-name"},
        {"key_filename": "/no/such/key"},
    ):
        fault = fault_of(make(**options).check)
        assert fault.kind == "denied"
        assert "correct horse" not in str(fault)
        assert fault.__cause__ is not None


def test_hosts_are_trusted_unless_the_options_say_otherwise(
    make: Make, sftp_server: SftpServer, tmp_path: Path
) -> None:
    kind, key, *_ = sftp_server.host_key.split()
    right, wrong, none = (tmp_path / name for name in ("right", "wrong", "none"))
    name = f"[127.0.0.1]:{sftp_server.port}"
    right.write_text(f"{name} {kind} {key}\n")
    other = key[:-8] + ("A" * 8 if key[-8:] != "A" * 8 else "B" * 8)
    wrong.write_text(f"{name} {kind} {other}\n")
    none.write_text("")
    make().check()
    make(host_key_policy="auto_add").check()
    make(known_hosts=str(right)).check()
    make(known_hosts=str(right), host_key_policy="reject").check()
    for bad in (wrong, none):
        assert fault_of(make(known_hosts=str(bad)).check).kind == "denied"
    assert fault_of(make(known_hosts=str(wrong), host_key_policy="auto_add").check).kind == "denied"


def test_an_option_that_is_none_is_refused_by_name(make: Make) -> None:
    with pytest.raises(ValueError, match=r"do not take pasword.*password"):
        make(pasword="correct horse")
    with pytest.raises(ValueError, match="reject"):
        make(host_key_policy="maybe")
    make(skip_instance_cache=True, use_listings_cache=False, temppath="/tmp").check()


# ------------------------------------------------------------- names and folders


def test_names_that_a_file_cannot_have_are_refused(make: Make, root: Path) -> None:
    store = make()
    for key in ("", "/a", "a/", "a//b", "../a", "a/./b", "a\0b", "n" * 243, "ü" * 122, "a.0123abcd.tmp"):  # fmt: skip
        assert fault_of(lambda key=key: store.put(key, b"x")).kind == "refused"  # type: ignore[misc]
        assert store.entry(key) is None
        store.delete([key])
    assert not root.exists()
    store.put("n" * 242, b"x")
    assert read(store, "n" * 242) == b"x"
    (root / ("m" * 255)).write_bytes(b"made by another")
    assert read(store, "m" * 255) == b"made by another"


def test_a_root_that_cannot_be_one_is_refused(make: Make, root: Path) -> None:
    with pytest.raises(ValueError, match=r"\.\."):
        make(path=Path("/a/../b"))
    root.write_bytes(b"")
    assert fault_of(make().check).kind == "refused"
    assert fault_of(lambda: make().put("a", b"x")).kind == "refused"
    assert root.read_bytes() == b""


def test_a_folder_and_an_object_cannot_have_one_name(make: Make) -> None:
    store = make()
    store.put("a/b", b"x")
    for call in (
        lambda: store.put("a", b"y"),
        lambda: store.create("a", b"y"),
        lambda: store.put("a/b/c", b"y"),
    ):
        with contextlib.suppress(Fault):
            assert call() is False
    assert store.listing("", is_flat=True).objects.keys() == {"a/b"}
    assert store.unfinished() == []
    assert fault_of(lambda: store.put("a", b"y")).kind == "refused"


def test_a_root_without_rights_is_denied_before_anything_is_written(
    make: Make, root: Path, sftp_server: SftpServer
) -> None:
    make().put("a", b"x")
    root.chmod(0o555)
    try:
        for store in (make(), make(path=root / "new" / "er")):
            store.check()
            assert fault_of(store.check_writable).kind == "denied"
            assert fault_of(lambda store=store: store.put("b", b"x")).kind == "denied"  # type: ignore[misc]
        root.chmod(0o000)
        assert fault_of(make().check).kind == "denied"
        assert fault_of(lambda: make().listing("", is_flat=True)).kind == "denied"
    finally:
        root.chmod(0o755)
    assert os.listdir(root) == ["a"]


def test_more_bytes_than_the_disk_has_are_refused_as_full(make: Make) -> None:
    assert fault_of(lambda: make().begin("a", 1 << 60, 8 << 20)).kind == "full"


def test_folders_go_with_their_last_file_and_the_root_stays(make: Make, root: Path) -> None:
    store = make()
    for key in ("a/b/c", "a/b/d", "e/f/g", "h"):
        store.put(key, b"x")
    store.delete(["a/b/c", "e/f/g"])
    assert sorted(path.name for path in root.iterdir()) == ["a", "h"]
    store.delete(["a/b/d", "h"])
    assert list(root.iterdir()) == []


def test_writers_and_deleters_of_one_folder_do_not_disturb_each_other(make: Make) -> None:
    store, failed = make(), []

    def use(name: str) -> None:
        try:
            for _ in range(15):
                store.put(f"deep/er/{name}", b"x")
                store.delete([f"deep/er/{name}"])
        except Fault as fault:
            failed.append(fault)

    threads = [threading.Thread(target=use, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_of_many_who_create_at_the_same_moment_one_wins_every_time(make: Make) -> None:
    """Each with a connection that is there already: nothing but the server is in between."""
    stores = [make() for _ in range(6)]
    barrier = threading.Barrier(len(stores))

    def create(index: int) -> list[bool]:
        stores[index].check()
        won = []
        for number in range(12):
            barrier.wait()
            won.append(stores[index].create(f"key {number}", b"%d" % index))
        return won

    with ThreadPoolExecutor(len(stores)) as pool:
        outcomes = list(zip(*pool.map(create, range(len(stores))), strict=True))
    assert [sum(won) for won in outcomes] == [1] * 12
    for number, won in enumerate(outcomes):
        assert read(stores[0], f"key {number}") == b"%d" % won.index(True)


def test_an_upload_that_lacks_bytes_is_not_completed(make: Make, root: Path) -> None:
    store = make()
    upload = store.begin("a", 2 * PART, PART)
    upload.put(0, memoryview(content(PART)))
    assert fault_of(upload.complete).kind == "broken"
    assert store.entry("a") is None
    upload.abort()
    assert fault_of(upload.complete).kind == "refused"
    assert not root.exists() or list(root.iterdir()) == []


def test_links_to_files_are_objects_and_links_to_folders_are_not(make: Make, root: Path) -> None:
    store = make()
    store.put("a/b", b"x")
    (root / "file").symlink_to(root / "a" / "b")
    (root / "loop").symlink_to(root)
    (root / "gone").symlink_to(root / "nowhere")
    assert store.listing("", is_flat=True).objects.keys() == {"a/b", "file"}
    assert store.listing("", is_flat=False).folders == {"a"}


def test_a_forked_child_can_use_the_store_and_leaves_the_parents_connections_alone(
    make: Make,
) -> None:
    store = make()
    store.put("a", b"parent")

    def child() -> str:
        store.put("b", b"child")
        return read(store, "a").decode()

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # the client's threads are not used there
        ended = run_forked(child)
    assert (ended.value, ended.error) == ("parent", "")
    assert read(store, "b") == b"child"
