"""What runs keep in memory folders, alive or dead: for people who look, or free it by hand (P3).

Looking takes no lock and changes nothing. Freeing takes each owner's lock first, as a restart does, so it
never touches what a process still uses, and a restart at the same time waits for it.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from shardstore.errors import TierError
from shardstore.format.marks import MARKS
from shardstore.format.records import SnapshotId
from shardstore.tiers import ownership
from shardstore.tiers.adoption import lock_path
from shardstore.tiers.fileops import FileOps, translated

_SLOT: Final = re.compile(r"slot-([0-9a-f]{8})-(\d{5,})-.*")
_LOCK: Final = re.compile(r"owner-([0-9a-f]{8})-(\d{5,})\.lock")
_SHARD: Final = re.compile(rf"rank-(\d{{5,}})\.(safetensors|complete|{'|'.join(MARKS)})")
_FLOCK: Final = struct.Struct("hhqqi")
"""struct flock of 64-bit Linux: type, whence, start, length, pid."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that has the memory of one run and rank."""

    nonce: str
    rank: int
    is_alive: bool
    pid: int
    """0 if it is dead, or the kernel does not say (another pid namespace)."""


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """One file that takes memory, or marks a snapshot."""

    path: str
    nbytes: int
    """Memory it takes."""
    rank: int
    owner: Owner
    id: SnapshotId | None
    """Of a sealed shard; None for a slot, which holds nothing that can be read."""
    is_mark: bool = False


@dataclass(frozen=True, slots=True)
class Namespace:
    """The memory folder of one store name (or root)."""

    name: str
    path: str
    files: tuple[MemoryFile, ...]
    owners: tuple[Owner, ...]
    """Of every lock file, also those that have no memory."""

    @property
    def nbytes(self) -> int:
        """Memory of all files."""
        return sum(file.nbytes for file in self.files)

    @property
    def ids(self) -> tuple[SnapshotId, ...]:
        """Snapshots of which some rank has a sealed shard here, oldest first."""
        found = {file.id for file in self.files if file.id is not None and not file.is_mark}
        return tuple(sorted(found, key=lambda i: i.order))

    def ranks_of(self, snapshot_id: SnapshotId) -> tuple[int, ...]:
        """Ranks whose sealed shard of a snapshot is here."""
        files = (f for f in self.files if f.id == snapshot_id and not f.is_mark)
        return tuple(sorted(file.rank for file in files))

    def shard_path(self, snapshot_id: SnapshotId) -> str | None:
        """Some rank's shard of a snapshot."""
        files = (f for f in self.files if f.id == snapshot_id and not f.is_mark)
        return next((file.path for file in files), None)


@dataclass(frozen=True, slots=True)
class Cleared:
    """What freeing a namespace did."""

    nbytes: int
    num_files: int
    held: tuple[Owner, ...]
    """Left alone: a process has it."""
    problems: tuple[str, ...]


def user_folder(memory_dir: str) -> str:
    """Where this user's namespaces are."""
    return os.path.join(memory_dir, f"shardstore-{os.getuid()}")


def find_namespaces(memory_dir: str, ops: FileOps) -> list[Namespace]:
    """Every namespace of this user, by name; none where there never was one.

    Raises:
        TierError: The folder is there and cannot be read.
    """
    folder = user_folder(memory_dir)
    with translated("memory", "list", folder):
        try:
            names = sorted(ops.list_folder(folder))
        except FileNotFoundError:
            return []
    found = (read_namespace(os.path.join(folder, name), ops) for name in names)
    return [namespace for namespace in found if namespace is not None]


def read_namespace(path: str, ops: FileOps) -> Namespace | None:
    """Look into one namespace folder; None if there is none, or it is no folder of this user.

    Raises:
        TierError: It cannot be read.
    """
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return None
    owners: dict[tuple[str, int], Owner] = {}

    def owner(nonce: str, rank: int) -> Owner:
        if (nonce, rank) not in owners:
            owners[nonce, rank] = _owner(path, nonce, rank, ops)
        return owners[nonce, rank]

    files: list[MemoryFile] = []
    with translated("memory", "list", path):
        for name in _names(path, ops):
            inner = os.path.join(path, name)
            lock, slot = _LOCK.fullmatch(name), _SLOT.fullmatch(name)
            snapshot_id = SnapshotId.parse(name)
            if lock:
                owner(lock[1], int(lock[2]))
            elif slot:
                files += _file(inner, int(slot[2]), owner(slot[1], int(slot[2])), None)
            elif snapshot_id is not None:
                for shard in _names(inner, ops):
                    match = _SHARD.fullmatch(shard)
                    if match:
                        file = os.path.join(inner, shard)
                        whose = owner(snapshot_id.nonce, int(match[1]))
                        is_mark = match[2] != "safetensors"
                        files += _file(file, int(match[1]), whose, snapshot_id, is_mark=is_mark)
    return Namespace(os.path.basename(path), path, tuple(files), tuple(owners.values()))


