"""Memory that a transfer may use is bounded, whatever the size of a shard and whichever storage it goes to."""

from __future__ import annotations

import pytest

from shardstore.tiers.fileops import FileOps
from shardstore.tiers.remote.link import Link
from shardstore.tiers.remote.objects import ObjectStore
from shardstore.tiers.remote.opening import open_store
from shardstore.tiers.remote.reader import RemoteReader
from shardstore.tiers.remote.requests import Patience, Requests
from shardstore.tiers.remote.writer import RemoteWriter

MIB = 1 << 20
SIZES = [0, 1, 8 * MIB, 8 * MIB + 1, 10**9, 10**10, 8 * 10**10, 10**11, 3 * 10**11, 10**12]
STORES = {
    "s3": ("s3://bucket/run", {"key": "k", "secret": "s"}, 10_000),
    "gs": ("gs://bucket/run", {"token": "anon"}, 10_000),
    "az": ("az://container/run", {"account_name": "a", "account_key": "aGVsbG8="}, 50_000),
    "sftp": ("sftp://127.0.0.1/run", {}, None),
    "memory": ("memory://bounds/run", {}, None),
}


def requests_of(kind: str) -> Requests:
    url, options, _ = STORES[kind]
    store: ObjectStore = open_store(url, dict(options), Link())
    return Requests(store, name="root", ops=FileOps(), patience=Patience(1.0, 1.0))


@pytest.mark.parametrize("kind", STORES)
def test_parts_in_flight_are_bounded_for_any_size(kind: str) -> None:
    requests, most_parts = requests_of(kind), STORES[kind][2]
    for nbytes in SIZES:
        writer = RemoteWriter(requests, "key", nbytes)
        assert writer.num_parallel >= 1
        assert writer.piece_bytes * writer.num_parallel <= 192 * MIB
        assert most_parts is None or writer.piece_bytes * most_parts >= nbytes
        if nbytes <= 10**11 and not writer.is_in_order:
            assert writer.num_parallel == requests.store.num_parallel


@pytest.mark.parametrize("kind", STORES)
def test_what_a_reader_asks_for_at_a_time_is_bounded(kind: str) -> None:
    reader = RemoteReader(requests_of(kind), "root", "key", 10**12)
    assert reader.chunk_bytes * reader.num_places <= 192 * MIB
