"""What earlier runs left in a memory folder: who owns it, what is readable, what is free (P3)."""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from shardstore.errors import CorruptSnapshotError, FormatError, TierError
from shardstore.format.layout import ALIGNMENT
from shardstore.format.manifest import shard_file_name
from shardstore.format.records import ShardHeader, SnapshotId
from shardstore.tiers import ownership
from shardstore.tiers.fileops import FileOps, translated
from shardstore.tiers.marks import marks_among
from shardstore.tiers.slotfiles import mark_name
from shardstore.tiers.slots import Slot, map_slot, read_slot_header

_LOG: Final = logging.getLogger("shardstore")
_RANK: Final = "([0-9]{5}|[1-9][0-9]{5,})"
_SLOT: Final = re.compile(rf"slot-([0-9a-f]{{8}})-{_RANK}-.*")
_LOCK: Final = re.compile(rf"owner-([0-9a-f]{{8}})-{_RANK}\.lock")
_SHARD: Final = re.compile(rf"rank-{_RANK}\.safetensors")
OWNER_WAIT_S: Final = 10.0
"""How long a restart waits for its dying predecessor to let go."""


@dataclass(slots=True)
class Adopted:
    """Files of dead runs of this rank, now owned by this process."""

    slots: list[Slot] = field(default_factory=list)
    """Sealed ones have their id and header read; free ones only memory."""
    headers: dict[SnapshotId, tuple[ShardHeader, str]] = field(default_factory=dict)
    """Header and digest of each readable snapshot."""
    marked: list[SnapshotId] = field(default_factory=list)
    """Memory-only snapshots that were complete on all ranks, readable here or not."""
    pinned: list[SnapshotId] = field(default_factory=list)
    damaged: list[SnapshotId] = field(default_factory=list)
    """Snapshots with that mark beside this rank's copy."""
    num_ranks_seen: dict[SnapshotId, int] = field(default_factory=dict)
    """Shards of any rank in this folder, by snapshot."""
    highest_run: int = 0


def make_memory_folder(memory_dir: str, name: str, ops: FileOps) -> str:
    """Make `<memory_dir>/shardstore-<uid>/<name>`, private to this user.

    Raises:
        TierError: It cannot be made, or belongs to somebody else, or is a link.
    """
    path = memory_dir
    for part in (f"shardstore-{os.getuid()}", name):
        path = os.path.join(path, part)
        with translated("memory", "create", path):
            try:
                ops.make_folder(path, 0o700)
            except FileExistsError:
                pass
            found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise TierError(
                f"memory: {path} is not a folder of this user (uid {os.getuid()}): remove it or give "
                "another memory_dir= or name=",
                tier="memory", key=path, operation="create",
            )  # fmt: skip
    return path


def lock_path(folder: str, owner: str, rank: int) -> str:
    """Lock file of one run and rank."""
    return os.path.join(folder, f"owner-{owner}-{rank:05d}.lock")


def adopt_files(folder: str, *, rank: int, owner: str, ops: FileOps) -> Adopted:
    """Take this rank's files of dead runs, and the lock of the new run `owner`.

    Files whose owner lives are left alone after `OWNER_WAIT_S`, and its pid is named. Nothing is
    written into any file here: that waits for the agreement on what to protect.
    """
    result = Adopted()
    with translated("memory", "adopt", folder):
        names = ops.list_folder(folder)
        dead = _dead_owners(folder, names, rank, ops)
        ownership.acquire(lock_path(folder, owner, rank), ops=ops)
        used: set[str] = set()
        for name in sorted(names):
            snapshot_id = SnapshotId.parse(name)
            if snapshot_id is not None:
                result.highest_run = max(result.highest_run, snapshot_id.run)
                if _adopt_snapshot(result, folder, snapshot_id, rank, dead, ops):
                    used.add(snapshot_id.nonce)
                continue
            match = _SLOT.fullmatch(name)
            is_ours = match is not None and int(match[2]) == rank and match[1] in dead
            if match and is_ours and _adopt_slot(result, os.path.join(folder, name), ops):
                used.add(match[1])
        for gone in dead - used:
            ownership.release(lock_path(folder, gone, rank), remove=True, ops=ops)
    return result


def _dead_owners(folder: str, names: Iterable[str], rank: int, ops: FileOps) -> set[str]:
    """Nonces of runs of this rank whose process is gone; their locks are ours now."""
    owners = set()
    for name in names:
        match = _SLOT.fullmatch(name) or _LOCK.fullmatch(name)
        if match and int(match[2]) == rank:
            owners.add(match[1])
        snapshot_id = SnapshotId.parse(name)
        if snapshot_id and os.path.exists(os.path.join(folder, name, shard_file_name(rank))):
            owners.add(snapshot_id.nonce)
    deadline = time.monotonic() + OWNER_WAIT_S
    dead = set()
    for owner in sorted(owners):
        path = lock_path(folder, owner, rank)
        try:
            holder = ownership.acquire(path, wait_s=max(0.0, deadline - time.monotonic()), ops=ops)
        except OSError as error:  # no lock file of ours: a folder or a link has its name
            _LOG.warning("left alone, with what it guards: %s (%s)", path, error.strerror)
            continue
        if holder is None:
            dead.add(owner)
        else:
            _LOG.warning(
                "rank %d: process %s still owns files in %s: they are left alone. If it is no longer "
                "wanted, end it; two jobs on one root are kept apart.",
                rank, holder.pid or "(of another pid namespace)", folder,
            )  # fmt: skip
    return dead


