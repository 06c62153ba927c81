"""One shard on its way to remote storage, in parts that nobody sees before the last one is there."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from shardstore.errors import TierError, without_frames
from shardstore.tiers.remote.faults import Fault
from shardstore.tiers.remote.objects import Entry, PartUpload
from shardstore.tiers.remote.requests import Requests

_MAX_IN_FLIGHT: Final = 192 << 20
"""Bytes of parts that are sent at the same time, at most."""


class RemoteWriter:
    """See ShardWriter. `write` may be called from several threads, and does not copy whole parts.

    Bytes that do not fill a part wait in a buffer of its size until the rest has come: who writes pieces
    of `piece_bytes`, at multiples of it, needs none.
    """

    def __init__(self, requests: Requests, key: str, nbytes: int) -> None:
        """Nothing is sent before the first part is full."""
        store = requests.store
        self._requests = requests
        self._key = key
        self._nbytes = nbytes
        self.piece_bytes = store.part_bytes(nbytes)
        self._has_parts = nbytes > self.piece_bytes
        """One part alone may be kept by the client until the end."""
        self.is_aligned = True
        self.is_in_order = store.is_in_order
        self.num_parallel = (
            1
            if store.is_in_order
            else max(1, min(store.num_parallel, _MAX_IN_FLIGHT // self.piece_bytes))
        )
        self._lock = threading.Lock()
        self._upload: PartUpload | None = None
        self._failed: TierError | None = None
        """Why it could not be begun: parts that wait for that fail with it, and do not try for as long again."""
        self._partial: dict[int, tuple[bytearray, int]] = {}
        """By part: its bytes so far, and how many have come."""
        self._is_over = False

    def _bounds(self, index: int) -> tuple[int, int]:
        start = index * self.piece_bytes
        return start, min(start + self.piece_bytes, self._nbytes)

    def write(self, data: memoryview, offset: int) -> None:
        """Send what fills a part, and keep the rest of it; each byte comes once."""
        whole: list[tuple[int, memoryview]] = []
        end = offset + len(data)
        for index in range(offset // self.piece_bytes, -(-end // self.piece_bytes)):
            start, stop = self._bounds(index)
            part = data[max(start - offset, 0) : stop - offset]
            if len(part) == stop - start:
                whole.append((index, part))
            else:
                filled = self._keep(index, part, max(offset, start) - start)
                if filled is not None:
                    whole.append((index, filled))
        if len(whole) <= 1 or self.num_parallel == 1:
            for index, part in whole:
                self._put(index, part)
            return
        with ThreadPoolExecutor(
            min(len(whole), self.num_parallel), thread_name_prefix="shardstore-send"
        ) as pool:
            for sent in [pool.submit(self._put, index, part) for index, part in whole]:
                sent.result()

    def _keep(self, index: int, part: memoryview, at: int) -> memoryview | None:
        """Put bytes into a part's buffer; the whole part once it is full."""
        start, stop = self._bounds(index)
        with self._lock:
            buffer, num_bytes = self._partial.pop(index, (None, 0))
            if buffer is None:
                buffer = bytearray(stop - start)
            buffer[at : at + len(part)] = part
            num_bytes += len(part)
            if num_bytes < stop - start:
                self._partial[index] = (buffer, num_bytes)
                return None
        return memoryview(buffer)

    def _put(self, index: int, part: memoryview) -> None:
        upload = self._begun()
        self._requests.run(
            "write",
            self._key,
            lambda: upload.put(index, part),
            changes=True,
            is_behind=True,
            is_answer=self._has_parts,
            needed_bytes=self._nbytes,
        )

    def _begun(self) -> PartUpload:
        with self._lock:
            if self._failed is not None:
                raise without_frames(copy.copy(self._failed))
            if self._upload is None:
                store = self._requests.store
                try:
                    self._upload = self._requests.run(
                        "write",
                        self._key,
                        lambda: store.begin(self._key, self._nbytes, self.piece_bytes),
                        changes=True,
                        is_behind=True,
                        is_answer=self._has_parts,
                    )
                except TierError as error:
                    self._failed = error
                    raise
            return self._upload

    def publish(self) -> None:
        """Make it visible, and confirm its size with the store.

        Raises:
            TierError: It is not there as it should be.
        """
        assert not self._partial, "a shard is published whole"
        requests, store = self._requests, self._requests.store
        upload = self._begun()
        requests.run("write", self._key, upload.complete, changes=True, is_behind=True)

        def look() -> Entry:
            entry = store.entry(self._key)
            if entry is None:  # some stores show late what they have taken
                raise Fault("broken", "it was written, and is not to be seen")
            return entry

        entry = requests.run("confirm", self._key, look)
        if entry.nbytes != self._nbytes:
            where = requests.where(self._key)
            raise TierError(
                f"root: {where} was written with {self._nbytes:,} bytes, and the store has "
                f"{entry.nbytes:,} bytes",
                tier="root", key=where, operation="confirm",
            )  # fmt: skip
        self._is_over = True

    def discard(self) -> None:
        """Drop what was sent, unless it was published; a failure leaves it to gc."""
        with self._lock:
            upload, self._partial = self._upload, {}
            if self._is_over:
                return
            self._is_over = True
        if upload is not None:
            try:
                self._requests.run("discard", self._key, upload.abort, changes=True)
            except TierError:
                pass  # gc finds it
