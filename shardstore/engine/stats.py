"""What a store has done so far, in plain numbers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec


class PhaseStats(msgspec.Struct, frozen=True):
    """One kind of work of this rank, since the store was opened."""

    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def gb_per_s(self) -> float:
        """Speed in 10^9 bytes per second; 0 before anything was done."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0


class StoreStats(msgspec.Struct, frozen=True):
    """A store's numbers at one moment, as this rank knows them. All ranks have their own."""

    num_saves: int
    """Calls of `save`, failed ones included."""
    num_committed: int
    num_failed: int
    num_skipped: int
    """Left out because no memory was free (on_full="skip"), on this rank or another."""
    num_streamed: int
    """Written by `save` itself, because no memory was free or enough."""
    num_spilled: int
    """Saved with persist=False, and on the root now because their memory was needed."""
    num_pending: int
    """Not committed yet."""
    save_blocked_s: float
    """How long the last `save` took before it returned."""
    durable_lag_s: float
    """Age of the oldest save that is not committed yet; 0 if all are."""
    stage: PhaseStats
    """Copies of live state."""
    digest: PhaseStats
    write: PhaseStats
    """Onto the root, until durable there. Digests are taken meanwhile."""
    commit: PhaseStats
    """From the call of `save` until all ranks knew that it is committed."""
    memory_used_bytes: int
    """Of the memory tier, whether in use or kept warm."""
    memory_budget_bytes: int


class Meter:
    """Counts. Any thread."""

    def __init__(self) -> None:
        """All is zero."""
        self._lock = threading.Lock()
        self._phases: dict[str, PhaseStats] = {}
        self._counts: dict[str, int] = {}
        self.save_blocked_s = 0.0

    @contextmanager
    def measure(self, phase: str, nbytes: int) -> Iterator[None]:
        """Time the body; nothing is noted if it raises."""
        started = time.perf_counter()
        yield
        self.add(phase, nbytes, time.perf_counter() - started)

    def add(self, phase: str, nbytes: int, seconds: float) -> None:
        """Note some work."""
        with self._lock:
            old = self._phases.get(phase, PhaseStats())
            self._phases[phase] = PhaseStats(
                old.count + 1, old.nbytes + nbytes, old.seconds + seconds
            )

    def count(self, what: str) -> None:
        """Note one event."""
        with self._lock:
            self._counts[what] = self._counts.get(what, 0) + 1

    def phase(self, name: str) -> PhaseStats:
        """Sum of one kind of work."""
        with self._lock:
            return self._phases.get(name, PhaseStats())

    def number(self, what: str) -> int:
        """How many events."""
        with self._lock:
            return self._counts.get(what, 0)
