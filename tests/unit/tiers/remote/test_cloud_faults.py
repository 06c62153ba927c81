"""Google Cloud Storage and Azure where the link or the server fails: one attempt, one clear fault, no mixture."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from shardstore.testing.forked import run_forked
from shardstore.tiers.remote.azure import AzureStore
from shardstore.tiers.remote.faults import Fault
from shardstore.tiers.remote.gcs import GCSStore
from shardstore.tiers.remote.link import Link
from shardstore.tiers.remote.objects import ObjectStore
from shardstore.tiers.remote.sftp import SFTPStore
from tests.servers.azure import ACCOUNT_KEY
from tests.servers.proxy import Fault as ProxyFault
from tests.servers.proxy import Proxy
from tests.unit.tiers.remote.store_suite import content

PART = 400_000


@dataclass
class Cloud:
    """One server behind a proxy, and stores on it."""

    kind: type[GCSStore | AzureStore]
    server: Any
    proxy: Proxy
    bucket: str = ""
    made: list[ObjectStore] = field(default_factory=list)

    def store(self, *, stall_s: float = 30.0, bucket: str = "", **options: object) -> ObjectStore:
        """Through the proxy."""
        given: Mapping[str, object] = {**self.server.options_at(self.proxy.port), **options}
        made = self.kind(bucket or self.bucket, "r", storage_options=given, link=Link(stall_s))
        self.made.append(made)
        return made


@pytest.fixture(scope="module", params=["gcs", "azure"])
def running(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    server = request.getfixturevalue(f"{request.param}_server")
    with Proxy(server.port) as proxy:
        yield Cloud(GCSStore if request.param == "gcs" else AzureStore, server, proxy)


@pytest.fixture
def cloud(running: Cloud) -> Iterator[Cloud]:
    running.bucket = running.server.fresh_bucket()
    yield running
    for store in running.made:
        store.close()
    running.made.clear()
    running.proxy.clear()
    running.proxy.reset_connections()
    running.proxy.forget()


def read(store: ObjectStore, key: str, nbytes: int = PART) -> bytes:
    into = bytearray(nbytes)
    return bytes(into[: store.get(key, 0, memoryview(into))])


def send(store: ObjectStore, key: str, data: bytes, part_nbytes: int = PART) -> Any:
    upload = store.begin(key, len(data), part_nbytes)
    for index, start in enumerate(range(0, len(data), part_nbytes)):
        upload.put(index, memoryview(data)[start : start + part_nbytes])
    return upload


def fault_of(call: Callable[[], object], within_s: float = 30.0) -> Fault:
    start = time.monotonic()
    with pytest.raises(Fault) as caught:
        call()
    assert time.monotonic() - start < within_s
    return caught.value


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, "denied"), (403, "denied"), (408, "slow"), (429, "throttled"), (500, "broken"), (503, "throttled")],
)  # fmt: skip
def test_errors_are_answers_to_one_attempt(cloud: Cloud, status: int, kind: str) -> None:
    store = cloud.store()
    store.put("a", b"x")
    upload = store.begin("b", 2 * PART, PART)
    calls: list[Callable[[], object]] = [
        lambda: read(store, "a"),
        lambda: store.entry("a"),
        lambda: store.put("a", b"y"),
        lambda: store.create("c", b"y"),
        lambda: store.listing("", is_flat=True),
        lambda: store.delete(["a"]),
        lambda: upload.put(0, memoryview(bytes(PART))),
        store.check,
        store.check_writable,
    ]
    for call in calls:
        cloud.proxy.forget()
        struck = cloud.proxy.answer(status, "Whatever")
        assert fault_of(call).kind == kind
        assert len(cloud.proxy.requests()) == struck.hits == 1
        struck.remove()
    assert read(store, "a") == b"x"


def test_a_reset_is_unreachable_and_what_follows_works(cloud: Cloud) -> None:
    store = cloud.store()
    store.put("a", b"x")
    calls: list[tuple[str, Callable[[], object]]] = [
        ("GET", lambda: read(store, "a")),
        ("PUT|POST", lambda: store.put("a", b"y")),
    ]
    for method, call in calls:
        struck = cloud.proxy.reset(method=method)
        assert fault_of(call).kind == "unreachable"
        struck.remove()
    assert read(store, "a") == b"x"


@pytest.mark.parametrize("method", ["GET", "PUT|POST"])
def test_a_server_that_goes_silent_is_given_up(cloud: Cloud, method: str) -> None:
    cloud.store().put("a", b"x")
    cloud.proxy.hang(method=method)
    store = cloud.store(stall_s=1.0)
    call: Callable[[], object] = lambda: read(store, "a")  # noqa: E731
    if method != "GET":
        upload = store.begin("b", 2 * PART, PART)
        call = lambda: upload.put(0, memoryview(bytes(PART)))  # noqa: E731
    assert fault_of(call, within_s=20).kind == "slow"
    cloud.proxy.clear()
    assert read(cloud.store(), "a") == b"x"


def test_a_slow_link_is_not_a_silent_one(cloud: Cloud) -> None:
    data = content(600_000)
    cloud.store().put("a", data)
    cloud.proxy.limit(per_connection=200_000)
    start = time.monotonic()
    assert read(cloud.store(stall_s=1.5), "a", 1 << 20) == data
    assert time.monotonic() - start > 2.5  # else nothing was shown


@pytest.mark.nightly
def test_a_slow_link_for_an_upload_is_not_a_silent_one(cloud: Cloud) -> None:
    """The kernel takes up to some megabytes at once: what is shown begins beyond."""
    data = content(12_000_000)
    cloud.proxy.limit(per_connection=1_000_000)
    store = cloud.store(stall_s=8.0)
    start = time.monotonic()
    send(store, "a", data, len(data) - 1).complete()
    assert time.monotonic() - start > 10.0
    cloud.proxy.limit()
    assert read(store, "a", len(data)) == data


@pytest.mark.parametrize("is_honest", [False, True])
def test_a_short_answer_is_never_taken_for_the_whole(cloud: Cloud, is_honest: bool) -> None:
    store = cloud.store()
    store.put("a", content(PART))
    cloud.proxy.short(100_000, method="GET", is_honest=is_honest)
    assert fault_of(lambda: read(store, "a")).kind in ("broken", "unreachable")


def test_another_range_is_never_taken_for_the_right_one(cloud: Cloud) -> None:
    if cloud.kind is AzureStore:
        pytest.skip("its signature covers the range, which the proxy has to change")
    store = cloud.store()
    data = content(PART)
    store.put("a", data)
    orders: list[Callable[[], ProxyFault]] = [
        lambda: cloud.proxy.shift_range(7, claims_asked=False, method="GET"),
        lambda: cloud.proxy.whole(method="GET"),
    ]
    for order in orders:
        struck = order()
        assert fault_of(lambda: store.get("a", 1000, memoryview(bytearray(500)))).kind == "broken"
        struck.remove()
    into = bytearray(500)
    assert store.get("a", 1000, memoryview(into)) == 500
    assert into == data[1000:1500]


def test_an_upload_whose_completion_was_not_acknowledged_is_completed_again(cloud: Cloud) -> None:
    store = cloud.store()
    data = content(3 * PART + 5)
    upload = send(store, "a", data)
    lost = cloud.proxy.reset(method="PUT|POST", times=1, stage="done")
    with contextlib.suppress(Fault):  # aiohttp repeats a PUT by itself
        upload.complete()
    assert lost.hits == 1
    upload.complete()
    assert read(store, "a", 4 * PART) == data
    assert store.unfinished() == []
    upload.abort()
    assert read(store, "a", 4 * PART) == data


def test_a_create_that_was_not_acknowledged_has_happened(cloud: Cloud) -> None:
    store = cloud.store()
    lost = cloud.proxy.reset(method="PUT|POST", times=1, stage="done")
    with contextlib.suppress(Fault):
        assert store.create("a", b"first") is True  # aiohttp repeats a PUT by itself
    assert lost.hits == 1
    assert store.create("a", b"second") is False
    assert read(store, "a") == b"first"


def test_a_missing_bucket_is_said_to_be_missing(cloud: Cloud) -> None:
    store = cloud.store(bucket="no-such-bucket")
    calls: list[Callable[[], object]] = [
        store.check, store.check_writable, lambda: store.put("a", b"x"), lambda: store.create("a", b"x"),
        lambda: store.listing("", is_flat=False),
    ]  # fmt: skip
    for call in calls:
        assert fault_of(call).kind == "no bucket"


@pytest.mark.parametrize(
    "num_parts", [70, pytest.param(1_100, marks=pytest.mark.nightly)]
)  # compose takes 32
def test_many_parts_are_joined_in_their_order(cloud: Cloud, num_parts: int) -> None:
    store = cloud.store()
    data = content(num_parts * 100 + 7)
    upload = store.begin("a", len(data), 100)
    with ThreadPoolExecutor(12) as pool:
        starts = range(0, len(data), 100)
        list(
            pool.map(
                lambda i: upload.put(i, memoryview(data)[i * 100 : (i + 1) * 100]),
                reversed(range(len(starts))),
            )
        )
    upload.complete()
    assert read(store, "a") == data
    assert store.unfinished() == []
    assert store.listing("", is_flat=True).objects.keys() == {"a"}


def test_wrong_credentials_are_denied_without_being_told(cloud: Cloud) -> None:
    if cloud.kind is GCSStore:
        pytest.skip("fake-gcs-server takes all credentials")
    secret = ACCOUNT_KEY[:-6] + "AAAA=="
    right = cloud.server.options_at(cloud.proxy.port)["connection_string"]
    store = cloud.store(connection_string=right.replace(ACCOUNT_KEY, secret))
    for call in (store.check, store.check_writable, lambda: store.put("a", b"x")):
        fault = fault_of(call)
        assert fault.kind == "denied"
        assert secret not in str(fault)


def test_options_that_do_not_exist_are_refused(cloud: Cloud) -> None:
    if cloud.kind is AzureStore:
        with pytest.raises(ValueError, match="acount_name"):
            cloud.store(acount_name="x")
    else:
        with pytest.raises(ValueError, match="access must be one of"):
            cloud.store(access="all")


def test_a_forked_child_can_use_the_store_and_the_parent_goes_on(cloud: Cloud) -> None:
    store = cloud.store()
    store.put("a", b"parent")

    def child() -> str:
        store.put("b", b"child")
        seen = read(store, "a").decode()
        store.close()
        return seen

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # the client's threads are not used there
        ended = run_forked(child)
    assert (ended.value, ended.error) == ("parent", "")
    assert read(store, "b") == b"child"


@pytest.mark.parametrize(
    ("kind", "module", "extra"),
    [
        (SFTPStore, "paramiko", "sftp"),
        (GCSStore, "gcsfs.core", "gcs"),
        (AzureStore, "azure.storage.blob.aio", "azure"),
    ],
)
def test_a_missing_client_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, kind: Any, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install 'shardstore\[{extra}\]'"):
        kind("host", "/r", storage_options={}, link=Link())
