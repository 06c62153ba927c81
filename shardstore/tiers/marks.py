"""Put marks beside files, and take them away, durably; again is fine."""

from __future__ import annotations

import os
from collections.abc import Iterable

from shardstore.format.marks import MARKS, Mark, mark_file
from shardstore.tiers.fileops import FileOps


def put_mark(ops: FileOps, path: str, mode: int = 0o666) -> None:
    """Create an empty file unless it is there, and make its name durable.

    Raises:
        OSError: The folder is gone, or cannot be written to.
    """
    try:
        fd = ops.open_new(path, mode)
    except FileExistsError:
        pass
    else:
        try:
            ops.fsync(fd)
        finally:
            os.close(fd)
    ops.fsync_folder(os.path.dirname(path))


def drop_mark(ops: FileOps, path: str) -> None:
    """Remove a mark if it is there, durably.

    Raises:
        OSError: It is there and cannot be removed.
    """
    try:
        ops.unlink(path)
    except FileNotFoundError:
        return
    ops.fsync_folder(os.path.dirname(path))


def marks_among(names: Iterable[str], rank: int | None = None) -> frozenset[Mark]:
    """Marks of a snapshot, or of one rank's copy, among the names in its folder."""
    present = set(names)
    return frozenset(mark for mark in MARKS if mark_file(mark, rank) in present)
