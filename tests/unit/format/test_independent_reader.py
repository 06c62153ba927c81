"""A reader written from docs/format.md alone: standard library and xxhash, nothing of ours."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import xxhash

from shardstore.format.manifest import encode_manifest
from tests.unit.format.builders import manifest_of, sharded_file


def _digest_around(data: bytes, start: int) -> str:
    blank = data[:start] + b"0" * 32 + data[start + 32 :]
    return xxhash.xxh3_128_hexdigest(blank)


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _read_shard(data: bytes) -> tuple[str, dict[str, Any], dict[tuple[str, ...], bytes]]:
    (length,) = struct.unpack("<Q", data[:8])
    header, payload = data[: 8 + length], data[8 + length :]
    assert len(header) % 4096 == 0
    assert header[8:46] == b'{"__metadata__":{"shardstore_digest":"'
    digest = header[46:78].decode()
    assert digest == _digest_around(header, 46)
    entries = json.loads(header[8:])
    record = json.loads(entries.pop("__metadata__")["shardstore"])
    assert record["table_digest"] == xxhash.xxh3_128_hexdigest(_compact(record["table"]))
    tensors: dict[tuple[str, ...], bytes] = {}
    for row, (key, _, sizes, _, piece_digest) in zip(
        record["table"], record["pieces"], strict=True
    ):
        if "alias_of" in row:
            owner = record["table"][row["alias_of"]]
            tensors[tuple(row["path"])] = tensors[tuple(owner["path"])]
            continue
        start, end = entries.pop(key)["data_offsets"]
        raw = payload[start:end]
        assert xxhash.xxh3_128_hexdigest(raw) == piece_digest
        assert not sizes or len(raw) % max(1, math.prod(sizes)) == 0
        tensors[tuple(row["path"])] = raw
    assert not entries
    return digest, record, tensors


def test_the_document_is_enough_to_read_a_snapshot() -> None:
    files = {0: sharded_file(0), 1: sharded_file(1)}
    data = encode_manifest(manifest_of(files))
    assert data[:11] == b'{"digest":"'
    assert data[11:43].decode() == _digest_around(data, 11)
    manifest = json.loads(data)
    for rank, shard in enumerate(manifest["shards"]):
        digest, record, tensors = _read_shard(files[rank].data)
        assert (digest, record["rank"]) == (shard["header_digest"], rank)
        assert shard["nbytes"] == len(files[rank].data)
        assert manifest["tables"][shard["table"]] == record["table"]
        assert tensors["model", "tied"] == tensors["model", "weight"]
        assert len(tensors["model", "weight"]) == 2 * 3 * (3 if rank == 0 else 2)
        assert tensors["rng",] == bytes(range(16))
