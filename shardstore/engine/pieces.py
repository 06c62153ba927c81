"""Write the pieces of a shard: as large, in the order, and as many at a time as the tier likes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from shardstore.tiers.base import ShardWriter


def pieces_of(writer: ShardWriter, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Ranges that cover [start, stop), cut at multiples of the writer's size where it wants that."""
    step = writer.piece_bytes
    while start < stop:
        end = start + step
        if writer.is_aligned:
            end -= start % step
        yield start, min(end, stop)
        start = min(end, stop)


def num_bytes_with_header(writer: ShardWriter, data_start: int, nbytes: int) -> int:
    """How many bytes from the first on are written once the header is known; the others may go before.

    Args:
        writer: Of the shard.
        data_start: Where the header ends.
        nbytes: Of the whole file.
    """
    if writer.is_in_order:
        return nbytes
    if not writer.is_aligned:
        return data_start
    return min(nbytes, -(-data_start // writer.piece_bytes) * writer.piece_bytes)


def write_pieces(
    writer: ShardWriter,
    ranges: Sequence[tuple[int, int]],
    write: Callable[[int, int], None],
    before: Callable[[int], object],
) -> None:
    """Write ranges, one after the other, several pieces at a time where the writer takes them.

    A range begins while the last pieces of the one before are still on their way.

    Args:
        writer: Of the shard.
        ranges: Each of [start, stop).
        write: Writes one piece; called on several threads at once if `num_parallel` is more than 1.
        before: Called with its first byte on this thread before each piece: it may wait, or raise to
            end all this.

    Raises:
        Exception: What `before` or `write` raised first; no other piece is under way then.
    """
    pieces = (piece for start, stop in ranges for piece in pieces_of(writer, start, stop))
    if writer.num_parallel == 1:
        for piece in pieces:
            before(piece[0])
            write(*piece)
        return
    free = threading.Semaphore(writer.num_parallel)
    failed = threading.Event()
    under_way: list[Future[None]] = []

    def work(begin: int, end: int) -> None:
        try:
            write(begin, end)
        except BaseException:
            failed.set()
            raise
        finally:
            free.release()

    with ThreadPoolExecutor(writer.num_parallel, thread_name_prefix="shardstore-send") as pool:
        for piece in pieces:
            before(piece[0])
            free.acquire()
            if failed.is_set():
                break
            under_way = [done for done in under_way if not _is_good(done)]
            under_way.append(pool.submit(work, *piece))
    for done in under_way:
        done.result()


def _is_good(future: Future[None]) -> bool:
    return future.done() and future.exception() is None
