"""Names and memory of slots: allocate, retire, name, mark, free. Which slot, and when, is `memory`'s."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import time
from collections.abc import Sequence
from typing import Final

from shardstore.errors import TierFullError, without_frames
from shardstore.format.manifest import shard_file_name
from shardstore.format.marks import MARKS, Mark, mark_file
from shardstore.format.records import SnapshotId
from shardstore.tiers import ownership, pages
from shardstore.tiers.fileops import FileOps, make_folders, translated
from shardstore.tiers.limits import SPARE_BYTES, TMPFS_REMEDY, check_room
from shardstore.tiers.marks import drop_mark, put_mark
from shardstore.tiers.slots import Slot, erase_header, map_slot

_LOG: Final = logging.getLogger("shardstore")
_STEP_BYTES: Final = 64 << 20
"""How much is reserved between two looks at the limits, which other ranks share."""
_TRY_BYTES: Final = 16 << 20
_HURRIED_SPEED: Final = 1.0e9
"""Bytes per second: small pages come as fast."""
_PATIENT_SPEED: Final = 0.2e9


class SlotFiles:
    """Files of one rank in a tmpfs folder, or anonymous memory. The caller serialises the calls."""

    def __init__(
        self, folder: str | None, *, rank: int, owner: str, ops: FileOps, num_local_ranks: int = 1
    ) -> None:
        """See MemoryTier."""
        self.folder = folder
        self.rank = rank
        self.owner = owner
        self.is_full = False
        """The tmpfs, or a limit on memory, turned out to be too small for what was asked."""
        self.refusal: TierFullError | None = None
        """Why memory could not be had the last time."""
        self._ops = ops
        self._serial = itertools.count()
        # Each rank of the host may be between two looks, as this one is, and has buffers of its own.
        self._spare_bytes = num_local_ranks * SPARE_BYTES + (num_local_ranks - 1) * _STEP_BYTES

    def allocate(self, nbytes: int, *, patient: bool = False) -> Slot | None:
        """New memory on the tmpfs, or anonymous without one; None when there is none to be had.

        Nobody waits for it if `patient`: then huge pages may take longer to get than small ones.
        """
        if self.folder is None:
            try:
                return self.allocate_anonymous(nbytes, patient=patient)
            except TierFullError as error:
                self._tell_full(error)
                return None
        path = self._free_name(self.folder)
        try:
            with translated("memory", "reserve", path, needed_bytes=nbytes):
                make_folders(self._ops, self.folder, 0o700)  # somebody may have cleaned up
                self._check_room(nbytes, path)
                fd = self._ops.open_new(path, 0o600)
                try:
                    slot = self._filled(fd, nbytes, path, patient=patient)
                except BaseException:
                    self._ops.unlink(path)
                    raise
                finally:
                    os.close(fd)
        except TierFullError as error:
            self._tell_full(error)
            return None
        self.refusal = None
        return slot

    def _check_room(self, nbytes: int, where: str) -> None:
        check_room(nbytes, where, self._ops, spare_bytes=self._spare_bytes)

    def _filled(self, fd: int, nbytes: int, path: str | None, *, patient: bool) -> Slot:
        """Map a new file and give it all its memory, unless a limit forbids that by then."""
        self._ops.set_size(fd, nbytes)
        slot = map_slot(fd, nbytes, path)
        try:
            least_speed, can_be_huge = _PATIENT_SPEED if patient else _HURRIED_SPEED, True
            for start in range(0, nbytes, _STEP_BYTES):
                stop = min(start + _STEP_BYTES, nbytes)
                if start:
                    self._check_room(nbytes - start, slot.source)
                if can_be_huge:
                    can_be_huge = self._fill_huge(fd, slot.view, start, stop, least_speed)
                # What is not there yet; a full tmpfs says so here, and not by a signal later.
                self._ops.allocate(fd, stop - start, start)
        except BaseException:
            slot.unmap()
            raise
        return slot

    def _fill_huge(
        self, fd: int, view: memoryview, start: int, stop: int, least_speed: float
    ) -> bool:
        """Take the memory of [start, stop) in huge pages; False if not all of it could be had so.

        Where they come slowly (the host of a virtual machine has to find them first), that ends early.
        """
        huge = pages.huge_page_bytes()
        first, last = -(-start // huge) * huge, stop // huge * huge
        for begin in range(first, last, max(huge, _TRY_BYTES)):
            end = min(begin + max(huge, _TRY_BYTES), last)
            started = time.perf_counter()
            try:
                self._ops.begin_pages(fd, range(begin, end, huge))
            except OSError:
                return False
            if not pages.collapse(view, begin, end):
                return False
            if end - begin < least_speed * (time.perf_counter() - started):
                return False
        return True

    @property
    def is_limited(self) -> bool:
        """Whether the last refusal was of any memory of this process, and not by the tmpfs alone."""
        return self.refusal is not None and self.refusal.__cause__ is None

    def _tell_full(self, error: TierFullError) -> None:
        self.refusal = without_frames(error)
        if self.is_full:
            return
        self.is_full = True
        if self.is_limited:
            _LOG.warning(
                "rank %d: %s With a root, saves go straight to it and wait for it.",
                self.rank,
                error,
            )
            return
        _LOG.warning(
            "rank %d: %s is too small: %s bytes were needed, %s are free. With a root, saves go on "
            "through memory of this process, which a restart cannot use. %s",
            self.rank, self.folder, f"{error.needed_bytes:,}", f"{error.free_bytes:,}", TMPFS_REMEDY,
        )  # fmt: skip

    def allocate_anonymous(self, nbytes: int, *, patient: bool = False) -> Slot:
        """New memory without a name: it ends with the process."""
        with translated("memory", "reserve", "anonymous memory", needed_bytes=nbytes):
            self._check_room(nbytes, "anonymous memory")
            fd = os.memfd_create("shardstore", os.MFD_CLOEXEC)
            try:
                return self._filled(fd, nbytes, None, patient=patient)
            finally:
                os.close(fd)

    def _free_name(self, folder: str) -> str:
        serial, token = next(self._serial), secrets.token_hex(3)
        return os.path.join(folder, f"slot-{self.owner}-{self.rank:05d}-{serial:04d}-{token}")

    def retire(self, slot: Slot) -> None:
        """Make a sealed slot unreadable and nameless, before anything is written into it.

        Its marks go first: one that outlived the file would tell every later start of a loss.
        """
        old_path, snapshot_id = slot.path, slot.id
        folder = None
        if old_path is not None and snapshot_id is not None and self.folder is not None:
            folder = os.path.join(self.folder, snapshot_id.name)
            self._drop_marks(folder)
        erase_header(self._ops, slot)
        slot.state, slot.id = "free", None
        slot.is_failed = slot.is_safe = slot.is_kept = slot.is_leaving = False
        slot.is_only_here = False
        if folder is None or old_path is None or self.folder is None:
            return
        slot.path = self._free_name(self.folder)
        with translated("memory", "retire", old_path):
            self._ops.rename(old_path, slot.path)
        try:
            self._ops.remove_folder(folder)
        except OSError:
            pass  # other ranks have files in it

    def _drop_marks(self, folder: str) -> None:
        """Remove this rank's marks beside one snapshot."""
        for name in (mark_name(self.rank), *(mark_file(mark, self.rank) for mark in MARKS)):
            try:
                self._ops.unlink(os.path.join(folder, name))
            except OSError:
                pass

    def free(self, slot: Slot) -> None:
        """Give a slot's memory back to the system."""
        if slot.state == "sealed":
            self.retire(slot)
        if slot.path is not None:
            with translated("memory", "free", slot.path):
                self._ops.unlink(slot.path)
        slot.unmap()

    def give_final_name(self, slot: Slot, snapshot_id: SnapshotId) -> None:
        """Rename a completed slot: from now on it is a shard of that snapshot."""
        if slot.path is None or self.folder is None:
            return
        folder = os.path.join(self.folder, snapshot_id.name)
        target = os.path.join(folder, shard_file_name(self.rank))
        with translated("memory", "seal", target):
            while True:
                try:
                    self._ops.make_folder(folder, 0o700)
                except FileExistsError:
                    pass
                try:
                    self._ops.rename(slot.path, target)
                    break
                except FileNotFoundError:
                    # Another rank removed the folder, empty as it was, in between.
                    if not os.path.exists(slot.path):
                        raise
        slot.path = target

    def leave(self, *, remove: bool) -> None:
        """Let go of what this rank owns here; with `remove` the folder goes if no other rank needs it."""
        if self.folder is None:
            return
        ownership.release_all(self.folder, self.rank, remove=remove, ops=self._ops)
        if remove:
            for folder in (self.folder, os.path.dirname(self.folder)):
                try:
                    self._ops.remove_folder(folder)
                except OSError:
                    break  # other ranks or namespaces are still there

    def unmark(self, snapshot_id: SnapshotId) -> bool:
        """Take that mark away; False if there is none."""
        if self.folder is None:
            return False
        try:
            self._ops.unlink(os.path.join(self.folder, snapshot_id.name, mark_name(self.rank)))
        except OSError:
            return False
        return True

    def mark_complete(self, snapshot_id: SnapshotId) -> None:
        """Leave a mark that this memory-only snapshot was complete on all ranks."""
        if self.folder is None:
            return
        path = os.path.join(self.folder, snapshot_id.name, mark_name(self.rank))
        with translated("memory", "mark", path):
            try:
                os.close(self._ops.open_new(path, 0o600))
            except FileExistsError:
                pass

    def put_mark(self, slot: Slot, mark: Mark) -> None:
        """Put a mark beside a sealed slot that has a name."""
        if slot.path is not None:
            path = os.path.join(os.path.dirname(slot.path), mark_file(mark, self.rank))
            with translated("memory", "mark", path):
                put_mark(self._ops, path, 0o600)

    def drop_mark(self, slot: Slot, mark: Mark) -> None:
        """Remove a mark beside a sealed slot; that there is none is fine."""
        if slot.path is not None:
            path = os.path.join(os.path.dirname(slot.path), mark_file(mark, self.rank))
            with translated("memory", "mark", path):
                drop_mark(self._ops, path)


def mark_name(rank: int) -> str:
    """File name of the mark that a memory-only snapshot was complete, as rank `rank` leaves it."""
    return f"rank-{rank:05d}.complete"


def no_room(
    folder: str | None,
    nbytes: int,
    free: int,
    budget_bytes: int,
    held: Sequence[str],
    *,
    waited: bool,
    refusal: TierFullError | None,
    budget_from: str,
) -> TierFullError:
    """The error of a slot that cannot be had: what holds the memory, and what to do."""
    where = folder or "anonymous memory"
    why = "nothing left in time" if waited else "nothing is on its way out"
    free = max(0, free if refusal is None else min(free, refusal.free_bytes))
    refused = "" if refusal is None else f" The last request was refused: {refusal}"
    return TierFullError(
        f"memory: no room in {where} for {nbytes:,} bytes: {free:,} of the budget of "
        f"{budget_bytes:,} are free and {why}. It holds {', '.join(held) or 'nothing'}.{budget_from}"
        f"{refused} Raise memory=, give a root to write to, use keep=, or delete snapshots that were saved "
        f"with persist=False. {TMPFS_REMEDY}",
        tier="memory", key=where, operation="reserve", needed_bytes=nbytes, free_bytes=free,
    )  # fmt: skip
