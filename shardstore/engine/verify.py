"""Check the bytes of a shard file against its header, as they come: in file order, in any portions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import xxhash

from shardstore.engine.catalog import SealedShard
from shardstore.errors import CorruptSnapshotError
from shardstore.format.shardfile import digest_of
from shardstore.tiers.base import ShardReader


class Verifier:
    """Digests of the needed tensors of one file. A tensor may come in several portions."""

    def __init__(
        self,
        sealed: SealedShard,
        needed: Iterable[int],
        reader: ShardReader,
        progress: Callable[[int], None],
    ) -> None:
        """Expect the spans of `needed` (rows of the table, no aliases), in file order."""
        layout = sealed.layout
        assert layout is not None
        self._header = sealed.header
        self._spans = layout.spans
        self._reader = reader
        self._progress = progress
        self._waiting = deque(sorted(needed, key=self._spans.__getitem__))
        self._partial: xxhash.xxh3_128 | None = None

    def feed(self, data: memoryview, start: int) -> None:
        """Take the bytes of the file from `start` on; portions come in order and skip only what is not needed.

        Raises:
            CorruptSnapshotError: A tensor does not have the digest it was saved with.
        """
        end = start + len(data)
        while self._waiting:
            index = self._waiting[0]
            begin, stop = self._spans[index]
            if begin >= end and stop > begin:
                break
            first = max(begin - start, 0)
            part = data[first : max(first, stop - start)]
            if stop > end:
                if self._partial is None:
                    self._partial = xxhash.xxh3_128()
                self._partial.update(part)
                self._progress(len(part))
                break
            self._waiting.popleft()
            if self._partial is None:
                self._check(index, digest_of(part))
            else:
                self._partial.update(part)
                self._check(index, self._partial.hexdigest())
                self._partial = None
            self._progress(len(part))

    def _check(self, index: int, actual: str) -> None:
        saved = self._header.pieces[index].digest
        if actual == saved:
            return
        name = ".".join(self._header.table[index].path)
        reader = self._reader
        raise CorruptSnapshotError(
            f"{reader.source}: tensor {name} of rank {self._header.rank} is damaged: its bytes have "
            f"digest {actual}, {saved} were saved",
            tier=reader.tier, file=reader.source, tensor=name, expected=saved, actual=actual,
        )  # fmt: skip

    def finish(self) -> None:
        """All bytes have come.

        Raises:
            CorruptSnapshotError: They have not: the file is truncated.
        """
        for index in self._waiting:
            start, stop = self._spans[index]
            if start == stop:
                self._check(index, digest_of(b""))
                continue
            name = ".".join(self._header.table[index].path)
            raise CorruptSnapshotError(
                f"{self._reader.source} is truncated: tensor {name} is not whole",
                tier=self._reader.tier, file=self._reader.source, tensor=name,
            )  # fmt: skip
