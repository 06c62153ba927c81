"""A thread with a queue: what runs behind training runs in one of these."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

_LOG: Final = logging.getLogger("shardstore")
T = TypeVar("T")


class Worker(Generic[T]):
    """Calls `handle` for each submitted item, in order, on one daemon thread.

    `handle` reports its own errors; what still escapes is a bug of ours and is logged with its trace.
    """

    def __init__(self, name: str, handle: Callable[[T], None]) -> None:
        """The thread starts with the first item."""
        self._handle = handle
        self._items: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"shardstore-{name}", daemon=True)
        self._lock = threading.Lock()
        self._started = False
        self._stopped = False

    def submit(self, item: T) -> bool:
        """Queue an item; False, and it is dropped, after `stop`."""
        with self._lock:
            if self._stopped:
                return False
            if not self._started:
                self._thread.start()
                self._started = True
            self._items.put(item)
            return True

    def stop(self) -> None:
        """End after the items queued so far; does not wait."""
        with self._lock:
            if not self._stopped and self._started:
                self._items.put(None)
            self._stopped = True

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; False if it did not in time."""
        if self._started and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            try:
                self._handle(item)
            except Exception:  # noqa: BLE001 - the thread must go on for later saves
                _LOG.exception("internal error in %s: please report it", self._thread.name)
            item = None  # while this waits, it keeps nothing alive
