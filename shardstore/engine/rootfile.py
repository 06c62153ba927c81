"""What a rank's file on the root consists of: all of its sealed file, or what no replica stores for it.

A file that leaves pieces to replicas has a header of its own and some of the sealed file's data. It is put
together in portions, on the way out: there never is a second copy of the data in memory.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import msgspec

from shardstore.errors import FormatError
from shardstore.format.records import NearCopy, ShardHeader, Sharing
from shardstore.format.shardfile import ShardLayout, encode_header, header_digest, plan_layout
from shardstore.format.sharing import ReplicaGroup, find_groups, holders_for, without_bytes_of

Take: TypeAlias = Callable[[int, memoryview], None]
"""Fills memory from an offset of the sealed file on."""


class Run(NamedTuple):
    """Bytes that lie together in both files."""

    start: int
    """Offset in the file on the root."""
    source: int
    """Offset in the sealed file."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class SharedForm:
    """Where the bytes of a file come from that leaves pieces to replicas."""

    held_by: tuple[tuple[int, int], ...]
    layout: ShardLayout
    """Of the file on the root. Its data starts where that of the sealed file does."""
    runs: tuple[Run, ...]
    """All of its data, in file order, without holes."""

    def header(self, header: ShardHeader, sealed: bytes, sealed_nbytes: int) -> bytes | None:
        """The header of the file on the root; None if it has no room.

        Args:
            header: Of the sealed file.
            sealed: Its bytes.
            sealed_nbytes: Size of the sealed file.
        """
        near = NearCopy(sealed_nbytes, header_digest(sealed))
        pieces = without_bytes_of(header.pieces, self.held_by)
        mine = msgspec.structs.replace(header, pieces=pieces, sharing=Sharing(self.held_by, near))
        try:
            return encode_header(mine, self.layout)
        except (
            FormatError
        ):  # a few bytes longer than the other, where that one has used up its slack
            return None

    def gather(self, start: int, stop: int, into: memoryview, take: Take) -> None:
        """Put together bytes [start, stop) of the file on the root; no header is among them.

        Args:
            start: Offset in the file on the root.
            stop: End of the range.
            into: Memory for them, as long.
            take: Where they come from. Any thread.
        """
        at = bisect.bisect_right(self.runs, start, key=lambda run: run.start) - 1
        position = start
        while position < stop:
            run = self.runs[at]
            skipped = position - run.start
            nbytes = min(run.nbytes - skipped, stop - position)
            take(run.source + skipped, into[position - start : position - start + nbytes])
            position += nbytes
            at += 1


@dataclass(frozen=True, slots=True)
class Replicas:
    """Who stores what, as this rank computes it from its own tensors."""

    groups: tuple[ReplicaGroup, ...]
    form: SharedForm | None
    """None: no replica stores anything for this rank, and its file is whole."""


class ReplicaPlanner:
    """Plans once for as long as the tensors are the same."""

    def __init__(self) -> None:
        """Nothing is planned yet."""
        self._known: tuple[object, ...] = ()
        self._replicas = Replicas((), None)

    def plan(self, header: ShardHeader, layout: ShardLayout) -> Replicas:
        """Who stores what of the tensors that `header` describes, whose sealed file has this layout."""
        facts = (header.table, header.pieces, header.meshes, layout)
        if len(self._known) != len(facts) or any(
            mine is not theirs for mine, theirs in zip(self._known, facts, strict=True)
        ):
            self._replicas = _plan(header, layout)
            self._known = facts
        return self._replicas


def _plan(header: ShardHeader, layout: ShardLayout) -> Replicas:
    groups = find_groups(header.table, header.pieces, header.meshes, header.rank)
    held_by = holders_for(groups, header.rank)
    if not held_by:
        return Replicas(groups, None)
    pieces = without_bytes_of(header.pieces, held_by)
    mine = plan_layout(header.table, pieces, 0, layout.data_start)
    return Replicas(groups, SharedForm(held_by, mine, _runs(mine, layout)))


def _runs(mine: ShardLayout, sealed: ShardLayout) -> tuple[Run, ...]:
    """Spans of both files in file order, neighbours joined. Both have the same order."""
    spans: Sequence[tuple[tuple[int, int], int]] = sorted(
        (span, source[0])
        for span, source in zip(mine.spans, sealed.spans, strict=True)
        if span[0] < span[1]
    )
    runs: list[Run] = []
    for (start, stop), source in spans:
        last = runs[-1] if runs else None
        if last is not None and last.source + last.nbytes == source:
            runs[-1] = Run(last.start, last.source, last.nbytes + stop - start)
        else:
            runs.append(Run(start, source, stop - start))
    return tuple(runs)
