"""Digests: xxh3-128, 32 lower-case hex digits. They find damage; they are no defence against forgery."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec
import xxhash

from shardstore.format.records import TensorRow

Buffer: TypeAlias = bytes | bytearray | memoryview

BLANK: Final = b"0" * 32
"""Stands in the place of a record's own digest while that digest is computed."""

_UPDATE_NBYTES: Final = 16 << 20
_DIGEST = re.compile(r"[0-9a-f]{32}")


def digest_of(data: Buffer) -> str:
    """Return the digest of contiguous bytes.

    xxhash releases the GIL inside every update but the tiniest. Any thread.
    """
    view = memoryview(data)
    if view.nbytes <= _UPDATE_NBYTES:
        return xxhash.xxh3_128_hexdigest(view)
    flat = view.cast("B")
    hasher = xxhash.xxh3_128()
    for start in range(0, flat.nbytes, _UPDATE_NBYTES):
        hasher.update(flat[start : start + _UPDATE_NBYTES])
    return hasher.hexdigest()


def digest_around(data: Buffer, start: int) -> str:
    """Return the digest of `data` with its own 32 digits, at `start`, taken as zeros."""
    view = memoryview(data)
    hasher = xxhash.xxh3_128(view[:start])
    hasher.update(BLANK)
    hasher.update(view[start + len(BLANK) :])
    return hasher.hexdigest()


def table_digest(table: Sequence[TensorRow]) -> str:
    """Return the digest of a tensor table: of its compact JSON, defaults left out."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(table))


def is_digest(text: str) -> bool:
    """Tell whether `text` has the form of a digest."""
    return _DIGEST.fullmatch(text) is not None
