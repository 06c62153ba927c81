"""How far long work has come: records for a callback, or a line in the log where there is none."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Literal, TypeAlias

import msgspec

from shardstore.engine.transitions import tell

_LOG: Final = logging.getLogger("shardstore")

CALL_EVERY_S: Final = 0.2
"""The callback hears of one piece of work at most this often, and at its end."""
LINE_EVERY_S: Final = 5.0
"""A log line at most this often, first after this time: what is over sooner needs none."""
_SHARE: Final = 10
"""A slow callback is called less often: the work that it holds up loses at most one part in this many."""

What: TypeAlias = Literal["save", "write", "restore", "drain"]


class Progress(msgspec.Struct, frozen=True):
    """How far one piece of work of this rank has come, as given to `SnapshotStore(progress=...)`.

    Plain values: it pickles, and `msgspec.to_builtins` makes a dict for JSON of it. The records of one
    piece of work (one `what`, `step` and `tier` at a time) have the same total, and `done_bytes` never
    falls. The last one says "done", with `done_bytes == total_bytes`, or "failed"; work that takes less
    than 0.2 s has only that one.
    """

    what: What
    """save: `save` streams to the root, or has copied into memory (that tells its end only); training
    waits. write: onto the root, in the background.
    restore: read and verify (bytes that pass twice count twice), then copied. drain: until all saves
    that were pending are committed or have failed, in `drain`, `close` or `delete`."""
    step: int
    """Of the snapshot; of the newest pending one in a drain."""
    tier: str
    """Where the bytes go, or come from in a restore: "memory", "disk" or "root"."""
    done_bytes: int
    total_bytes: int
    """Of this rank."""
    seconds: float
    """Since this piece of work began."""
    status: Literal["running", "done", "failed"]
    """failed: given up; the call raises, or goes on with another copy or snapshot."""

    @property
    def fraction(self) -> float:
        """Between 0 and 1."""
        return self.done_bytes / self.total_bytes if self.total_bytes else 1.0

    @property
    def gb_per_s(self) -> float:
        """Speed so far in 10^9 bytes per second."""
        return self.done_bytes / self.seconds / 1e9 if self.seconds else 0.0

    def __str__(self) -> str:
        towards = "from" if self.what == "restore" else "to"
        return (
            f"{self.what} of step {self.step} {towards} {self.tier}: {100 * self.fraction:.0f} % of "
            f"{self.total_bytes / 1e9:.2f} GB, {self.gb_per_s:.2f} GB/s"
        )


Callback: TypeAlias = Callable[[Progress], object]


class ProgressReporter:
    """Passes on how far this rank's work has come. Any thread."""

    def __init__(
        self,
        callback: Callback | None = None,
        *,
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Report to `callback`; without one, rank 0 logs what blocks training for long."""
        self._callback = callback
        self._rank = rank
        self._clock = clock
        self._first_error = threading.Lock()

    def begin(
        self, what: What, *, step: int, total_bytes: int, tier: str, started: float | None = None
    ) -> Work:
        """A piece of work begins now, or began at `started` on the monotonic clock."""
        tell_one, every_s = None, math.inf
        if self._callback is not None:
            tell_one, every_s = self._call, CALL_EVERY_S
        elif self._rank == 0 and what != "write":
            tell_one, every_s = self._log, LINE_EVERY_S
        first = Progress(what, step, tier, 0, total_bytes, 0.0, "running")
        return Work(first, tell_one, every_s, self._clock, started)

    def _call(self, progress: Progress) -> None:
        assert self._callback is not None
        try:
            self._callback(progress)
        except BaseException as error:
            in_main = threading.current_thread() is threading.main_thread()
            if in_main and not isinstance(error, Exception):
                raise  # an interrupt is meant for whoever called the store
            if self._first_error.acquire(blocking=False):  # once, whatever thread it is
                _LOG.warning(
                    "rank %d: the progress callback raised; the work goes on, and further errors of "
                    "it are not shown",
                    self._rank,
                    exc_info=True,
                )

    def _log(self, progress: Progress) -> None:
        if progress.status == "running":
            tell(
                self._rank, "progress", "%s", progress,
                step=progress.step, tier=progress.tier,
                nbytes=progress.done_bytes, seconds=progress.seconds,
            )  # fmt: skip


class Work:
    """One piece of work. One thread at a time; never used while a lock is held.

    A context manager: what is left without `complete` has failed.
    """

    def __init__(
        self,
        first: Progress,
        tell_one: Callable[[Progress], None] | None,
        every_s: float,
        clock: Callable[[], float],
        started: float | None = None,
    ) -> None:
        """Made by `ProgressReporter.begin`; without `tell_one` it does nothing."""
        self._now = first
        self._tell = tell_one
        self.every_s = every_s
        """How often there is something to report, in seconds; infinity: never."""
        self._clock = clock
        self._done_bytes = 0
        self._is_over = False
        self._started = clock() if started is None else started
        self._next_at = self._started + every_s

    def advance(self, nbytes: int) -> None:
        """Some more bytes are done."""
        if self._tell is None:
            return
        self._done_bytes = min(self._done_bytes + nbytes, self._now.total_bytes)
        if self._clock() >= self._next_at:
            self._report("running")

    def reach(self, done_bytes: int) -> None:
        """So many are done in all."""
        self.advance(max(0, done_bytes - self._done_bytes))

    def complete(self) -> None:
        """All is done."""
        self._done_bytes = self._now.total_bytes
        self._end("done")

    def close(self) -> None:
        """No more is done; that is a failure unless it was completed."""
        self._end("failed")

    def _end(self, status: Literal["done", "failed"]) -> None:
        if not self._is_over:
            self._is_over = True
            self._report(status)

    def _report(self, status: Literal["running", "done", "failed"]) -> None:
        if self._tell is None:
            return
        before = self._clock()
        self._now = msgspec.structs.replace(
            self._now, done_bytes=self._done_bytes, seconds=before - self._started, status=status
        )
        self._tell(self._now)
        after = self._clock()
        self._next_at = after + max(self.every_s, (_SHARE - 1) * (after - before))

    def __enter__(self) -> Work:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
