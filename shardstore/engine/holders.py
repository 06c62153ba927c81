"""Where the bytes of a rank's tensors are on the root, if replicas hold some of them; needs no torch.

Nothing is taken on trust: every file is the one that the manifest lists, and a piece in another rank's file
counts only with the digest that this rank saved. Bytes of two saves cannot come together.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec

from shardstore.engine.sealed import SealedShard, check_identity, read_sealed_header
from shardstore.engine.verify import check_listed
from shardstore.errors import CorruptSnapshotError, TierError
from shardstore.format.dtypes import DTYPES
from shardstore.format.manifest import shard_file_name
from shardstore.format.records import Manifest, NearCopy, ShardHeader, Sharing, SnapshotId
from shardstore.format.sharing import check_sharing
from shardstore.tiers.base import RootTier, ShardReader

Span: TypeAlias = tuple[int, int]
"""Half-open file offsets."""


@contextlib.contextmanager
def open_of(
    root: RootTier, snapshot_id: SnapshotId, rank: int, *, needed_by: int
) -> Iterator[ShardReader]:
    """Open the file of `rank`, which `needed_by` needs.

    Raises:
        TierError: It cannot be opened; the text names both.
    """
    try:
        reader = root.open_shard(snapshot_id, rank)
    except TierError as error:
        if rank == needed_by:
            raise
        raise TierError(
            f"rank {needed_by} needs the file of rank {rank}, which holds what they have in common: "
            f"{error}",
            tier=error.tier, key=error.key, operation=error.operation,
        ) from error.__cause__  # fmt: skip
    with reader:
        yield reader


def read_listed(
    reader: ShardReader, manifest: Manifest | None, snapshot_id: SnapshotId, rank: int
) -> SealedShard:
    """Read the header of the file of `rank`, and check that it is that file.

    Raises:
        CorruptSnapshotError, FormatError, TierError: It is not, or cannot be read.
    """
    sealed = read_sealed_header(reader)
    check_identity(sealed.header, snapshot_id, rank, source=reader.source)
    if manifest is not None:
        check_listed(manifest, sealed, reader)
    return sealed


def rows_by_holder(
    header: ShardHeader, rows: Sequence[int], *, file_rank: int
) -> dict[int, list[int]]:
    """Rows by the rank whose file has them; `file_rank` where the header names none."""
    held_by: Mapping[int, int] = {}
    if isinstance(header.sharing, Sharing):
        held_by = dict(header.sharing.held_by)
    found: dict[int, list[int]] = {}
    for row in rows:
        found.setdefault(held_by.get(row, file_rank), []).append(row)
    return found


def spans_in(
    found: SealedShard, mine: ShardHeader, rows: Sequence[int], *, source: str, tier: str
) -> dict[int, Span]:
    """Where rows of `mine` lie in the file of a replica.

    Raises:
        CorruptSnapshotError: It does not have the very same piece of one of them.
    """
    theirs, layout = found.header, found.layout
    assert layout is not None
    at = {row.path: index for index, row in enumerate(theirs.table)}
    spans: dict[int, Span] = {}
    for row in rows:
        tensor, piece = mine.table[row], mine.pieces[row]
        index = at.get(tensor.path)
        if index is not None:
            other = theirs.pieces[index]
            facts = (other.offsets, other.sizes, other.digest, theirs.table[index].dtype)
            is_same = facts == (piece.offsets, piece.sizes, piece.digest, tensor.dtype)
            if is_same and other.key:
                spans[row] = layout.spans[index]
                continue
        name = ".".join(tensor.path)
        raise CorruptSnapshotError(
            f"{source}: rank {theirs.rank} should hold tensor {name} of rank {mine.rank} as well, and does "
            "not have the same piece of it",
            tier=tier, file=source, tensor=name, expected=piece.digest,
        )  # fmt: skip
    return spans


def as_twin(sealed: SealedShard, manifest: Manifest, rank: int, *, source: str) -> SealedShard:
    """The header of `rank`, whose own file is lost and held no bytes, out of that of its twin.

    Raises:
        CorruptSnapshotError: The manifest calls it a twin, and it is none.
    """
    theirs, entry = sealed.header, manifest.shards[rank]
    held_by: dict[int, int] = {}
    if isinstance(theirs.sharing, Sharing):
        held_by = dict(theirs.sharing.held_by)
    for index, (row, piece) in enumerate(zip(theirs.table, theirs.pieces, strict=True)):
        nbytes = math.prod(piece.sizes) * DTYPES[row.dtype].itemsize
        if row.alias_of is None and nbytes:
            held_by.setdefault(index, theirs.rank)
    assert isinstance(entry.near, NearCopy)
    sharing = Sharing(tuple(sorted(held_by.items())), entry.near)
    problems: list[str] = []
    meshes = tuple(manifest.meshes[index] for index in entry.meshes)
    if (theirs.table_digest, theirs.meshes) != (entry.table, meshes):
        problems.append("it has other tensors")
    facts = {"sharing": sharing, "table": theirs.table, "meshes": theirs.meshes, "rank": rank}
    check_sharing(facts, problems.append)
    if problems:
        raise CorruptSnapshotError(
            f"{source}: rank {theirs.rank} cannot stand in for rank {rank}: {'; '.join(problems[:3])}",
            file=source,
        )
    header = msgspec.structs.replace(
        theirs,
        rank=rank,
        host=entry.host,
        coordinates=entry.coordinates,
        metadata=manifest.metadata if rank == 0 else theirs.metadata,
        sharing=sharing,
    )
    return SealedShard(header, sealed.nbytes, sealed.digest, sealed.layout)


def read_of(root: RootTier, manifest: Manifest, rank: int) -> SealedShard:
    """The header of a rank, out of its own file or else its twin's.

    Raises:
        CorruptSnapshotError, FormatError, TierError: There is none that can be read.
    """
    twin = manifest.shards[rank].twin
    try:
        with root.open_shard(manifest.id, rank) as reader:
            return read_listed(reader, manifest, manifest.id, rank)
    except TierError:
        if twin is msgspec.UNSET:
            raise
    with root.open_shard(manifest.id, twin) as reader:
        sealed = read_listed(reader, manifest, manifest.id, twin)
        return as_twin(sealed, manifest, rank, source=reader.source)


class StoredFiles:
    """The files of one committed snapshot, for who reads those of all ranks."""

    def __init__(self, root: RootTier, manifest: Manifest) -> None:
        """Read nothing yet."""
        self._root = root
        self._manifest = manifest
        self._read: dict[int, SealedShard] = {}

    def _header(self, rank: int) -> SealedShard:
        if rank not in self._read:
            self._read[rank] = read_of(self._root, self._manifest, rank)
        return self._read[rank]

    def read(self, rank: int) -> tuple[ShardHeader, list[tuple[int, int, int]]]:
        """The header of a rank; and for each row whose file has it, and where.

        Raises:
            CorruptSnapshotError, FormatError, TierError: A file is damaged or cannot be read.
        """
        mine = self._header(rank)
        assert mine.layout is not None
        header, layout = mine.header, mine.layout
        places = [(rank, *span) for span in layout.spans]
        elsewhere = rows_by_holder(header, range(len(header.table)), file_rank=rank)
        elsewhere.pop(rank, None)
        for holder, rows in elsewhere.items():
            source = shard_file_name(holder)
            theirs = self._header(holder)
            spans = spans_in(theirs, header, rows, source=source, tier=self._root.name)
            for row, span in spans.items():
                places[row] = (holder, *span)
        return header, places