def _names(path: str, ops: FileOps) -> list[str]:
    if os.path.islink(path):
        return []
    try:
        return sorted(ops.list_folder(path))
    except (FileNotFoundError, NotADirectoryError):  # it went meanwhile
        return []


def _file(
    path: str,
    rank: int,
    owner: Owner,
    snapshot_id: SnapshotId | None,
    *,
    is_mark: bool = False,
) -> Iterator[MemoryFile]:
    try:
        nbytes = os.lstat(path).st_blocks * 512
    except OSError:
        return  # it went meanwhile
    yield MemoryFile(path, nbytes, rank, owner, snapshot_id, is_mark)


def _owner(folder: str, nonce: str, rank: int, ops: FileOps) -> Owner:
    """Ask the kernel who holds the lock; nothing is taken."""
    path = lock_path(folder, nonce, rank)
    if ownership.is_held_here(path):
        return Owner(nonce, rank, is_alive=True, pid=os.getpid())
    try:
        fd = ops.open_existing(path)
    except OSError:
        return Owner(nonce, rank, is_alive=False, pid=0)
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(
            fcntl.fcntl(fd, fcntl.F_GETLK, asked.ljust(32, b"\0"))[: _FLOCK.size]
        )
        is_alive = kind != fcntl.F_UNLCK
        return Owner(nonce, rank, is_alive, max(pid, 0) if is_alive else 0)
    except OSError:
        return Owner(nonce, rank, is_alive=True, pid=0)  # in doubt it is not ours to free
    finally:
        os.close(fd)


def clear_namespace(namespace: Namespace, ops: FileOps) -> Cleared:
    """Free the memory that dead runs left in a namespace. A restart cannot use it afterwards.

    What a process holds is left alone, whole: other ranks of its snapshots, too, which it may restore
    from together with them.
    """
    held: list[Owner] = []
    mine: list[Owner] = []
    problems: list[str] = []
    for owner in namespace.owners:
        path = lock_path(namespace.path, owner.nonce, owner.rank)
        try:
            holder = None if owner.is_alive else ownership.acquire(path)
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
            continue
        if owner.is_alive or holder is not None:
            held.append(owner)
        else:
            mine.append(owner)
    alive = {owner.nonce for owner in held}
    nbytes = num_files = 0
    for file in namespace.files:
        if file.owner not in mine or file.owner.nonce in alive:
            continue
        try:
            ops.unlink(file.path)
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{file.path}: {error.strerror}")
            continue
        nbytes += file.nbytes
        num_files += not file.is_mark
    for owner in mine:
        path = lock_path(namespace.path, owner.nonce, owner.rank)
        ownership.release(path, remove=owner.nonce not in alive)
    _remove_empty(namespace, ops)
    return Cleared(nbytes, num_files, tuple(held), tuple(problems))


def _remove_empty(namespace: Namespace, ops: FileOps) -> None:
    """Remove the folders that this emptied; a run that starts meanwhile makes them anew."""
    folders = {os.path.dirname(file.path) for file in namespace.files} - {namespace.path}
    for folder in [*folders, namespace.path]:
        try:
            ops.remove_folder(folder)
        except OSError:
            pass  # not empty, or gone


def other_users(memory_dir: str, ops: FileOps) -> list[str]:
    """Folders of other users, into which nobody else sees.

    Raises:
        TierError: `memory_dir` cannot be read.
    """
    own = os.path.basename(user_folder(memory_dir))
    try:
        names = ops.list_folder(memory_dir)
    except OSError as error:
        raise TierError(
            f"memory: {memory_dir} cannot be read: {error.strerror}",
            tier="memory", key=memory_dir, operation="list",
        ) from error  # fmt: skip
    return sorted(n for n in names if re.fullmatch(r"shardstore-\d+", n) and n != own)
