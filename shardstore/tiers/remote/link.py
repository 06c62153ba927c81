"""Deadlines for requests: by progress, and by size."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Final, TypeVar

from shardstore.tiers.remote.faults import Fault

T = TypeVar("T")

MIN_RATE: Final = 8 << 10
"""Bytes per second below which a transfer is given up, whatever its progress."""

_DRAIN_RATE: Final = 32 << 10
"""Bytes per second at which buffers on the way (a kernel's, a proxy's) are taken to get empty."""
_MOST_STALLS: Final = 4


def _nobody(_nbytes: int) -> None:
    return


class Watch:
    """The progress of one request. Any thread."""

    def __init__(self, moved: Callable[[int], None]) -> None:
        """The time since the last progress runs from now."""
        self._moved = moved
        self.last = time.monotonic()
        self.num_sent = 0

    def moved(self, nbytes: int) -> None:
        """So many bytes more went over the wire."""
        self.last = time.monotonic()
        self._moved(nbytes)

    def sent(self, nbytes: int) -> None:
        """The kernel took so many bytes more; when the other side has them is not known."""
        self.num_sent += nbytes
        self.moved(nbytes)


@dataclass(frozen=True, slots=True)
class Link:
    """How long requests may take, and who hears of their progress."""

    stall_s: float = 60.0
    """Without a byte of progress; longer while bytes that were sent may still be in buffers on the way."""
    moved: Callable[[int], None] = _nobody
    """Called with bytes as they go over the wire, from any thread."""

    def limit_s(self, nbytes: int) -> float:
        """The most that a request of `nbytes` may take."""
        return self.stall_s + nbytes / MIN_RATE

    def silence_s(self, num_sent: int) -> float:
        """How long nothing need be heard, after so many bytes of one request were sent."""
        return self.stall_s + min(num_sent / _DRAIN_RATE, _MOST_STALLS * self.stall_s)

    def call(
        self,
        loop: asyncio.AbstractEventLoop,
        request: Callable[[Watch], Awaitable[T]],
        *,
        nbytes: int = 0,
    ) -> T:
        """Run one request on the client's loop, from another thread, and wait for it.

        Args:
            loop: Runs on a thread of its own.
            request: Makes the coroutine; tells its watch of the bytes that moved.
            nbytes: What is to be moved, for the deadline.

        Raises:
            Fault: "slow": it was cancelled, without progress for `stall_s`, or at `limit_s`.
        """
        future = asyncio.run_coroutine_threadsafe(self._watched(request, nbytes), loop)
        # The loop itself may be stuck: its own deadline comes first, by a little.
        grace_s = 5.0
        try:
            return future.result(self.limit_s(nbytes) + grace_s)
        except FutureTimeoutError as error:
            if future.done():
                raise  # the client's own
            future.cancel()
            raise Fault("slow", f"no answer within {self.limit_s(nbytes):.0f} s") from error

    async def _watched(self, request: Callable[[Watch], Awaitable[T]], nbytes: int) -> T:
        watch = Watch(self.moved)
        task = asyncio.ensure_future(request(watch))
        limit = time.monotonic() + self.limit_s(nbytes)
        try:
            while not task.done():
                now = time.monotonic()
                silence_s = self.silence_s(watch.num_sent)
                left = min(watch.last + silence_s, limit) - now
                if left <= 0 and now < limit:
                    raise Fault("slow", f"no progress within {silence_s:.0f} s")
                if left <= 0:
                    raise Fault("slow", f"not done within {self.limit_s(nbytes):.0f} s")
                await asyncio.wait({task}, timeout=left)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
