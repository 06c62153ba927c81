"""A shard that is never whole in memory: its bytes pass through a small ring, verified each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from shardstore.engine.sealed import SealedShard
from shardstore.engine.verify import Verifier
from shardstore.errors import CorruptSnapshotError
from shardstore.format.shardfile import ShardLayout
from shardstore.state.portions import PortionWriter
from shardstore.state.staging import as_stored
from shardstore.tiers.base import ShardReader
from shardstore.tiers.transfer import Ring


class PassingShard(Mapping[int, torch.Tensor]):
    """Tensors of one file, each read when it is asked for; and the file as a stream.

    Every read verifies what it reads. Nothing is kept, so host memory is the ring's 64 to 104 MiB, plus a
    tensor as long as somebody holds it.
    """

    def __init__(
        self,
        sealed: SealedShard,
        reader: ShardReader,
        needed: Sequence[int],
        progress: Callable[[int], None],
    ) -> None:
        """Read nothing yet. `reader` stays the caller's and must stay open."""
        assert sealed.layout is not None
        self._sealed = sealed
        self._layout: ShardLayout = sealed.layout
        self._reader = reader
        self._needed = needed
        self._progress = progress
        self._ring = Ring(reader.num_places, reader.chunk_bytes)

    def verify(self) -> None:
        """Read all that is needed once, and compare the digests.

        Raises:
            CorruptSnapshotError, TierError: It is damaged or cannot be read.
        """
        self._pass(self._needed, lambda _data, _start: None)

    def fill(self, targets: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Fill live local tensors, by row. They are filled before the last byte is verified.

        Raises:
            CorruptSnapshotError, TierError: The file changed since it was verified.
        """
        writer = PortionWriter(targets, self._layout)

        def take(data: memoryview, start: int) -> None:
            writer.copy(start, start + len(data), torch.frombuffer(data, dtype=torch.uint8))

        self._pass([row for row in self._needed if row in targets], take)

    def _pass(self, rows: Sequence[int], take: Callable[[memoryview, int], None]) -> None:
        reader = self._reader
        verifier = Verifier(self._sealed, rows, reader, self._progress, replace=take)

        def arrived(data: memoryview, start: int) -> None:
            take(data, start)
            verifier.feed(data, start)  # what is wrong is read again, and taken once more

        for start, stop in merged_spans(self._layout, rows):
            end = reader.stream(start, stop, self._ring.place, arrived)
            if end != stop:
                raise truncated(reader, end, self._layout)
        verifier.finish()

    def __getitem__(self, row: int) -> torch.Tensor:
        start, stop = self._layout.spans[row]
        data = torch.empty(stop - start, dtype=torch.uint8)
        into = data.numpy().data

        def take(part: memoryview, at: int) -> None:
            into[at - start : at - start + len(part)] = part

        self._pass([row], take)
        header = self._sealed.header
        return as_stored(data, header.table[row], header.pieces[row])

    def __iter__(self) -> Iterator[int]:
        return iter(self._needed)

    def __len__(self) -> int:
        return len(self._needed)


def merged_spans(layout: ShardLayout, needed: Sequence[int]) -> list[tuple[int, int]]:
    """Spans to read, in file order, neighbours joined."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(layout.spans[index] for index in needed):
        if start == stop:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def truncated(reader: ShardReader, end: int, layout: ShardLayout) -> CorruptSnapshotError:
    """The error of a file that ends at `end`."""
    return CorruptSnapshotError(
        f"{reader.source} ends at byte {end:,}, expected {layout.nbytes:,}: truncated",
        tier=reader.tier, file=reader.source,
    )  # fmt: skip
