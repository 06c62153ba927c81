"""A root on S3 with many snapshots, made past the store: registers and files by the package's own format."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Final

import msgspec

from shardstore.engine.catalog import aborted_manifest
from shardstore.format.digests import table_digest
from shardstore.format.manifest import MANIFEST_NAME, build_manifest, encode_manifest
from shardstore.format.records import ShardHeader, SnapshotId, TensorRow
from shardstore.format.register import read_register
from tests.servers.s3 import MotoServer

NONCE: Final = "0badcafe"
SHARD: Final = b"its bytes are not looked at"
_TABLE: Final = (TensorRow(("w",), "float32", (2,)),)


def snapshot_id(number: int) -> SnapshotId:
    """Of the first run; the order is that of the numbers."""
    return SnapshotId(number, 1, number, NONCE)


def manifest_of(number: int) -> bytes:
    """A committed snapshot of one rank."""
    header = ShardHeader(
        format=1, step=number, run=1, count=number, nonce=NONCE, rank=0, world_size=1, created=1e9, host="host",
        persist=True, meshes=(), coordinates=(), table=_TABLE, table_digest=table_digest(_TABLE), pieces=(), leaves=None,
        metadata={"loss": 0.5}, writer={},
    )  # fmt: skip
    manifest = build_manifest(
        {0: (header, len(SHARD), "0" * 32)}, created=1e9, metadata={"loss": 0.5}, writer={}
    )
    return encode_manifest(manifest)


def aborted(number: int) -> bytes:
    """What retention leaves of one, for a day."""
    return encode_manifest(aborted_manifest(snapshot_id(number), reason="retention", writer={}))


def put_all(server: MotoServer, objects: Iterable[tuple[str, bytes]]) -> None:
    """Put many small objects, by path of bucket and key: moto checks no signatures."""
    local = threading.local()

    def put(one: tuple[str, bytes]) -> None:
        path, data = one
        if not hasattr(local, "connection"):
            local.connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
        local.connection.request("PUT", path, data, {"Authorization": "AWS test:test"})
        answer = local.connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put, objects))


def make_snapshots(
    server: MotoServer, root: str, numbers: Iterable[int], *, with_index: bool = False
) -> None:
    """Put committed snapshots into a root, the record of their run, which has ended, and its index."""
    start = root.removeprefix("s3:/")
    record = {"format": 1, "nonce": NONCE, "host": "host", "boot_id": "another", "started": 1e9}
    objects = [(f"{start}/run-00000001.json", json.dumps(record).encode())]
    entries = []
    for number in numbers:
        folder, manifest = f"{start}/{snapshot_id(number).name}", manifest_of(number)
        objects.append((f"{folder}/rank-00000.safetensors", SHARD))
        objects.append((f"{folder}/{MANIFEST_NAME}", manifest))
        register = read_register(manifest, expect=snapshot_id(number))
        tag = hashlib.md5(manifest, usedforsecurity=False).hexdigest()
        entries.append({"tag": tag, "register": register})
    if with_index:
        index = msgspec.json.encode({"format": 1, "entries": entries})
        objects.append((f"{start}/index-00000001.json", index))
    put_all(server, objects)
