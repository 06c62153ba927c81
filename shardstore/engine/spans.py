"""Digests of tensors whose bytes come in portions of a file, in file order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import xxhash

from shardstore.format.shardfile import digest_of


class SpanDigests:
    """Digests some spans of a file. A span may come in several portions, a portion hold many spans."""

    def __init__(
        self,
        spans: Sequence[tuple[int, int]],
        rows: Iterable[int],
        finished: Callable[[int, str], None],
        progress: Callable[[int], None],
    ) -> None:
        """Expect `spans` (half-open file offsets, by row) of `rows`.

        Args:
            spans: Of the whole table.
            rows: Whose bytes will come.
            finished: Called with a row and its digest as soon as its last byte has come.
            progress: Called with numbers of bytes.
        """
        self._spans = spans
        self._finished = finished
        self._progress = progress
        self._waiting = deque(sorted(rows, key=spans.__getitem__))
        self._partial: xxhash.xxh3_128 | None = None

    def feed(self, data: memoryview, start: int) -> None:
        """Take the bytes from `start` on; portions come in order and skip only what is not expected."""
        end = start + len(data)
        while self._waiting:
            row = self._waiting[0]
            begin, stop = self._spans[row]
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
                digest = digest_of(part)
            else:
                self._partial.update(part)
                digest, self._partial = self._partial.hexdigest(), None
            self._progress(len(part))
            self._finished(row, digest)

    def finish(self) -> int | None:
        """No more bytes come: the first row that is not whole, or None; spans of no bytes are done."""
        while self._waiting:
            row = self._waiting[0]
            start, stop = self._spans[row]
            if start < stop:
                return row
            self._waiting.popleft()
            self._finished(row, digest_of(b""))
        return None
