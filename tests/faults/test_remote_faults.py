"""Faults between a rank and S3: one or two are ridden out; those that stay end in one clear error on all ranks.

In either case within bounded time, with the old snapshot or the new one, and never a mixture: every element of a
state says its step. Each of two ranks has a proxy of its own, and only one of them meets the fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shardstore import ShardStoreError, SnapshotStore, list_snapshots
from tests.faults.clients import warm_client
from tests.faults.faulty import LARGE, SMALL, TIMEOUT_S, Faulty, outcome
from tests.faults.threaded import Stores, state_of, step_of
from tests.servers.proxy import Fault, Proxy
from tests.servers.s3 import MotoServer

SHARD = r"rank-0000\d.safetensors"
MANIFEST = "manifest.json"
LISTING = "list-type"
UPLOAD = "uploadId"
BOUND_S = 5 * TIMEOUT_S
"""A few of its waits may follow one another."""

Order = Callable[..., Fault]


@pytest.fixture(scope="module")
def proxies(s3_server: MotoServer) -> Iterator[list[Proxy]]:
    warm_client("s3://")
    with Proxy(s3_server.port) as first, Proxy(s3_server.port) as second:
        yield [first, second]


@pytest.fixture
def faulty(s3_server: MotoServer, proxies: list[Proxy], folder: str) -> Iterator[Faulty]:
    found = Faulty(s3_server, proxies, s3_server.fresh(), folder)
    found.clear()
    yield found
    found.clear()


# ---------------------------------------------------------------------- saving

SMALL_PUTS: dict[str, Order] = {
    "reset before": lambda p, **k: p.reset(method="PUT", path=SHARD, **k),
    "reset within": lambda p, **k: p.reset(method="PUT", path=SHARD, stage="request", at=999, **k),
    "reset after": lambda p, **k: p.reset(method="PUT", path=SHARD, stage="done", **k),
    "500": lambda p, **k: p.answer(500, method="PUT", path=SHARD, **k),
    "503 SlowDown": lambda p, **k: p.answer(503, "SlowDown", method="PUT", path=SHARD, **k),
    "hangs": lambda p, **k: p.hang(method="PUT", path=SHARD, **k),
    "hangs within": lambda p, **k: p.hang(method="PUT", path=SHARD, stage="request", at=999, **k),
    "hangs after": lambda p, **k: p.hang(method="PUT", path=SHARD, stage="done", **k),
    "is seen late": lambda p, **k: p.hide(method="HEAD", path=SHARD, **k),
}
LARGE_PUTS: dict[str, Order] = {
    "part is reset within": lambda p, **k: p.reset(method="PUT", path="partNumber=2", stage="request", at=4 << 20, **k),
    "part hangs within": lambda p, **k: p.hang(method="PUT", path="partNumber=2", stage="request", at=4 << 20, **k),
    "begin is lost": lambda p, **k: p.reset(method="POST", path="uploads", stage="done", **k),
    "completion is lost": lambda p, **k: p.reset(method="POST", path=UPLOAD, stage="done", **k),
    "completion hangs after": lambda p, **k: p.hang(method="POST", path=UPLOAD, stage="done", **k),
    "completion fails with 200": lambda p, **k: p.answer(
        200, body="<?xml version='1.0'?><Error><Code>InternalError</Code></Error>", method="POST", path=UPLOAD, **k
    ),
}  # fmt: skip
COMMITS: dict[str, Order] = {
    "manifest is reset": lambda p, **k: p.reset(method="PUT", path=MANIFEST, **k),
    "manifest is lost": lambda p, **k: p.reset(method="PUT", path=MANIFEST, stage="done", **k),
    "manifest: 500 after": lambda p, **k: p.answer(
        500, method="PUT", path=MANIFEST, stage="done", **k
    ),
    "manifest hangs after": lambda p, **k: p.hang(method="PUT", path=MANIFEST, stage="done", **k),
    "listing is stale": lambda p, **k: p.stale(path=LISTING, **k),
    "listing: 500": lambda p, **k: p.answer(500, path=LISTING, **k),
}
"""These are rank 0's."""
SAVING = {
    **{name: (1, SMALL, order) for name, order in SMALL_PUTS.items()},
    **{name: (1, LARGE, order) for name, order in LARGE_PUTS.items()},
    **{name: (0, SMALL, order) for name, order in COMMITS.items()},
}
"""Rank that meets it, elements of the state, fault."""
RIDDEN_OUT_BY_DEFAULT = {
    "reset after", "503 SlowDown", "is seen late", "part is reset within", "completion is lost", "manifest is lost",
    "listing is stale",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in RIDDEN_OUT_BY_DEFAULT else pytest.mark.nightly)
        for name in SAVING
    ],
)
def test_two_faults_of_a_save_are_ridden_out(faulty: Faulty, name: str) -> None:
    rank, numel, order = SAVING[name]
    stores = faulty.open(keep=2)
    assert stores.save(1, numel=numel) == ["", ""]
    stores.drain()
    fault = order(faulty.proxies[rank], times=2)
    assert stores.save(2, numel=numel) == ["", ""]
    stores.drain()
    assert fault.hits > 0
    assert faulty.listed() == [1, 2]
    assert stores.restore(numel=numel) == 2
    stores.close()
    _check_restores_on_a_new_host(faulty, 2, numel)


