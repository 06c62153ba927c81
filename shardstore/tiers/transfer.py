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
from typing import Final

from shardstore.tiers.fileops import CHUNK_BYTES, FileOps

PAGE_BYTES: Final = 4096
"""Alignment that direct transfers are cut to: offset, length, and (a slot's) memory."""
_WINDOW_CHUNKS: Final = 8
_NUM_READS_AHEAD: Final = 2


class PacedWriter:
    """Writes into one file, in chunks of `CHUNK_BYTES`; one thread."""

    def __init__(self, ops: FileOps, fd: int) -> None:
        """Take over the writing to `fd`; the caller closes it."""
        self._ops = ops
        self._fd = fd
        self._is_direct = ops.bypass_cache(fd, True)
        self._window: deque[tuple[int, int]] = deque()

    def write(self, data: memoryview, offset: int) -> None:
        """Write one chunk. What is not a multiple of pages at its end goes through the cache."""
        num_direct = 0
        if self._is_direct:
            num_direct = len(data) // PAGE_BYTES * PAGE_BYTES if offset % PAGE_BYTES == 0 else 0
            if num_direct and not self._write_direct(data[:num_direct], offset):
                num_direct = 0
        rest = data[num_direct:]
        if len(rest):
            self._use_cache()
            self._ops.write_at(self._fd, rest, offset + num_direct)
            self._pace(offset + num_direct, len(rest))

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


def read_ahead(
    ops: FileOps,
    fd: int,
    file: memoryview,
    start: int,
    stop: int,
    arrived: Callable[[int], None],
) -> int:
    """Fill `file[start:stop]` from the same offsets of `fd`, reading ahead while `arrived` works.

    Args:
        ops: System calls.
        fd: Open for reading; its O_DIRECT flag is changed meanwhile.
        file: Page-aligned memory as long as the file. Bytes up to a page around the range may be
            filled as well.
        start: First byte.
        stop: End of the range, within `file`.
        arrived: Called on this thread, again and again, with the offset up to which bytes have come.

    Returns:
        The end of what there was: less than `stop` if the file is shorter.
    """
    position = start
    if ops.bypass_cache(fd, True):
        first = start // PAGE_BYTES * PAGE_BYTES
        last = min(-(-stop // PAGE_BYTES), len(file) // PAGE_BYTES) * PAGE_BYTES
        try:
            for end in _in_order(ops, fd, file, first, last):
                if min(end, stop) > position:
                    position = min(end, stop)
                    arrived(position)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        finally:
            ops.bypass_cache(fd, False)
    for end in _in_order(ops, fd, file, position, stop):
        if end > position:
            ops.drop_written(fd, position, end - position)
            position = end
            arrived(position)
    return position


def _in_order(ops: FileOps, fd: int, file: memoryview, start: int, stop: int) -> Iterator[int]:
    """Read [start, stop), some chunks ahead on threads; yields each end, and stops after a short one."""

    def read(begin: int) -> int:
        return ops.read_at(fd, file[begin : min(begin + CHUNK_BYTES, stop)], begin)

    starts = range(start, stop, CHUNK_BYTES)
    if len(starts) <= 1:
        for begin in starts:
            yield begin + read(begin)
        return
    with ThreadPoolExecutor(_NUM_READS_AHEAD, thread_name_prefix="shardstore-read") as pool:
        ahead = deque((begin, pool.submit(read, begin)) for begin in starts[:_NUM_READS_AHEAD])
        coming = iter(starts[_NUM_READS_AHEAD:])
        while ahead:
            begin, future = ahead.popleft()
            got = future.result()
            following = next(coming, None)
            if following is not None:
                ahead.append((following, pool.submit(read, following)))
            yield begin + got
            if got < min(CHUNK_BYTES, stop - begin):
                break
