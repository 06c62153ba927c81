"""Encode the header of a shard file: 8 bytes of length, JSON, spaces up to the first data page."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import msgspec

from shardstore.errors import FormatError
from shardstore.format.digests import BLANK, Buffer, digest_around, is_digest
from shardstore.format.dtypes import DTYPES, OPAQUE
from shardstore.format.layout import ShardLayout, plan_layout, stored_shape
from shardstore.format.records import ShardHeader, TensorPiece, TensorRow
from shardstore.format.sharing import rows_elsewhere
from shardstore.format.strict_json import find_unencodable

OPENING: Final = b'{"__metadata__":{"shardstore_digest":"'
"""How the JSON of every shard file begins."""

DIGEST_AT: Final = 8 + len(OPENING)
"""File offset of the header's own digest."""

DCP_VERSION: Final = "1.0"


def header_nbytes(header: ShardHeader) -> int:
    """Return how long the JSON of `header` will be once every digest is known.

    Digests have a fixed width, so this holds before staging. Step, counters and leaves may grow from
    save to save: the slack of `plan_layout` is for them.
    """
    layout = plan_layout(header.table, header.pieces, 0)
    unknown = sum(1 for p in header.pieces if p.key and not p.digest) + (not header.table_digest)
    return len(encode_json(header, layout)) + len(BLANK) * unknown


def encode_header(header: ShardHeader, layout: ShardLayout) -> bytes:
    """Return the first `layout.data_start` bytes of the file, own digest included.

    Written to a slot, the first 8 bytes go last: a file whose length field is zero is not sealed.

    Args:
        header: Complete, with every digest.
        layout: From `plan_layout` for the same table and pieces.

    Raises:
        FormatError: A digest is missing, two tensors have one key, the metadata is no JSON, or it does
            not fit the room that was planned.
    """
    problems = _find_problems(header, layout)
    if problems:
        raise FormatError(f"cannot encode the header of {header.id}", problems=problems)
    text = encode_json(header, layout)
    length = layout.data_start - 8
    if len(text) > length:
        raise FormatError(
            f"the header of {header.id} takes {len(text)} bytes, {length} were planned: leaves grew too"
            " much since the layout was planned"
        )
    sealed = bytearray(struct.pack("<Q", length))
    sealed += text
    sealed += b" " * (length - len(text))
    sealed[DIGEST_AT : DIGEST_AT + len(BLANK)] = digest_around(sealed, DIGEST_AT).encode()
    return bytes(sealed)


def header_digest(data: Buffer) -> str:
    """Read the digest that an encoded header carries; nothing is verified.

    Raises:
        FormatError: These are not the first bytes of a shard file.
    """
    start = bytes(memoryview(data)[: DIGEST_AT + len(BLANK)])
    digest = start[DIGEST_AT:].decode("ascii", "replace")
    if start[8:DIGEST_AT] != OPENING or not is_digest(digest):
        raise FormatError("not the header of a shardstore file")
    return digest


def check_opening(data: Buffer, *, source: str) -> None:
    """Refuse a file that does not begin as a shard file does.

    Raises:
        FormatError: It is something else.
    """
    if bytes(memoryview(data)[8:DIGEST_AT]) != OPENING:
        raise FormatError(f"{source}: the header does not begin as a shardstore file does")


def is_header_whole(data: Buffer) -> bool:
    """Tell whether the first bytes of a shard file are what was written; nothing is parsed."""
    try:
        return digest_around(data, DIGEST_AT) == header_digest(data)
    except FormatError:
        return False


def dcp_sharding_info(
    table: Sequence[TensorRow], pieces: Sequence[TensorPiece]
) -> dict[str, dict[str, list[int]]]:
    """Return the offsets of every stored tensor, as PyTorch's HuggingFaceStorageReader wants them."""
    return {
        piece.key: {
            "saved_offsets": [*piece.offsets, 0] if row.dtype in OPAQUE else list(piece.offsets)
        }
        for row, piece in zip(table, pieces, strict=True)
        if row.alias_of is None and piece.key
    }


def encode_json(header: ShardHeader, layout: ShardLayout) -> bytes:
    """Return the JSON of a header, with a blank in place of its own digest.

    Raises:
        FormatError: Something in it is no JSON.
    """
    encode = msgspec.json.encode
    data_start = layout.data_start
    entries = {
        piece.key: {
            "dtype": DTYPES[row.dtype].stored,
            "shape": stored_shape(row, piece),
            "data_offsets": (start - data_start, end - data_start),
        }
        for row, piece, (start, end) in zip(header.table, header.pieces, layout.spans, strict=True)
        if row.alias_of is None and piece.key
    }
    try:
        info = encode(encode(dcp_sharding_info(header.table, header.pieces)).decode())
        record = encode(encode(header).decode())
        tensors = encode(entries)
    except (UnicodeEncodeError, TypeError, RecursionError) as error:
        raise FormatError(f"cannot encode the header of {header.id}: {error}") from error
    return b"".join(
        (
            OPENING,
            BLANK,
            b'","format":"pt","DCP_VERSION":"',
            DCP_VERSION.encode(),
            b'","DCP_SHARDING_INFO":',
            info,
            b',"shardstore":',
            record,
            b"}," if entries else b"}",
            tensors[1:],
        )
    )


def _find_problems(header: ShardHeader, layout: ShardLayout) -> list[str]:
    problems = find_unencodable(header.metadata)
    if not is_digest(header.table_digest):
        problems.append("the table digest is missing")
    keys: set[str] = set()
    elsewhere = rows_elsewhere(header.sharing)
    for index, (row, piece) in enumerate(zip(header.table, header.pieces, strict=True)):
        if row.alias_of is not None or index in elsewhere:
            continue
        if not is_digest(piece.digest):
            problems.append(f"tensor {piece.key!r} has no digest")
        if piece.key in keys:
            problems.append(f"two tensors have the key {piece.key!r}")
        if piece.key in ("", "__metadata__"):
            problems.append(f"tensor at {row.path} has the key {piece.key!r}, which is reserved")
        keys.add(piece.key)
    if layout.spans != plan_layout(header.table, header.pieces, 0, layout.data_start).spans:
        problems.append("the layout was planned for other tensors")
    return problems
