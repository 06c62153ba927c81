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


def _nobody(_nbytes: int) -> None:
    return


class Watch:
    """The progress of one request. Any thread."""

    def __init__(self, moved: Callable[[int], None]) -> None:
        """The time since the last progress runs from now."""
        self._moved = moved
        self.last = time.monotonic()

    def moved(self, nbytes: int) -> None:
        """So many bytes more went over the wire."""
        self.last = time.monotonic()
        self._moved(nbytes)


@dataclass(frozen=True, slots=True)
class Link:
    """How long requests may take, and who hears of their progress."""

    stall_s: float = 60.0
    """Without a byte of progress."""
    moved: Callable[[int], None] = _nobody
    """Called with bytes as they go over the wire, from any thread."""

    def limit_s(self, nbytes: int) -> float:
        """The most that a request of `nbytes` may take."""
        return self.stall_s + nbytes / MIN_RATE

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
                left = min(watch.last + self.stall_s, limit) - now
                if left <= 0:
                    why = "no progress" if now < limit else "not done"
                    raise Fault("slow", f"{why} within {self.stall_s if now < limit else self.limit_s(nbytes):.0f} s")  # fmt: skip
                await asyncio.wait({task}, timeout=left)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