def _adopt_snapshot(
    result: Adopted,
    folder: str,
    snapshot_id: SnapshotId,
    rank: int,
    dead: set[str],
    ops: FileOps,
) -> bool:
    """Adopt this rank's shard in one snapshot folder; False if there is none of ours."""
    inner = os.path.join(folder, snapshot_id.name)
    if not _is_folder(inner):
        return False
    try:
        names = ops.list_folder(inner)
    except FileNotFoundError:
        return False
    if not names:
        _remove_empty(inner, ops)
        return False
    result.num_ranks_seen[snapshot_id] = sum(1 for name in names if _SHARD.fullmatch(name))
    if mark_name(rank) in names and snapshot_id.nonce in dead:
        result.marked.append(snapshot_id)
    if shard_file_name(rank) not in names or snapshot_id.nonce not in dead:
        return False
    marks = marks_among(names, rank)
    result.pinned += [snapshot_id] * ("pinned" in marks)
    result.damaged += [snapshot_id] * ("damaged" in marks)
    path = os.path.join(inner, shard_file_name(rank))
    slot = _map_existing(path, ops)
    if slot is None:
        return False
    slot.state, slot.id = "sealed", snapshot_id
    try:
        header, digest = read_slot_header(slot.view, path)
    except (FormatError, CorruptSnapshotError) as error:
        _LOG.warning("rank %d: %s: its memory is reused", rank, error)
        slot.is_failed = True
    else:
        if header.id == snapshot_id and header.rank == rank:
            slot.is_kept = not header.persist
            result.headers[snapshot_id] = (header, digest)
        else:
            slot.is_failed = True
    result.slots.append(slot)
    return True


def _is_folder(path: str) -> bool:
    """Whether it is a folder itself: what a link leads to is not ours."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _remove_empty(folder: str, ops: FileOps) -> None:
    """Remove a folder whose last file's rank died before it could. Who needs it makes it anew."""
    try:
        ops.remove_folder(folder)
    except OSError:
        pass


def _adopt_slot(result: Adopted, path: str, ops: FileOps) -> bool:
    slot = _map_existing(path, ops)
    if slot is None:
        return False
    result.slots.append(slot)
    return True


def _map_existing(path: str, ops: FileOps) -> Slot | None:
    """Map a file of ours; one that is too short to be anything is removed."""
    try:
        fd = ops.open_existing(path, writable=True)
    except OSError as error:
        _LOG.warning("left alone: %s (%s)", path, error.strerror)
        return None
    found = os.fstat(fd)
    # A file that was opened but not yet allocated by a process that died has holes: touching those
    # on a full tmpfs would be SIGBUS.
    has_holes = found.st_blocks * 512 < found.st_size
    if has_holes or found.st_size < ALIGNMENT:
        os.close(fd)
        ops.unlink(path)
        return None
    try:
        return map_slot(fd, found.st_size, path)
    finally:
        os.close(fd)


def free_absent_ranks(folder: str, *, local_ranks: Iterable[int], ops: FileOps) -> int:
    """Remove files of ranks that no longer run on this host; returns how many went.

    For the host's lowest rank, after the first snapshot of the new run is complete.
    """
    present, removed = set(local_ranks), 0
    with translated("memory", "free", folder):
        for name in ops.list_folder(folder):
            match = _SLOT.fullmatch(name)
            snapshot_id = SnapshotId.parse(name)
            if match and int(match[2]) not in present:
                path = os.path.join(folder, name)
                removed += _remove_if_dead(folder, path, match[1], int(match[2]), ops)
            elif snapshot_id is not None:
                inner = os.path.join(folder, name)
                for file in ops.list_folder(inner) if _is_folder(inner) else ():
                    shard = _SHARD.fullmatch(file)
                    if shard and int(shard[1]) not in present:
                        path = os.path.join(inner, file)
                        owner, rank = snapshot_id.nonce, int(shard[1])
                        removed += _remove_if_dead(folder, path, owner, rank, ops)
    return removed


def _remove_if_dead(folder: str, path: str, owner: str, rank: int, ops: FileOps) -> int:
    lock = lock_path(folder, owner, rank)
    try:
        if ownership.acquire(lock, ops=ops) is not None:
            return 0
        ops.unlink(path)
    except OSError as error:
        _LOG.warning("left alone: %s (%s)", path, error.strerror)
        return 0
    ownership.release(lock, remove=True, ops=ops)
    return 1
