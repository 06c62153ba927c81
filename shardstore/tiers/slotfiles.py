"""Names and memory of slots: allocate, retire, name, mark, free. Which slot, and when, is `memory`'s."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
from collections.abc import Sequence
from typing import Final

from shardstore.errors import TierFullError
from shardstore.format.manifest import shard_file_name
from shardstore.format.records import SnapshotId
from shardstore.tiers.fileops import FileOps, translated
from shardstore.tiers.limits import TMPFS_REMEDY, check_room
from shardstore.tiers.slots import Slot, erase_header, map_slot

_LOG: Final = logging.getLogger("shardstore")
_STEP_BYTES: Final = 256 << 20
"""How much is reserved between two looks at the limits, which other ranks share."""


class SlotFiles:
    """Files of one rank in a tmpfs folder, or anonymous memory. The caller serialises the calls."""

    def __init__(self, folder: str | None, *, rank: int, owner: str, ops: FileOps) -> None:
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

    def allocate(self, nbytes: int) -> Slot | None:
        """New memory on the tmpfs, or anonymous without one; None when there is none to be had."""
        if self.folder is None:
            try:
                return self.allocate_anonymous(nbytes)
            except TierFullError as error:
                self._tell_full(error)
                return None
        path = self._free_name(self.folder)
        try:
            with translated("memory", "reserve", path, needed_bytes=nbytes):
                os.makedirs(self.folder, 0o700, exist_ok=True)  # somebody may have cleaned up
                fd = self._ops.open_new(path, 0o600)
                try:
                    self._fill(fd, nbytes, path)
                except BaseException:
                    os.close(fd)
                    self._ops.unlink(path)
                    raise
        except TierFullError as error:
            self._tell_full(error)
            return None
        self.refusal = None
        return map_slot(fd, nbytes, path)

    def _fill(self, fd: int, nbytes: int, where: str) -> None:
        """Reserve all memory of a new file, unless a limit forbids it by then."""
        for start in range(0, nbytes, _STEP_BYTES):
            check_room(nbytes - start, where, self._ops)
            self._ops.allocate(fd, min(_STEP_BYTES, nbytes - start), start)

    @property
    def is_limited(self) -> bool:
        """Whether the last refusal was of any memory of this process, and not by the tmpfs alone."""
        return self.refusal is not None and self.refusal.__cause__ is None

    def _tell_full(self, error: TierFullError) -> None:
        self.refusal = error
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

    def allocate_anonymous(self, nbytes: int) -> Slot:
        """New memory without a name: it ends with the process."""
        with translated("memory", "reserve", "anonymous memory", needed_bytes=nbytes):
            fd = os.memfd_create("shardstore", os.MFD_CLOEXEC)
            try:
                self._fill(fd, nbytes, "anonymous memory")
            except BaseException:
                os.close(fd)
                raise
        return map_slot(fd, nbytes, None)

    def _free_name(self, folder: str) -> str:
        serial, token = next(self._serial), secrets.token_hex(3)
        return os.path.join(folder, f"slot-{self.owner}-{self.rank:05d}-{serial:04d}-{token}")

    def retire(self, slot: Slot) -> None:
        """Make a sealed slot unreadable and nameless, before anything is written into it."""
        erase_header(self._ops, slot)
        old_path, snapshot_id = slot.path, slot.id
        slot.state, slot.id = "free", None
        slot.is_failed = slot.is_safe = slot.is_kept = slot.is_leaving = False
        if old_path is None or snapshot_id is None or self.folder is None:
            return
        slot.path = self._free_name(self.folder)
        with translated("memory", "retire", old_path):
            self._ops.rename(old_path, slot.path)
        self._leave_snapshot_folder(os.path.join(self.folder, snapshot_id.name))

    def _leave_snapshot_folder(self, folder: str) -> None:
        """Remove this rank's mark, and the folder if no other rank has files in it."""
        mark = os.path.join(folder, mark_name(self.rank))
        for remove, path in ((self._ops.unlink, mark), (self._ops.remove_folder, folder)):
            try:
                remove(path)
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
