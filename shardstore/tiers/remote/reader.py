"""One shard on remote storage, read in ranges at the same time, each checked for its length."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from types import TracebackType
from typing import Final

from shardstore.tiers.remote.faults import Fault
from shardstore.tiers.remote.requests import Requests

_OPENING_NBYTES: Final = 256 << 10
"""Read with the first byte: the header of most shards is in it."""


class RemoteReader:
    """See ShardReader. Its size is what the store said when it was opened."""

    is_mapped = False
    may_differ_again = True
    """Wrong bytes may have become so on the way: they are worth reading once more."""

    def __init__(self, requests: Requests, tier: str, key: str, nbytes: int) -> None:
        """Nothing is read yet."""
        self._requests = requests
        self._key = key
        self.tier = tier
        self.source = requests.where(key)
        self.nbytes = nbytes
        self.chunk_bytes = requests.store.part_bytes(0)
        self.num_places = requests.store.num_parallel + 1
        self._opening: bytes | None = None

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop), fewer at the end of the file."""
        stop = min(stop, self.nbytes)
        if start >= stop:
            return memoryview(b"")
        if stop <= _OPENING_NBYTES:
            if self._opening is None:
                buffer = bytearray(min(_OPENING_NBYTES, self.nbytes))
                self._fill(0, memoryview(buffer))
                self._opening = bytes(buffer)
            return memoryview(self._opening)[start:stop]
        buffer = bytearray(stop - start)
        self._fill(start, memoryview(buffer))
        return memoryview(buffer).toreadonly()

    def forget(self) -> None:
        """What was kept of the file's opening is read anew."""
        self._opening = None

    def _fill(self, start: int, into: memoryview) -> None:
        store = self._requests.store

        def request() -> None:
            try:
                got = store.get(self._key, start, into)
            except FileNotFoundError as error:
                if store.entry(self._key) is None:
                    raise
                raise Fault("broken", "it is there, and cannot be read") from error
            if got != len(into):
                raise Fault(
                    "broken",
                    f"bytes {start:,} to {start + len(into):,} were asked for, {got:,} came",
                )

        self._requests.run("read", self._key, request)

    def stream(
        self,
        start: int,
        stop: int,
        place: Callable[[int, int], memoryview],
        arrived: Callable[[memoryview, int], None],
    ) -> int:
        """Read a range; see ShardReader. At most `num_places` places are in use at a time."""
        stop = min(stop, self.nbytes)
        if start >= stop:
            return min(start, stop)
        begins = range(start, stop, self.chunk_bytes)

        def fetch(begin: int, into: memoryview) -> memoryview:
            self._fill(begin, into)
            return into

        def room(begin: int) -> memoryview:
            end = min(begin + self.chunk_bytes, stop)
            return place(begin, end)[: end - begin]

        num_ahead = min(len(begins), self.num_places - 1)
        with ThreadPoolExecutor(num_ahead, thread_name_prefix="shardstore-fetch") as pool:
            coming = iter(begins)
            ahead = deque(
                (begin, pool.submit(fetch, begin, room(begin)))
                for begin in islice(coming, num_ahead)
            )
            try:
                while ahead:
                    begin, future = ahead.popleft()
                    data = future.result()
                    following = next(coming, None)
                    if following is not None:
                        ahead.append((following, pool.submit(fetch, following, room(following))))
                    arrived(data, begin)
            finally:
                for _, future in ahead:
                    future.cancel()
        return stop

    def __enter__(self) -> RemoteReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opening = None
