"""Memory that a request uses on the client's thread, until its owner takes it back."""

from __future__ import annotations

import threading
from types import TracebackType


class Lent:
    """Bytes of the caller's, lent to one request for the length of a `with`.

    A request that was given up may still run for a moment on the client's own thread. The owner has the
    memory back by then: what comes late must neither write there, nor send what is there by now.
    """

    def __init__(self, memory: memoryview) -> None:
        """`memory` is bytes in one piece; it is not copied."""
        self.nbytes = len(memory)
        self._memory: memoryview | None = memory[:]
        self._lock = threading.Lock()

    def read(self, start: int, stop: int) -> bytes:
        """Copy a few of the bytes.

        Raises:
            ValueError: They were taken back.
        """
        with self._lock:
            return bytes(self._there()[start:stop])

    def write(self, start: int, data: bytes) -> None:
        """Fill in a few of the bytes.

        Raises:
            ValueError: They were taken back, or `data` does not fit there.
        """
        with self._lock:
            self._there()[start : start + len(data)] = data

    def take_back(self) -> None:
        """From now on the memory is not touched, nor kept from being unmapped."""
        with self._lock:
            if self._memory is not None:
                self._memory.release()
                self._memory = None

    def __enter__(self) -> Lent:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.take_back()

    def _there(self) -> memoryview:
        if self._memory is None:
            raise ValueError("the request was given up, and its memory taken back")
        return self._memory
