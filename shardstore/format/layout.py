"""Where the bytes of each tensor lie in a shard file. Planned before staging; data never moves after."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shardstore.errors import FormatError
from shardstore.format.dtypes import DTYPES
from shardstore.format.records import TensorPiece, TensorRow

ALIGNMENT: Final = 4096
"""Data starts on a page, so that it can be mapped and read with O_DIRECT."""

MAX_HEADER_NBYTES: Final = 100_000_000
"""Limit on the JSON header that every safetensors reader enforces."""


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Byte positions in one shard file."""

    data_start: int
    """File offset of the first data byte, a multiple of 4,096; equals 8 + header length."""
    nbytes: int
    """Exact file size."""
    spans: tuple[tuple[int, int], ...]
    """Half-open file offsets, parallel to the table. Empty for aliases, empty pieces, and what is elsewhere."""


def stored_shape(row: TensorRow, piece: TensorPiece) -> tuple[int, ...]:
    """Return the shape that the safetensors entry of a piece has."""
    dtype = DTYPES[row.dtype]
    return (*piece.sizes, dtype.itemsize) if dtype.opaque else piece.sizes


def plan_layout(
    table: Sequence[TensorRow],
    pieces: Sequence[TensorPiece],
    header_nbytes: int,
    room: int = 0,
) -> ShardLayout:
    """Place the header and every piece. Cheap, deterministic, touches no storage.

    Pieces follow one another without holes, widest dtype first, then by key, so each is aligned to its
    item size.

    Args:
        table: What the tensors are.
        pieces: This rank's pieces of them, parallel to `table`.
        header_nbytes: From `header_nbytes(header)`.
        room: `data_start` of the file whose place this one will take, 0 for none. Kept while the header
            fits it, so that a reused slot keeps its size; otherwise the new room has slack for leaves
            that grow.

    Raises:
        FormatError: The header would pass 100,000,000 bytes, or a dtype cannot be stored.
    """
    data_start = room if 0 < 8 + header_nbytes <= room else 0
    if data_start == 0:
        data_start = -(-(8 + header_nbytes + header_nbytes // 8 + 512) // ALIGNMENT) * ALIGNMENT
        limit = (8 + MAX_HEADER_NBYTES) // ALIGNMENT * ALIGNMENT
        if data_start > limit >= 8 + header_nbytes:
            data_start = limit
    if data_start % ALIGNMENT or data_start - 8 > MAX_HEADER_NBYTES:
        raise FormatError(
            f"a header of {header_nbytes} bytes does not fit: at most {MAX_HEADER_NBYTES} in whole pages."
            " Store fewer tensors per rank, or large leaves as tensors"
        )
    unknown = sorted({row.dtype for row in table} - DTYPES.keys())
    if unknown:
        raise FormatError("cannot store these dtypes", problems=unknown)

    itemsizes = [DTYPES[row.dtype].itemsize for row in table]
    owners = [i for i, row in enumerate(table) if row.alias_of is None and pieces[i].key]
    owners.sort(key=lambda i: (-itemsizes[i], pieces[i].key))
    spans = [(data_start, data_start)] * len(table)
    position = data_start
    for i in owners:
        nbytes = math.prod(pieces[i].sizes) * itemsizes[i]
        if nbytes:
            spans[i] = (position, position + nbytes)
            position += nbytes
    return ShardLayout(data_start, position, tuple(spans))