STAYS_BY_DEFAULT = {"503 SlowDown"}
STAYS_GOOD = {"manifest is lost", "manifest: 500 after", "manifest hangs after", "listing is stale"}
"""The answer is found by reading, or was not needed."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in STAYS_BY_DEFAULT else pytest.mark.nightly)
        for name in SAVING
    ],
)
def test_a_fault_that_stays_fails_the_save_on_all_ranks(faulty: Faulty, name: str) -> None:
    rank, numel, order = SAVING[name]
    stores = faulty.open(on_error="warn")
    assert stores.save(1, numel=numel) == ["", ""]
    stores.drain()
    fault = order(faulty.proxies[rank])

    def one(store: SnapshotStore, number: int) -> tuple[str, float]:
        return outcome(lambda: store.save(state_of(2, number, numel), step=2).wait(BOUND_S))

    told, took_s = zip(*stores.each(one), strict=True)
    assert fault.hits > 0
    assert max(took_s) < BOUND_S
    if name in STAYS_GOOD:
        assert told == ("", "")
    else:
        assert told[0] == told[1], "ranks were told different things"
        assert told[0].startswith("SaveFailedError: the save of step 2 failed"), told[0]
        assert f"rank {rank}" in told[0]
        assert "s3://" in told[0]
        assert "step-000000000002" in told[0]
        assert told[0].rstrip().endswith("."), "what to do"
    faulty.clear()
    newest = 2 if told[0] == "" else 1
    assert stores.restore(numel=numel) in {newest, 2}
    assert stores.save(3, numel=numel) == ["", ""]
    stores.drain()
    assert faulty.listed() in ([1, newest, 3], [1, 3])
    assert stores.restore(numel=numel) == 3
    stores.close()
    _check_restores_on_a_new_host(faulty, 3, numel)


@pytest.mark.nightly
@pytest.mark.parametrize("is_listed", [True, False], ids=["listed", "not listed"])
def test_a_manifest_that_was_taken_in_silence_keeps_its_shards(
    faulty: Faulty, is_listed: bool
) -> None:
    """No answer to the manifest, and it cannot be seen either: not a byte goes because of that."""
    stores = faulty.open(on_error="warn")
    assert stores.save(1) == ["", ""]
    stores.drain()
    first = faulty.proxies[0]
    if not is_listed:
        first.stale(path=LISTING)
    first.hide(path=MANIFEST)
    first.reset(method="PUT", path=MANIFEST, stage="done")
    told = stores.each(
        lambda store, n: outcome(lambda: store.save(state_of(2, n, SMALL), step=2).wait(BOUND_S))[0]
    )
    assert "SaveFailedError" in told[0]
    assert told[1] in (told[0], "")  # rank 1 does see that it is committed, if it is asked
    faulty.clear()
    stores.drain()
    assert faulty.listed() == [1, 2]
    stores.close()
    _check_restores_on_a_new_host(faulty, 2, SMALL)


def _check_restores_on_a_new_host(faulty: Faulty, step: int, numel: int) -> None:
    stores = faulty.open(name="elsewhere")
    assert stores.restore(numel=numel) == step
    stores.close()


# ------------------------------------------------------------------- restoring

GET: dict[str, Any] = {"method": "GET", "path": SHARD}
READS: dict[str, Order] = {
    "reset before": lambda p, **k: p.reset(**GET, **k),
    "reset within": lambda p, **k: p.reset(**GET, stage="response", at=5000, **k),
    "500": lambda p, **k: p.answer(500, **GET, **k),
    "503 SlowDown": lambda p, **k: p.answer(503, "SlowDown", **GET, **k),
    "hangs": lambda p, **k: p.hang(**GET, **k),
    "hangs within": lambda p, **k: p.hang(**GET, stage="response", at=5000, **k),
    "short": lambda p, **k: p.short(5000, **GET, **k),
    "short, and says so": lambda p, **k: p.short(5000, is_honest=True, **GET, **k),
    "another range": lambda p, **k: p.shift_range(16, claims_asked=False, **GET, **k),
    "another range, which claims to be the right one": lambda p, **k: p.shift_range(
        16, claims_asked=True, **GET, **k
    ),
    "the whole object": lambda p, **k: p.whole(**GET, **k),
    "a flipped bit": lambda p, **k: p.flip(3000, path=SHARD, **k),
    "shard is seen late": lambda p, **k: p.hide(path=SHARD, **k),
    "shard cannot be read yet": lambda p, **k: p.hide(**GET, **k),
    "manifest is seen late": lambda p, **k: p.hide(path=MANIFEST, **k),
    "manifest has a flipped bit": lambda p, **k: p.flip(300, path=MANIFEST, **k),
    "manifest: 500": lambda p, **k: p.answer(500, method="GET|HEAD", path=MANIFEST, **k),
}
WRONG_BYTES = {"another range, which claims to be the right one", "a flipped bit", "manifest has a flipped bit"}  # fmt: skip
"""They are read again once."""


@pytest.fixture
def saved(faulty: Faulty) -> Faulty:
    """With steps 1 and 2 on the root, and nothing near the ranks."""
    stores = faulty.open(memory="1MiB", name="before")
    assert stores.save(1) == ["", ""]
    assert stores.save(2) == ["", ""]
    stores.close()
    return faulty


def _restore(stores: Stores, numel: int = SMALL, **options: Any) -> list[tuple[str, float, int]]:
    """By rank: what was raised, how long it took, and the step of live state."""

    def one(store: SnapshotStore, rank: int) -> tuple[str, float, int]:
        live = state_of(-7, rank, numel)
        told, took_s = outcome(lambda: store.restore(live, **options))
        return told, took_s, step_of(live, rank)

    return stores.each(one)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_faults_of_a_restore_are_ridden_out(saved: Faulty, rank: int) -> None:
    for name, order in READS.items():
        if "hangs" in name:
            continue  # below: they take seconds
        stores = saved.open()
        order(saved.proxies[rank], times=1 if name in WRONG_BYTES else 2)
        assert [(told, step) for told, _, step in _restore(stores)] == [("", 2), ("", 2)], name
        stores.close()
        saved.clear()


@pytest.mark.parametrize("name", [pytest.param("hangs", marks=pytest.mark.nightly), "hangs within"])
def test_a_read_that_hangs_once_is_read_again(saved: Faulty, name: str) -> None:
    stores = saved.open()
    READS[name](saved.proxies[1], times=1)
    assert [(told, step) for told, _, step in _restore(stores)] == [("", 2), ("", 2)]
    stores.close()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "a flipped bit" else pytest.mark.nightly)
        for name in READS
    ],
)
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_fault_that_stays_fails_the_restore_and_touches_nothing(
    saved: Faulty, rank: int, name: str
) -> None:
    stores = saved.open()
    fault = READS[name](saved.proxies[rank])
    found = _restore(stores)
    assert max(took_s for _, took_s, _ in found) < BOUND_S
    told, steps = {told for told, _, _ in found}, [step for _, _, step in found]
    assert len(told) == 1, f"ranks were told different things: {told}"
    if told == {""}:
        assert steps[0] == steps[1]
        assert steps[0] in (1, 2)
    else:
        assert steps == [-7, -7], "live state was touched"
        text = told.pop()
        assert "s3://" in text
        assert f"rank {rank}" in text or MANIFEST in text
    assert fault.hits > 0
    saved.clear()
    assert stores.restore() == 2
    assert stores.save(3) == ["", ""]
    stores.close()
    assert saved.listed() == [1, 2, 3]


@pytest.mark.nightly
def test_a_large_shard_with_bad_ranges_is_whole_or_not_at_all(faulty: Faulty) -> None:
    stores = faulty.open(name="before")
    assert stores.save(1, numel=LARGE) == ["", ""]
    stores.close()
    for name in ("short", "another range", "reset within", "the whole object", "a flipped bit"):
        stores = faulty.open(memory="64MiB")
        READS[name](faulty.proxies[0], times=1, skip=2)
        found = _restore(stores, LARGE)
        assert [(told, step) for told, _, step in found] == [("", 1), ("", 1)], name
        stores.close()
        faulty.clear()


# --------------------------------------------------------------------- listing


def test_a_listing_rides_out_faults_or_says_what_fails(saved: Faulty) -> None:
    proxy, options = saved.proxies[0], saved.options(0)
    empty = (
        "<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
    )
    orders: tuple[Callable[[], Fault], ...] = (
        lambda: proxy.reset(times=1),
        lambda: proxy.answer(503, "SlowDown", times=1),
        lambda: proxy.short(20, path=LISTING, times=1),
        lambda: proxy.answer(200, body=empty, path=LISTING, times=1),
        lambda: proxy.hide(path=MANIFEST, times=1),
        lambda: proxy.flip(300, path=MANIFEST, times=1),
    )
    for order in orders:
        fault = order()
        assert [info.step for info in list_snapshots(saved.url, storage_options=options)] == [1, 2]
        assert fault.hits <= 1
        saved.clear()
    proxy.answer(403, "AccessDenied", path=LISTING)
    with pytest.raises(ShardStoreError, match=r"(?s)list s3://.*denied.*Check the credentials"):
        list_snapshots(saved.url, storage_options=options)
