"""The slots of one rank and the memory they take: made, freed, made anew; which may be is not decided here."""

from __future__ import annotations

import logging
import os
import threading
from typing import Final

from shardstore.errors import TierError
from shardstore.format.records import SnapshotId
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.preparing import Preparer
from shardstore.tiers.slotfiles import SlotFiles
from shardstore.tiers.slots import Slot

_LOG: Final = logging.getLogger("shardstore")


class SlotPool:
    """Slots, in use and free. Everything is called, and `slots` is read, with `changed` held."""

    def __init__(
        self, folder: str | None, *, rank: int, owner: str, ops: FileOps, num_local_ranks: int
    ) -> None:
        """Own no slot yet; see `MemoryTier`."""
        self.files = SlotFiles(
            folder, rank=rank, owner=owner, ops=ops, num_local_ranks=num_local_ranks
        )
        self.slots: list[Slot] = []
        self.changed = threading.Condition()
        """Told whenever a slot may have become free."""
        self.preparer = Preparer(self.files, self.slots, self.changed)
        self._rank = rank
        self._told: set[str] = set()
        self._peak_bytes = 0
        self._evicted: list[tuple[SnapshotId, int]] = []

    def used_bytes(self) -> int:
        """Bytes of all slots, and of those that are being made ready."""
        return sum(slot.nbytes for slot in self.slots) + self.preparer.promised_bytes

    def peak_bytes(self) -> int:
        """The most that `used_bytes` has been."""
        return max(self._peak_bytes, self.used_bytes())

    def _note_going(self, slot: Slot) -> None:
        """Before a slot goes or is free again. In between memory only grows: the peak is before one goes."""
        self._peak_bytes = max(self._peak_bytes, self.used_bytes())
        if slot.state == "sealed" and slot.id is not None and not slot.is_failed:
            self._evicted.append((slot.id, slot.nbytes))

    def take_evicted(self) -> list[tuple[SnapshotId, int]]:
        """Which snapshots, of how many bytes, were given up for later ones since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def is_usable(self, slot: Slot) -> bool:
        """Free, and still there."""
        if slot.state != "free":
            return False
        if slot.path is None or os.path.exists(slot.path):
            return True
        self.lose(slot, TierError(f"memory: {slot.path} is gone", tier="memory", key=slot.path))
        return False

    def tell(self, topic: str, message: str) -> None:
        """Warn, once for each topic."""
        if topic not in self._told:
            self._told.add(topic)
            _LOG.warning("rank %d: %s", self._rank, message)

    def new_nameless(self, nbytes: int) -> Slot | None:
        """Anonymous memory in place of a full tmpfs, within the budget."""
        try:
            return self.new_anonymous(nbytes)
        except TierError as error:
            self.tell("nameless", str(error))
            return None

    def new(self, nbytes: int) -> Slot | None:
        """One more; None if there is no memory for it."""
        slot = self.files.allocate(nbytes)
        if slot is not None:
            self.slots.append(slot)
        return slot

    def new_anonymous(self, nbytes: int) -> Slot:
        """One more without a name.

        Raises:
            TierFullError: There is no memory for it.
        """
        slot = self.files.allocate_anonymous(nbytes)
        self.slots.append(slot)
        return slot

    def drop(self, slot: Slot) -> None:
        """Give its memory back."""
        self._note_going(slot)
        self.slots.remove(slot)
        try:
            self.files.free(slot)
        except TierError as error:
            self.lose(slot, error)

    def retire(self, slot: Slot) -> bool:
        """Make a slot free; False if its file is gone, and then the slot is as well."""
        self._note_going(slot)
        try:
            self.files.retire(slot)
        except TierError as error:
            self.lose(slot, error)
            return False
        return True

    def lose(self, slot: Slot, error: TierError) -> None:
        """Somebody else removed a slot's file: nobody can find it by name any more, so let go of it."""
        self.tell("lost", f"{error}: files in {self.files.folder} are removed by somebody else")
        self._note_going(slot)
        if slot in self.slots:
            self.slots.remove(slot)
        slot.unmap()
