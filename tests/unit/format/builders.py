"""Build shard files, and break them: shared by the tests of the format."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from shardstore.format.digests import BLANK, digest_around
from shardstore.format.header import DIGEST_AT
from shardstore.format.manifest import build_manifest
from shardstore.format.records import (
    FORMAT_VERSION,
    Manifest,
    Mesh,
    Placement,
    ShardHeader,
    TensorPiece,
    TensorRow,
)
from shardstore.format.shardfile import (
    ParsedShard,
    ShardLayout,
    digest_of,
    encode_header,
    header_length,
    header_nbytes,
    parse_header,
    plan_layout,
    table_digest,
)

MESH = Mesh(shape=(2,), axis_names=("dp",), device_type="cpu", ranks=(0, 1))
SHARDED = (Placement("Shard", 0),)


class ShardFile(NamedTuple):
    """A sealed file in memory."""

    data: bytes
    header: ShardHeader
    layout: ShardLayout


def row(name: str, dtype: str = "float32", shape: Sequence[int] = (4,), **facts: Any) -> TensorRow:
    return TensorRow(path=tuple(name.split(".")), dtype=dtype, shape=tuple(shape), **facts)


def whole_piece(of: TensorRow, key: str | None = None) -> TensorPiece:
    if of.alias_of is not None:
        return TensorPiece("", (0,) * len(of.shape), of.shape, "cpu", "")
    return TensorPiece(
        ".".join(of.path) if key is None else key, (0,) * len(of.shape), of.shape, "cpu", ""
    )


def make_header(
    table: Sequence[TensorRow],
    pieces: Sequence[TensorPiece] | None = None,
    *,
    rank: int = 1,
    **facts: Any,
) -> ShardHeader:
    fields: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "step": 100,
        "run": 42,
        "count": 7,
        "nonce": "9f3c1d20",
        "rank": rank,
        "world_size": 2,
        "created": 1.5,
        "host": "node-1",
        "persist": True,
        "meshes": (MESH,),
        "coordinates": ((rank,),),
        "table": tuple(table),
        "table_digest": "",
        "pieces": tuple(map(whole_piece, table) if pieces is None else pieces),
        "leaves": {"epoch": 3},
        "metadata": {"loss": 0.5},
        "writer": {"shardstore": "0.1.0"},
    }
    return ShardHeader(**(fields | facts))


def seal(header: ShardHeader, fill: Callable[[int], bytes] = bytes, room: int = 0) -> ShardFile:
    """Give every piece the bytes `fill(nbytes)`, fill in the digests, and return the file."""
    layout = plan_layout(header.table, header.pieces, header_nbytes(header), room)
    data = bytearray(layout.nbytes)
    pieces = []
    for of, piece, (start, end) in zip(header.table, header.pieces, layout.spans, strict=True):
        data[start:end] = fill(end - start)
        digest = "" if of.alias_of is not None else digest_of(memoryview(data)[start:end])
        pieces.append(msgspec.structs.replace(piece, digest=digest))
    sealed = msgspec.structs.replace(
        header, table_digest=table_digest(header.table), pieces=tuple(pieces)
    )
    data[: layout.data_start] = encode_header(sealed, layout)
    return ShardFile(bytes(data), sealed, layout)


def read(data: bytes) -> ParsedShard:
    """Read a file as the engine does: 8 bytes, then the rest of the header."""
    length = header_length(data[:8], len(data), source="file")
    return parse_header(data[: 8 + length], len(data), source="file")


def sharded_file(rank: int = 1, **facts: Any) -> ShardFile:
    """A file with a sharded, a plain, a tied, an empty and an opaque tensor."""
    table = (
        row("model.weight", "bfloat16", (5, 3), placements=SHARDED, mesh=0),
        row("model.tied", "bfloat16", (5, 3), placements=SHARDED, mesh=0, alias_of=0),
        row("model.steps", "int64", ()),
        row("model.none", "float32", (0, 3)),
        row("model.poles", "complex128", (2,)),
        row("rng", "uint8", (16,), private=True),
    )
    offset, size = (0, 3) if rank == 0 else (3, 2)
    pieces = (
        TensorPiece("model.weight", (offset, 0), (size, 3), "cpu", ""),
        TensorPiece("", (offset, 0), (size, 3), "cpu", ""),
        whole_piece(table[2]),
        whole_piece(table[3]),
        whole_piece(table[4]),
        whole_piece(table[5], f"rng@{rank}"),
    )
    return seal(
        make_header(table, pieces, rank=rank, **facts), lambda n: bytes(i % 251 for i in range(n))
    )


def manifest_of(files: Mapping[int, ShardFile]) -> Manifest:
    headers = {rank: (f.header, len(f.data), read(f.data).digest) for rank, f in files.items()}
    return build_manifest(headers, created=2.0, metadata={"loss": 0.5}, writer={"torch": "2"})


def forge(
    data: bytes,
    edit: Callable[[dict[str, Any], dict[str, Any]], object],
    *,
    fix_digest: bool = True,
) -> bytes:
    """Edit the outer JSON and the `shardstore` record of a file, and give it a right digest again."""
    length = struct.unpack("<Q", data[:8])[0]
    outer = json.loads(data[8 : 8 + length])
    record = json.loads(outer["__metadata__"]["shardstore"])
    edit(outer, record)
    metadata = outer["__metadata__"]
    if metadata is not None and "shardstore" in metadata:
        metadata["shardstore"] = dump(record)
    return reseal(data, dump(outer).encode(), fix_digest=fix_digest)


def reseal(data: bytes, text: bytes, *, fix_digest: bool = True) -> bytes:
    """Replace the JSON of a file; its room grows by whole pages where needed."""
    old = length = struct.unpack("<Q", data[:8])[0]
    while length < len(text):
        length += 4096
    forged = bytearray(struct.pack("<Q", length) + text.ljust(length) + data[8 + old :])
    if fix_digest:
        digest = digest_around(memoryview(forged)[: 8 + length], DIGEST_AT)
        forged[DIGEST_AT : DIGEST_AT + len(BLANK)] = digest.encode()
    return bytes(forged)


def forge_manifest(data: bytes, edit: Callable[[dict[str, Any]], object]) -> bytes:
    """Edit the JSON of a manifest and give it a right digest again."""
    record = json.loads(data)
    edit(record)
    return reseal_manifest(dump(record).encode())


def reseal_manifest(text: bytes) -> bytes:
    start = len(b'{"digest":"')
    forged = bytearray(text)
    forged[start : start + len(BLANK)] = digest_around(forged, start).encode()
    return bytes(forged)


def dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
