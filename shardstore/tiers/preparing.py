"""Get memory for later saves in the background: the first touch of a page is the slow part."""

from __future__ import annotations

import threading

from shardstore.tiers.pages import populate
from shardstore.tiers.slotfiles import SlotFiles
from shardstore.tiers.slots import Slot


class Preparer:
    """Adds free warm slots to a list, on one thread at a time. Shares the lock of the list's owner."""

    def __init__(self, files: SlotFiles, slots: list[Slot], changed: threading.Condition) -> None:
        """Prepare nothing yet.

        Args:
            files: Makes the memory.
            slots: Where the slots go; guarded by `changed`.
            changed: Told after each slot and at the end.
        """
        self._files = files
        self._slots = slots
        self._changed = changed
        self._thread: threading.Thread | None = None
        self._stopped = False
        self.promised_bytes = 0
        """What is being prepared and is not in the list yet."""

    @property
    def is_running(self) -> bool:
        """Whether slots are still to come."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, nbytes: int, count: int) -> None:
        """Begin to prepare `count` slots of `nbytes`, unless some are already being prepared. Under the lock."""
        if count <= 0 or self.is_running or self._stopped:
            return
        self.promised_bytes = count * nbytes
        self._thread = threading.Thread(
            target=self._run, args=(nbytes, count), name="shardstore-prepare", daemon=True
        )
        self._thread.start()

    def _run(self, nbytes: int, count: int) -> None:
        for _ in range(count):
            if self._stopped:
                break
            try:
                slot = self._files.allocate(nbytes, patient=True)
            except OSError:
                break
            if slot is None:
                break
            populate(slot.view)
            with self._changed:
                self._slots.append(slot)
                self.promised_bytes -= nbytes
                self._changed.notify_all()
        with self._changed:
            self._thread = None
            self.promised_bytes = 0
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Wait for the slots that are being prepared."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def stop(self) -> None:
        """Begin nothing more."""
        self._stopped = True
