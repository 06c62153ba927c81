"""Bytes between page-aligned memory and a file, past the page cache where the file system allows it.

A snapshot is written once and hardly ever read: in the page cache it would only push out the training
data, and its dirty pages would stall everybody's writes. So files are written and read directly
(O_DIRECT) from the mapped slot; where that is refused, through the cache in a window that starts to
write each chunk at once and drops it a few chunks later. Figures: `benchmarks/disk_paths.py`.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Final, TypeAlias

from shardstore.tiers.fileops import CHUNK_BYTES, FileOps
from shardstore.tiers.pages import private_pages

PAGE_BYTES: Final = 4096
"""Alignment that direct transfers are cut to: offset, length, and (a slot's) memory."""
_WINDOW_CHUNKS: Final = 8
_NUM_READS_AHEAD: Final = 3
MAX_PLACES: Final = _NUM_READS_AHEAD + 1


class PacedWriter:
    """Writes into one file; one thread. The fast way is whole pages from page-aligned memory."""

    def __init__(self, ops: FileOps, fd: int) -> None:
        """Take over the writing to `fd`; the caller closes it."""
        self._ops = ops
        self._fd = fd
        self._is_direct = ops.bypass_cache(fd, True)
        self._window: deque[tuple[int, int]] = deque()

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data`. What is not a multiple of pages at its end goes through the cache."""
        num_direct = 0
        if self._is_direct:
            num_direct = len(data) // PAGE_BYTES * PAGE_BYTES if offset % PAGE_BYTES == 0 else 0
            if num_direct and not self._write_direct(data[:num_direct], offset):
                num_direct = 0
        for start in range(num_direct, len(data), CHUNK_BYTES):
            self._use_cache()
            part = data[start : start + CHUNK_BYTES]
            self._ops.write_at(self._fd, part, offset + start)
            self._pace(offset + start, len(part))

    def _write_direct(self, data: memoryview, offset: int) -> bool:
        try:
            self._ops.write_at(self._fd, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._use_cache()  # refused: this device wants another alignment
            return False
        return True

    def _use_cache(self) -> None:
        if self._is_direct:
            self._is_direct = False
            self._ops.bypass_cache(self._fd, False)

    def _pace(self, offset: int, nbytes: int) -> None:
        self._ops.start_writeback(self._fd, offset, nbytes)
        self._window.append((offset, nbytes))
        if len(self._window) > _WINDOW_CHUNKS:
            self._ops.drop_written(self._fd, *self._window.popleft())

    def finish(self) -> None:
        """Make all of it durable, and leave nothing of it in the page cache."""
        self._ops.fsync(self._fd)
        while self._window:
            self._ops.drop_written(self._fd, *self._window.popleft())


Place: TypeAlias = Callable[[int, int], memoryview]
"""Where the bytes of file offsets [start, stop) shall go: page-aligned memory if they are."""


def read_ahead(
    ops: FileOps,
    fd: int,
    start: int,
    stop: int,
    place: Place,
    arrived: Callable[[memoryview, int], None],
) -> int:
    """Read [start, stop) of a file in chunks, some chunks ahead of `arrived`.

    Args:
        ops: System calls.
        fd: Open for reading; its O_DIRECT flag is changed meanwhile.
        start: First byte.
        stop: End of the range, within the file as far as the caller knows.
        place: Called on this thread for each chunk, in order. Up to a page around the range is asked
            for as well. At most `MAX_PLACES` chunks are in use at a time.
        arrived: Called on this thread, in order, with bytes and their offset.

    Returns:
        The end of what there was: less than `stop` if the file is shorter.
    """
    position = start
    if ops.bypass_cache(fd, True):
        first = start // PAGE_BYTES * PAGE_BYTES
        last = stop // PAGE_BYTES * PAGE_BYTES
        try:
            for begin, data in _in_order(ops, fd, first, last, place):
                fresh = data[position - begin :]
                if len(fresh):
                    arrived(fresh, position)
                    position += len(fresh)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        finally:
            ops.bypass_cache(fd, False)
    for begin, data in _in_order(ops, fd, position, stop, place):
        ops.drop_written(fd, begin, len(data))
        if len(data):
            arrived(data, begin)
            position = begin + len(data)
    return position


def _in_order(
    ops: FileOps, fd: int, start: int, stop: int, place: Place
) -> Iterator[tuple[int, memoryview]]:
    """Read [start, stop), some chunks ahead on threads; yields in order, and stops after a short one."""
    begins = range(start, stop, CHUNK_BYTES)

    def read(begin: int, into: memoryview) -> memoryview:
        return into[: ops.read_at(fd, into, begin)]

    def room(begin: int) -> memoryview:
        return place(begin, min(begin + CHUNK_BYTES, stop))

    if len(begins) <= 1:
        for begin in begins:
            yield begin, read(begin, room(begin))
        return
    with ThreadPoolExecutor(_NUM_READS_AHEAD, thread_name_prefix="shardstore-read") as pool:
        coming = iter(begins)
        ahead = deque(
            (begin, pool.submit(read, begin, room(begin)))
            for begin in islice(coming, _NUM_READS_AHEAD)
        )
        while ahead:
            begin, future = ahead.popleft()
            data = future.result()
            following = next(coming, None)
            if following is not None:
                ahead.append((following, pool.submit(read, following, room(following))))
            yield begin, data
            if len(data) < min(CHUNK_BYTES, stop - begin):
                break


class Ring:
    """A little memory that whole files pass through: as many places as are in use at a time."""

    def __init__(self, num_places: int = MAX_PLACES, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Reserve nothing before the first use.

        Args:
            num_places: How many are in use at a time.
            chunk_bytes: Of each.
        """
        self._buffers = [private_pages(chunk_bytes) for _ in range(num_places)]
        self._turn = 0

    def place(self, start: int, stop: int) -> memoryview:
        """See `read_ahead`."""
        self._turn = (self._turn + 1) % len(self._buffers)
        return self._buffers[self._turn][: stop - start]
