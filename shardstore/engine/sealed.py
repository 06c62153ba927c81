"""Sealed shard files as their headers tell of them, and whether some are one snapshot (P4: headers are enough)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from shardstore.errors import CorruptSnapshotError, FormatError
from shardstore.format.manifest import build_manifest, check_tables
from shardstore.format.records import Manifest, ShardHeader, SnapshotId
from shardstore.format.shardfile import (
    ShardLayout,
    check_opening,
    header_length,
    parse_header,
)
from shardstore.format.sharing import content_digest
from shardstore.tiers.base import ShardReader

_PEEK_NBYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class SealedShard:
    """One shard file, as its header tells."""

    header: ShardHeader
    nbytes: int
    digest: str
    layout: ShardLayout | None = None
    """Where its tensors are; None for a header that a rank posted."""
    content: str = ""
    """`content_digest` of a header that a rank posted without what that takes."""
    has_bytes: bool = True
    """Whether there are bytes of tensors in it."""
    shared: SealedShard | None = None
    """The file in its place that leaves pieces to replicas, where that may be on the root."""


def manifest_of(
    shards: Mapping[int, SealedShard], *, writer: Mapping[str, str], is_exclusive: bool = True
) -> Manifest:
    """The manifest of a whole set of shards; metadata and time are rank 0's."""
    first = shards[0].header
    return build_manifest(
        {rank: (s.header, s.nbytes, s.digest) for rank, s in shards.items()},
        created=first.created,
        metadata=first.metadata,
        writer=dict(writer),
        is_exclusive=is_exclusive,
        twins=_twins(shards),
    )


def _twins(shards: Mapping[int, SealedShard]) -> dict[int, int]:
    """Ranks whose files no restore needs, as long as that of their twin is there."""
    spare = [
        r for r, s in shards.items() if s.header.sharing is not msgspec.UNSET and not s.has_bytes
    ]
    if not spare:
        return {}
    contents = {rank: s.content or content_digest(s.header) for rank, s in shards.items()}
    first: dict[str, int] = {}
    for rank in sorted(shards.keys() - set(spare)):
        first.setdefault(contents[rank], rank)
    return {rank: first[contents[rank]] for rank in spare if contents[rank] in first}


def problems_between(shards: Mapping[int, SealedShard]) -> list[str]:
    """Why these shards are not one snapshot: readable problems, empty if they are."""
    first = shards[min(shards)].header
    problems = [
        f"rank {rank} saved {s.header.id} (world size {s.header.world_size}), "
        f"rank {first.rank} saved {first.id} (world size {first.world_size})"
        for rank, s in shards.items()
        if s.header.id != first.id
        or s.header.world_size != first.world_size
        or s.header.persist != first.persist
    ]
    return problems or check_tables([s.header for s in shards.values()])


def read_sealed_header(reader: ShardReader) -> SealedShard:
    """Read the header of an open shard file.

    Raises:
        TierError, FormatError, CorruptSnapshotError: It cannot be read, or is damaged.
    """
    try:
        parsed = parse_header(read_prefix(reader), reader.nbytes, source=reader.source)
    except (CorruptSnapshotError, FormatError):
        if not reader.may_differ_again:
            raise
        reader.forget()
        parsed = parse_header(read_prefix(reader), reader.nbytes, source=reader.source)
    has_bytes = parsed.layout.nbytes > parsed.layout.data_start
    return SealedShard(
        parsed.header, reader.nbytes, parsed.digest, parsed.layout, has_bytes=has_bytes
    )


def read_prefix(reader: ShardReader) -> memoryview | bytes:
    """Read the length and the JSON of an open shard file; nothing large that begins as something else.

    Raises:
        TierError, FormatError, CorruptSnapshotError: It cannot be read, or is no header of ours.
    """
    length = header_length(reader.read(0, 8), reader.nbytes, source=reader.source)
    if length > _PEEK_NBYTES:
        check_opening(reader.read(0, _PEEK_NBYTES), source=reader.source)
    return reader.read(0, 8 + length)


def check_identity(header: ShardHeader, snapshot_id: SnapshotId, rank: int, *, source: str) -> None:
    """Refuse a file that says it is another snapshot's or another rank's."""
    if header.id != snapshot_id or header.rank != rank:
        raise CorruptSnapshotError(
            f"{source}: the file says it is rank {header.rank} of {header.id}, "
            f"but rank {rank} of {snapshot_id} was looked for here",
            file=source, expected=f"rank {rank} of {snapshot_id}",
            actual=f"rank {header.rank} of {header.id}",
        )  # fmt: skip
