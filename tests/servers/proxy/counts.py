"""What went through the proxy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final


@dataclass(slots=True)
class Request:
    """One request and what became of it."""

    method: str
    path: str
    """With its query, as on the wire."""
    nbytes_up: int = 0
    """Of the request's body, as far as it was passed on."""
    nbytes_down: int = 0
    """Of the answer's body, as far as the client was sent it."""
    status: int | None = None
    """As the client was told it."""
    fault: str | None = None


@dataclass(slots=True)
class Totals:
    """Sums over connections and their bytes, heads included."""

    connections: int = 0
    """Those on which a byte came."""
    max_parallel: int = 0
    """Requests (plain TCP: connections) in progress at one time."""
    nbytes_up: int = 0
    nbytes_down: int = 0


class Counts:
    """All requests, in the order of their heads' arrival. Any thread."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._parallel = 0
        self.clear()

    def clear(self) -> None:
        """Begin again."""
        with self._lock:
            self.requests: list[Request] = []
            self.totals = Totals(max_parallel=self._parallel)

    def connected(self) -> None:
        """A connection came to be."""
        with self._lock:
            self.totals.connections += 1

    def moved(self, nbytes: int, *, is_up: bool) -> None:
        """Bytes were passed on."""
        with self._lock:
            if is_up:
                self.totals.nbytes_up += nbytes
            else:
                self.totals.nbytes_down += nbytes

    @contextmanager
    def in_progress(self) -> Iterator[None]:
        """Count as one of the parallel ones, within."""
        with self._lock:
            self._parallel += 1
            self.totals.max_parallel = max(self.totals.max_parallel, self._parallel)
        try:
            yield
        finally:
            with self._lock:
                self._parallel -= 1

    def add(self, method: str, path: str) -> Request:
        """Note a new request, to be filled in."""
        request = Request(method, path)
        with self._lock:
            self.requests.append(request)
        return request
