"""Whether the folders that a store is given are what it takes them for."""

from __future__ import annotations

import logging
import os
from typing import Final

from shardstore.errors import TierError
from shardstore.tiers.addresses import is_url
from shardstore.tiers.base import RootTier
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.limits import TMPFS_REMEDY

_LOG: Final = logging.getLogger("shardstore")


def check_root(root: str) -> None:
    """Check that a root is a folder, or can become one. It may be read-only: then it restores.

    Raises:
        TierError: It is a file, or below one.
    """
    found = nearest(root)
    if not os.path.isdir(found):
        raise TierError(
            f"root: {root} cannot be a folder: {found} is a file. Give another root",
            tier="root", key=root, operation="open",
        )  # fmt: skip


def check_remote(tier: RootTier, rank: int) -> None:
    """Check that a remote root can be read from, by the smallest request; writes nothing.

    Whether it can be written to is looked at on rank 0, and only told: a read-only one restores.

    Raises:
        TierError: It never will: credentials, bucket or options are wrong.
    """
    try:
        tier.check()
    except TierError as error:
        if not is_momentary(error):
            raise
        _LOG.warning("rank %d: %s Until it answers, only what is near can be restored", rank, error)
        return
    if rank == 0:
        try:
            tier.check_writable()
        except TierError as error:
            if not is_momentary(error):
                _LOG.warning(
                    "rank %d: %s Snapshots can be restored from there, and saves will fail", rank, error
                )  # fmt: skip


def is_momentary(error: TierError) -> bool:
    """Whether a fault of remote storage may pass by itself."""
    return bool(getattr(error.__cause__, "is_retryable", False))


def doubts_about_root(root: str, memory_dir: str | None, ops: FileOps) -> str | None:
    """Why what is on this root may not be durable; None if nothing speaks against it.

    Args:
        root: Checked by `check_root`.
        memory_dir: Where memory slots are; None if they are in no folder.
        ops: System calls.
    """
    found = nearest(root)
    if not ops.is_memory(found):
        return None
    doubt = (
        f"root={root} is on a tmpfs: what is committed there is gone after a reboot or with the container. "
        "Give a root on a disk or a network file system."
    )
    if memory_dir is not None and os.stat(found).st_dev == os.stat(memory_dir).st_dev:
        doubt += f" It is the tmpfs of memory_dir={memory_dir}, too: every snapshot takes its memory twice."
    return doubt


def check_disk(disk: str, *, memory_dir: str, root: str | None, ops: FileOps) -> None:
    """Refuse a folder that cannot be a tier between memory and the root; makes nothing.

    Raises:
        ValueError: It is a file or in one, is the root, or is memory itself.
        TierError: It cannot be written to.
    """
    found = nearest(disk)
    problem = None
    if not os.path.isdir(found):
        problem = f"cannot be a folder: {found} is a file"
    elif root is not None and not is_url(root) and os.path.realpath(disk) == os.path.realpath(root):
        problem = "is the root: give the root alone, or another folder"
    elif (
        os.path.isdir(memory_dir)
        and os.stat(found).st_dev == os.stat(memory_dir).st_dev
        and ops.is_memory(found)
    ):
        problem = f"is on the tmpfs of memory_dir={memory_dir}: it would take the memory that it is to make room in"
    if problem is not None:
        raise ValueError(f"disk={disk} {problem}. Give a folder on a disk of this host")
    if not os.access(found, os.W_OK | os.X_OK):
        raise TierError(
            f"disk: {found} cannot be written to: mount it writable, or give another disk=",
            tier="disk", key=disk, operation="open",
        )  # fmt: skip


def nearest(path: str) -> str:
    """The path itself, or its nearest parent that exists."""
    while not os.path.lexists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def check_memory_dir(memory_dir: str, ops: FileOps) -> None:
    """Check that files in `memory_dir` are memory.

    On another file system a mapped page may have no block when it is written to, and the process would
    end by a signal instead of an error.

    Raises:
        TierError: It is a file or below one; or (operation "open") it is missing, read-only, or not on a
            tmpfs, which a job with a root can do without.
    """
    problem, operation = None, "open"
    found = nearest(memory_dir)
    if not os.path.isdir(found):
        problem, operation = f"cannot be a folder: {found} is a file", "check"
    elif found != memory_dir:
        problem = "does not exist"
    elif not ops.is_memory(memory_dir):
        problem = "is not on a tmpfs"
    elif os.statvfs(memory_dir).f_flag & os.ST_RDONLY:
        problem = "is read-only"
    elif not os.access(memory_dir, os.W_OK | os.X_OK):
        problem = "cannot be written to by this user"
    if problem is not None:
        raise TierError(
            f"memory: memory_dir={memory_dir} {problem}: give the folder of a tmpfs with room for the "
            f"memory tier, /dev/shm as a rule. {TMPFS_REMEDY}",
            tier="memory", key=memory_dir, operation=operation,
        )  # fmt: skip
