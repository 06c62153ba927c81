"""A rank's tensors where the files of replicas hold some of them: each read from the file that has it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
import torch

from shardstore.engine.holders import open_of, read_listed, rows_by_holder, spans_in
from shardstore.engine.passing import PassingShard
from shardstore.engine.sealed import SealedShard
from shardstore.format.layout import ALIGNMENT, ShardLayout, plan_layout
from shardstore.format.records import Manifest, ShardHeader
from shardstore.tiers.base import RootTier, ShardReader

A = TypeVar("A")
B = TypeVar("B")

_NUM_READERS: Final = 2
"""Files at a time: each has a ring of 64 MiB."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of a rank, in one file."""

    rank: int
    """Whose file it is."""
    rows: tuple[int, ...]
    sealed: SealedShard
    """The header of the rank that reads, with the places that its rows have in this file."""


class SharedShard(Mapping[int, torch.Tensor]):
    """Tensors of one rank, out of several files on the root; each read when it is asked for.

    Like PassingShard, which reads each of the files: every read verifies, nothing is kept, and no file
    stays open.
    """

    def __init__(
        self,
        root: RootTier,
        manifest: Manifest | None,
        sealed: SealedShard,
        needed: Sequence[int],
        progress: Callable[[int], None],
        *,
        file_rank: int,
    ) -> None:
        """Read the headers of the files, and find every needed row in them.

        Args:
            root: Where the files are.
            manifest: Lists them; None if the snapshot is torn.
            sealed: This rank's header, and the layout of the file that it came from.
            needed: Rows to read.
            progress: Called with numbers of bytes, by one thread at a time.
            file_rank: Whose file `sealed` came from.

        Raises:
            CorruptSnapshotError, FormatError, TierError: A file is damaged or cannot be read.
        """
        self._root = root
        self._manifest = manifest
        self._header = sealed.header
        self._needed = tuple(needed)
        counting = threading.Lock()

        def count(nbytes: int) -> None:
            with counting:
                progress(nbytes)

        self._progress = count
        rows_of = rows_by_holder(sealed.header, self._needed, file_rank=file_rank)

        def find(rank: int) -> _Part:
            rows = tuple(rows_of[rank])
            if rank == file_rank == sealed.header.rank:
                return _Part(rank, rows, sealed)
            return self._find(rank, rows)

        self._parts = _on_threads(find, sorted(rows_of))
        self._part_of = {row: part for part in self._parts for row in part.rows}

    def _find(self, rank: int, rows: tuple[int, ...]) -> _Part:
        """Find rows in the file of another rank."""
        mine = self._header
        with self._open(rank) as reader:
            found = read_listed(reader, self._manifest, mine.id, rank)
            spans = spans_in(found, mine, rows, source=reader.source, tier=reader.tier)
        layout = found.layout
        assert layout is not None
        none = (layout.data_start, layout.data_start)
        places = tuple(spans.get(row, none) for row in range(len(mine.table)))
        layout = ShardLayout(layout.data_start, layout.nbytes, places)
        return _Part(rank, rows, SealedShard(mine, found.nbytes, found.digest, layout))

    def _open(self, rank: int) -> AbstractContextManager[ShardReader]:
        return open_of(self._root, self._header.id, rank, needed_by=self._header.rank)

    def verify(self) -> None:
        """Read all that is needed once, and compare the digests.

        Raises:
            CorruptSnapshotError, TierError: It is damaged or cannot be read.
        """
        self._each(lambda _part, passing: passing.verify())

    def fill(self, targets: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Fill tensors, by row. They are filled before the last byte is verified.

        Raises:
            CorruptSnapshotError, TierError: A file is damaged or cannot be read.
        """

        def fill(part: _Part, passing: PassingShard) -> None:
            passing.fill({row: targets[row] for row in part.rows if row in targets})

        self._each(fill)

    def _each(self, use: Callable[[_Part, PassingShard], None]) -> None:
        def run(part: _Part) -> None:
            with self._open(part.rank) as reader:
                use(part, PassingShard(part.sealed, reader, part.rows, self._progress))

        _on_threads(run, self._parts)

    def __getitem__(self, row: int) -> torch.Tensor:
        part = self._part_of[row]
        with self._open(part.rank) as reader:
            return PassingShard(part.sealed, reader, (row,), self._progress)[row]

    def __iter__(self) -> Iterator[int]:
        return iter(self._needed)

    def __len__(self) -> int:
        return len(self._needed)


def _on_threads(run: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """Results in order; the first error, once nothing runs any more."""
    if len(items) < 2:
        return [run(item) for item in items]
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="shardstore-shared") as pool:
        futures = [pool.submit(run, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()


def whole_layout(header: ShardHeader) -> ShardLayout:
    """Where all tensors of a rank lie in memory, those included that are in other ranks' files."""
    pieces = [
        msgspec.structs.replace(piece, key=piece.key or ".".join(row.path))
        for row, piece in zip(header.table, header.pieces, strict=True)
    ]
    return plan_layout(header.table, pieces, 0, ALIGNMENT)
