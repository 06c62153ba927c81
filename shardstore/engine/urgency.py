"""Which snapshot goes further out before all others while the process has little time left."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardstore.format.records import SnapshotId


class Urgency:
    """Older snapshots wait with their next piece while a newer one is preferred. Any thread."""

    def __init__(self) -> None:
        """Nothing is preferred."""
        self._changed = threading.Condition()
        self._id: SnapshotId | None = None
        self._is_kept = False
        self._until = 0.0

    @contextmanager
    def prefer(
        self, snapshot_id: SnapshotId, *, until: float, is_kept: bool = False
    ) -> Iterator[None]:
        """Hold writes of older snapshots back inside the `with`, no longer than `until` (monotonic seconds).

        `is_kept`: it is one that only memory has. Those go one after the other, so an older one must go on.
        """
        with self._changed:
            self._id, self._until, self._is_kept = snapshot_id, until, is_kept
        try:
            yield
        finally:
            with self._changed:
                self._id = None
                self._changed.notify_all()

    def give_way(self, snapshot_id: SnapshotId, *, is_kept: bool = False) -> float:
        """Before the next piece of `snapshot_id` is written; returns how long that waited, in seconds."""
        if self._id is None:  # without the lock: it is asked for each piece, and hardly ever so
            return 0.0
        started = time.monotonic()
        with self._changed:
            while (left := self._held_s(snapshot_id, is_kept=is_kept)) > 0:
                self._changed.wait(min(left, 1.0))
        return time.monotonic() - started

    def _held_s(self, snapshot_id: SnapshotId, *, is_kept: bool) -> float:
        if self._id is None or snapshot_id.order >= self._id.order or (is_kept and self._is_kept):
            return 0.0
        return self._until - time.monotonic()
