"""Count the stored bytes in which two pieces of tensors differ, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import xxhash

from shardstore.errors import CorruptSnapshotError
from shardstore.format.records import SnapshotId
from shardstore.format.slices import TensorSlice, overlap
from shardstore.tiers.base import RootTier

if TYPE_CHECKING:
    import numpy as np

_CHUNK_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """Where one rank's piece of a tensor is stored."""

    tier: RootTier
    id: SnapshotId
    rank: int
    start: int
    """Offset in the file."""
    stop: int
    box: TensorSlice
    itemsize: int
    digest: str
    name: str
    """Of the tensor, for messages."""
    holder: int
    """Rank whose file it is in: a replica's, if that holds it for this one."""

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return self.stop - self.start


def count_differing(a: StoredPiece, b: StoredPiece, progress: Callable[[int], None]) -> int:
    """Differing bytes of two pieces of one box and item size. Both are verified as they are read.

    Args:
        a: One.
        b: The other; equally long.
        progress: Called with numbers of bytes of `a`.

    Raises:
        CorruptSnapshotError: One of them is not as it was saved.
        TierError: It cannot be read.
    """
    import numpy as np

    assert a.nbytes == b.nbytes
    digests = xxhash.xxh3_128(), xxhash.xxh3_128()
    differing = 0
    with a.tier.open_shard(a.id, a.holder) as left, b.tier.open_shard(b.id, b.holder) as right:
        for at in range(0, a.nbytes, _CHUNK_BYTES):
            num = min(_CHUNK_BYTES, a.nbytes - at)
            parts = (
                left.read(a.start + at, a.start + at + num),
                right.read(b.start + at, b.start + at + num),
            )
            for digest, part in zip(digests, parts, strict=True):
                digest.update(part)
            if len(parts[0]) == len(parts[1]) == num:
                x, y = (np.frombuffer(part, dtype=np.uint8) for part in parts)
                differing += int(np.count_nonzero(x != y))
            progress(num)
        for piece, reader, digest in zip((a, b), (left, right), digests, strict=True):
            if digest.hexdigest() != piece.digest:
                raise CorruptSnapshotError(
                    f"{reader.source}: tensor {piece.name} of rank {piece.rank} is damaged: its bytes "
                    f"have digest {digest.hexdigest()}, {piece.digest} were saved",
                    tier=reader.tier, file=reader.source, tensor=piece.name,
                    expected=piece.digest, actual=digest.hexdigest(),
                )  # fmt: skip
    return differing


def count_differing_in_overlap(a: StoredPiece, b: StoredPiece) -> int:
    """Differing bytes of the elements that two boxes of one global tensor share.

    For snapshots of different topologies. The files are mapped; digests are not compared.
    """
    import numpy as np

    common = overlap(a.box, b.box)
    if common is None or common.num_elements == 0:
        return 0
    x, y = _mapped(a, common), _mapped(b, common)
    if x.ndim == 1:  # a tensor without dims: its one element
        return int(np.count_nonzero(x != y))
    row_bytes = max(1, math.prod(x.shape[1:]))
    rows = max(1, _CHUNK_BYTES // row_bytes)
    return sum(
        int(np.count_nonzero(x[first : first + rows] != y[first : first + rows]))
        for first in range(0, len(x), rows)
    )


def _mapped(piece: StoredPiece, box: TensorSlice) -> np.ndarray[Any, Any]:
    """The bytes of `box` in a file, as an array of its dims and one of the bytes of an element."""
    import numpy as np

    with piece.tier.open_shard(piece.id, piece.holder) as reader:
        whole = np.memmap(
            reader.source, dtype=np.uint8, mode="r", offset=piece.start,
            shape=(*piece.box.sizes, piece.itemsize),
        )  # fmt: skip
    starts = [o - base for o, base in zip(box.offsets, piece.box.offsets, strict=True)]
    index = tuple(slice(start, start + size) for start, size in zip(starts, box.sizes, strict=True))
    return np.asarray(whole)[index]
