"""Slots in host memory: reserve, seal, recycle (protocol P3). Adoption is in `adoption.py`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from shardstore.errors import TierError, TierFullError
from shardstore.format.marks import Mark
from shardstore.format.records import SnapshotId
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.pool import SlotPool
from shardstore.tiers.reuse import Facts, is_in_flight, is_spillable, is_superseded
from shardstore.tiers.slotfiles import no_room
from shardstore.tiers.slots import Slot, SlotReader, check_slot_header, write_header

_LOG: Final = logging.getLogger("shardstore")


class MemoryTier:
    """The memory slots of one rank.

    With a `folder` they are files on a tmpfs and outlive the process (G7); without one they are
    anonymous memory. A slot that a rank may still need is never reused: the rule is P3's, with the
    joint facts (newest complete, failed, safe, kept) told to this tier by the engine.

    `reserve` belongs to the thread that saves; everything else may be called from any thread.
    """

    name = "memory"

    def __init__(
        self,
        folder: str | None,
        *,
        rank: int,
        owner: str,
        budget_bytes: int,
        has_outer: bool,
        ops: FileOps,
        budget_from: str = "",
        num_local_ranks: int = 1,
    ) -> None:
        """Own no slot yet.

        Args:
            folder: `<memory_dir>/shardstore-<uid>/<name>`, made already; None for anonymous memory.
            rank: This rank, which is in the file names.
            owner: Nonce of the run, which is in the names of free slots.
            budget_bytes: Most that all slots may take.
            has_outer: What is saved becomes durable elsewhere: where the tmpfs is full it may be staged in
                anonymous memory, which ends with the process.
            ops: System calls.
            budget_from: How a measured budget came about, for messages.
            num_local_ranks: Ranks of this host, which share its limits.
        """
        self.rank = rank
        self.budget_bytes = budget_bytes
        self.budget_from = budget_from
        self._facts = Facts(owner, has_outer)
        self._ops = ops
        self._pool = SlotPool(
            folder, rank=rank, owner=owner, ops=ops, num_local_ranks=num_local_ranks
        )
        self._slots = self._pool.slots
        self._changed = self._pool.changed
        self.ask_spill: Callable[[SnapshotId], None] | None = None
        """Asks all ranks to spill a snapshot that only memory has, and whose room is needed. Does not wait."""
        self.in_time: Callable[[float], float] = lambda seconds: seconds
        """How much of a wait the process has time for."""

    @property
    def folder(self) -> str | None:
        """Folder of the slots; None when they are anonymous."""
        return self._pool.files.folder

    @property
    def owner(self) -> str:
        """Nonce of the run."""
        return self._pool.files.owner

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots, free ones included."""
        with self._changed:
            return self._pool.used_bytes()

    @property
    def peak_bytes(self) -> int:
        """The most that `used_bytes` has been."""
        with self._changed:
            return self._pool.peak_bytes()

    def take_evicted(self) -> list[tuple[SnapshotId, int]]:
        """Which snapshots, of how many bytes, were given up for later ones since the last call."""
        with self._changed:
            return self._pool.take_evicted()

    # ------------------------------------------------------------- joint facts

    @property
    def newest_complete(self) -> SnapshotId | None:
        """P: the newest snapshot known complete on all ranks."""
        with self._changed:
            return self._facts.newest

    def set_newest_complete(self, snapshot_id: SnapshotId | None) -> None:
        """Protect this one; older ones may become reusable."""
        with self._changed:
            self._facts.newest = snapshot_id
            self._changed.notify_all()

    def mark_safe(self, snapshot_id: SnapshotId) -> None:
        """This one is committed further out, or superseded for good."""
        with self._changed:
            for slot in self._slots:
                if slot.id == snapshot_id:
                    slot.is_safe, slot.is_leaving, slot.is_only_here = True, False, False
            self._changed.notify_all()

    def mark_only_here(self, snapshot_id: SnapshotId) -> None:
        """This one is pinned and nowhere further out: its memory serves nothing else any more."""
        with self._changed:
            for slot in self._slots:
                if slot.id == snapshot_id:
                    slot.is_safe, slot.is_only_here = False, True
            self._changed.notify_all()

    def mark_stays(self, snapshot_id: SnapshotId) -> None:
        """This one was asked to go further out, and could not."""
        with self._changed:
            for slot in self._slots:
                if slot.id == snapshot_id:
                    slot.is_leaving = False
            self._changed.notify_all()

    def mark_failed(self, snapshot_id: SnapshotId) -> None:
        """Nobody may use this one any more (failed or deleted): it becomes unreadable and free.

        While somebody still reads it, that waits for the last `release`.
        """
        with self._changed:
            for slot in list(self._slots):
                if slot.id == snapshot_id:
                    slot.is_failed = True
                    if slot.users == 0:
                        self._pool.retire(slot)
            self._changed.notify_all()

    # ------------------------------------------------------------------- reads

    def ids(self) -> list[SnapshotId]:
        """Sealed snapshots that are readable here, oldest first."""
        with self._changed:
            found = [s.id for s in self._slots if s.state == "sealed" and not s.is_failed and s.id]
        return sorted(found, key=lambda i: i.order)

    def is_safe(self, snapshot_id: SnapshotId) -> bool:
        """Whether this rank's copy is known to be committed further out."""
        with self._changed:
            return any(s.is_safe for s in self._slots if s.id == snapshot_id)

    def is_kept(self, snapshot_id: SnapshotId) -> bool:
        """Whether this rank's copy was saved with persist=False."""
        with self._changed:
            return any(s.is_kept for s in self._slots if s.id == snapshot_id)

    def check_header(self, snapshot_id: SnapshotId) -> None:
        """Check the header of this rank's copy by its digest.

        Raises:
            CorruptSnapshotError: It is damaged.
        """
        reader = self.open_shard(snapshot_id)
        if reader is None:
            return
        with reader:
            check_slot_header(reader.read(0, reader.nbytes), reader.source)

    def open_shard(self, snapshot_id: SnapshotId) -> SlotReader | None:
        """Open this rank's copy and keep it from reuse while open; None if there is none."""
        with self._changed:
            for slot in self._slots:
                if slot.id == snapshot_id and slot.state == "sealed" and not slot.is_failed:
                    slot.users += 1
                    return SlotReader(slot, self.release)
        return None

    def release(self, slot: Slot) -> None:
        """End one use of a slot."""
        with self._changed:
            slot.users -= 1
            if slot.users == 0 and slot.is_failed and slot.state == "sealed":
                self._pool.retire(slot)
            self._changed.notify_all()

    # ----------------------------------------------------------------- reserve

    def reserve(
        self,
        nbytes: int,
        *,
        kept: bool,
        timeout_s: float,
        is_hopeless: Callable[[], bool] = lambda: False,
    ) -> Slot | None:
        """Get a slot of exactly `nbytes` to build a shard file in.

        A free or reusable warm slot is taken first, then new memory within the budget; else this waits
        for a slot on its way out.

        Args:
            nbytes: Size of the file.
            kept: For a memory-only snapshot, which needs a slot that outlives the process.
            timeout_s: How long to wait for memory that is on its way out, in seconds; 0 does not wait.
            is_hopeless: Whether waiting is no use just now.

        Returns:
            The slot; None if nothing could make room.

        Raises:
            TierFullError: Nothing became free within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        asked: set[SnapshotId] = set()
        with self._changed:
            while nbytes <= self.budget_bytes:
                slot = self._try_reserve(nbytes, kept=kept)
                if slot is not None:
                    slot.state = "staging"
                    slot.users = 0
                    return slot
                if self._pool.preparer.is_running:  # the room is there, and its pages soon will be
                    self._changed.wait(1.0)
                    continue
                if not self._on_the_way_out() and not self._send_out(asked):
                    return None
                left = self.in_time(deadline - time.monotonic())
                if left <= 0 or is_hopeless():
                    raise self.full(nbytes, waited=True)
                self._changed.wait(min(left, 1.0))
        return None

    def _try_reserve(self, nbytes: int, *, kept: bool) -> Slot | None:
        ours = sorted(self._slots, key=lambda s: s.id.order if s.id else (0, 0, ""))
        must_outlive = kept and self.folder is not None
        fitting = [s for s in ours if s.nbytes == nbytes and not (must_outlive and s.path is None)]
        for slot in fitting:
            if self._pool.is_usable(slot):
                return slot
        for slot in fitting:
            if self._is_reusable(slot) and self._pool.retire(slot):
                return slot
        if self._pool.preparer.is_running:
            return None
        if self._pool.used_bytes() + nbytes <= self.budget_bytes:
            new = self._pool.new(nbytes)
            may_be_nameless = self._facts.has_outer and not must_outlive and self.folder is not None
            if new is None and may_be_nameless and not self._pool.files.is_limited:
                new = self._pool.new_nameless(nbytes)
            if new is not None:
                return new
        for slot in ours:  # another size: give it back and try anew
            if slot.nbytes != nbytes and (slot.state == "free" or self._is_reusable(slot)):
                self._pool.drop(slot)
                return self._try_reserve(nbytes, kept=kept)
        return None

    def try_scratch(self, nbytes: int) -> Slot | None:
        """A buffer to read into, never named and taken from no snapshot; None beyond the budget.

        Give it back with `abandon_slot`; it then serves the next save, warm.
        """
        with self._changed:
            free = [s for s in list(self._slots) if s.nbytes == nbytes and self._pool.is_usable(s)]
            slot: Slot | None = free[0] if free else None
            while slot is None and nbytes <= self.budget_bytes:
                if self._pool.used_bytes() + nbytes <= self.budget_bytes:
                    slot = self._pool.new(nbytes)
                    break
                unused = next((s for s in self._slots if s.state == "free"), None)
                if unused is None:
                    break
                self._pool.drop(unused)
            if slot is not None:
                slot.state = "staging"
            return slot

    def scratch(self, nbytes: int) -> Slot:
        """As `try_scratch`, but beyond the budget where that is used up."""
        with self._changed:
            slot = self.try_scratch(nbytes)
            if slot is None:
                slot = self._pool.new_anonymous(nbytes)
                slot.state = "staging"
            return slot

    def _is_reusable(self, slot: Slot) -> bool:
        if slot.id is not None and slot.id == self._facts.newest:
            return slot.state == "sealed" and not slot.users and self._is_only_room(slot)
        return is_superseded(slot, self._facts)

    def _is_only_room(self, slot: Slot) -> bool:
        """The newest may go only where there is room for one, once it is committed further out."""
        if not slot.is_safe:
            return False
        if slot.path is None and self._facts.has_outer:
            return True
        fits_two = 2 * slot.nbytes <= self.budget_bytes and not self._pool.files.is_full
        if fits_two or any(s.state != "sealed" for s in self._slots):
            return False
        self._pool.tell(
            "one",
            "memory has room for one snapshot only: while the next one is built, a restart finds "
            "the newest on the root, not in memory",
        )
        return True

    def _on_the_way_out(self) -> bool:
        """Whether some slot will become reusable without another save."""
        return any(is_in_flight(slot, self._facts) for slot in self._slots)

    def _send_out(self, asked: set[SnapshotId]) -> bool:
        """Have the oldest snapshot that is only in memory spilled, if there is one not asked for yet."""
        found = [s for s in self._slots if is_spillable(s, self._facts) and s.id not in asked]
        if not found or self.ask_spill is None:
            return False
        oldest = min(found, key=lambda s: s.id.order if s.id else (0, 0, ""))
        assert oldest.id is not None
        asked.add(oldest.id)
        oldest.is_leaving = True
        self.ask_spill(oldest.id)
        return True

    def full(self, nbytes: int, *, waited: bool = False) -> TierFullError:
        """The error of a state that there is no room for."""
        held = [slot.id.name for slot in self._slots if slot.id]
        free = self.budget_bytes - self._pool.used_bytes()
        return no_room(
            self.folder, nbytes, free, self.budget_bytes, held,
            waited=waited, refusal=self._pool.files.refusal, budget_from=self.budget_from,
        )  # fmt: skip

    def abandon_slot(self, slot: Slot) -> None:
        """Give a reserved slot back unused: staging or the save failed."""
        with self._changed:
            if slot.state == "staging":
                slot.state, slot.id = "free", None
                # Without a name it must not serve a snapshot that is to outlive us.
                nameless = slot.path is None and self.folder is not None
                if nameless or self._pool.used_bytes() > self.budget_bytes > 0:
                    self._pool.drop(slot)
            self._changed.notify_all()

    def seal(self, slot: Slot, snapshot_id: SnapshotId, header: bytes, *, kept: bool) -> None:
        """Complete the file in a slot and give it its final name. Nobody writes to it again.

        If the process dies before the rename, only a nameless slot is left.
        """
        write_header(self._ops, slot, header)
        with self._changed:
            try:
                self._pool.files.give_final_name(slot, snapshot_id)
            except TierError as error:
                if kept or not self._facts.has_outer:
                    raise
                self._pool.tell(
                    "lost", f"{error}: this snapshot goes to the root without outliving us here"
                )
                slot.path = None
            slot.state, slot.id, slot.is_kept = "sealed", snapshot_id, kept
            slot.is_failed = slot.is_safe = False
            self._changed.notify_all()

    def mark_complete(self, snapshot_id: SnapshotId) -> None:
        """Leave a mark that this memory-only snapshot was complete on all ranks."""
        self._pool.files.mark_complete(snapshot_id)

    def put_mark(self, snapshot_id: SnapshotId, mark: Mark) -> None:
        """Put a mark beside this rank's copy, for a restart; that there is no file is fine.

        Raises:
            TierError: It cannot be written.
        """
        with self._changed:
            for slot in self._named(snapshot_id):
                self._pool.files.put_mark(slot, mark)

    def drop_mark(self, snapshot_id: SnapshotId, mark: Mark) -> None:
        """Remove a mark beside this rank's copy; that there is none is fine.

        Raises:
            TierError: It cannot be removed.
        """
        with self._changed:
            for slot in self._named(snapshot_id):
                self._pool.files.drop_mark(slot, mark)

    def _named(self, snapshot_id: SnapshotId) -> list[Slot]:
        return [s for s in self._slots if s.id == snapshot_id and s.state == "sealed"]

    def unmark(self) -> list[SnapshotId]:
        """Take all those marks away, before all ranks give memory back; returns what was marked.

        A rank that dies later than another one that has freed its files leaves no loss to be told of.
        """
        with self._changed:
            ids = [slot.id for slot in self._slots if slot.state == "sealed" and slot.id]
            return [i for i in ids if self._pool.files.unmark(i)]

    def prepare(self, nbytes: int, count: int = 1) -> None:
        """Make `count` free warm slots of `nbytes` in the background, as far as the budget goes."""
        with self._changed:
            spare = sum(
                1
                for s in self._slots
                if s.nbytes == nbytes and (s.state == "free" or self._is_reusable(s))
            )
            room = (self.budget_bytes - self._pool.used_bytes()) // max(1, nbytes)
            self._pool.preparer.start(nbytes, min(count - spare, room))

    def wait_prepared(self, timeout_s: float) -> None:
        """Wait for `prepare` to end."""
        self._pool.preparer.wait(timeout_s)

    def adopt(self, slots: list[Slot]) -> None:
        """Take over slots of a dead run."""
        with self._changed:
            self._slots += slots

    def close(self, *, keep: bool) -> None:
        """Unmap everything; without `keep` the files go as well."""
        self._pool.preparer.stop()
        self.wait_prepared(60.0)
        with self._changed:
            for slot in list(self._slots):
                if not keep or slot.state == "free" or slot.path is None:
                    try:
                        self._pool.drop(slot)
                    except OSError as error:
                        _LOG.warning("rank %d: %s", self.rank, error)
                else:
                    self._slots.remove(slot)
                    slot.unmap()

    def leave(self, *, remove: bool) -> None:
        """After `close`: let go of the locks; with `remove` their files and the folder go as well."""
        self._pool.files.leave(remove=remove)
