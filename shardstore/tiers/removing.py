"""Remove attempts from a folder: our files only, bytes before the register, never a foreign name."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Callable, Iterable
from typing import Final

from shardstore.format.manifest import MANIFEST_NAME
from shardstore.format.marks import MARKS, mark_file
from shardstore.format.records import SnapshotId
from shardstore.tiers.fileops import FileOps

_SHARD: Final = re.compile(r"rank-([0-9]{5}|[1-9][0-9]{5,})\.safetensors")
_MANIFEST_TEMP: Final = re.compile(rf"\.{re.escape(MANIFEST_NAME)}\.[0-9a-f]{{8}}\.tmp")
_RUN_TEMP: Final = re.compile(r"\.run-[0-9a-f]{8}\.json\.[0-9a-f]{8}\.tmp|\.probe-[0-9a-f]{16}")
_DELETED: Final = "deleted-"
_AGAIN: Final = re.compile(r"\.[0-9a-f]{8}")
KEEP_CLOSED_S: Final = 24 * 3600.0
"""How long object stores keep the register of an attempt that was removed: no slower process commits it then."""
_NOT_EMPTY: Final = (errno.ENOTEMPTY, errno.EEXIST)


def is_temp(name: str) -> bool:
    """Whether it is a file that one of us was writing inside an attempt's folder."""
    if _MANIFEST_TEMP.fullmatch(name):
        return True
    return name.endswith(".tmp") and bool(_SHARD.fullmatch(name.removesuffix(".tmp")))


def is_run_temp(name: str) -> bool:
    """Whether it is a run record that was being written to the root, or what a run tried storage with."""
    return bool(_RUN_TEMP.fullmatch(name))


def is_ours(name: str) -> bool:
    """Whether a name inside an attempt's folder is one that a store gives."""
    known = name == MANIFEST_NAME or name in {mark_file(mark) for mark in MARKS}
    return known or bool(_SHARD.fullmatch(name)) or is_temp(name)


def deleted_id(name: str) -> SnapshotId | None:
    """Whose attempt a folder was that `remove_attempt` renamed; None if it is no such name."""
    if not name.startswith(_DELETED):
        return None
    bare = name.removeprefix(_DELETED)
    found = SnapshotId.parse(bare)
    if found is None and _AGAIN.fullmatch(bare[-9:]):
        found = SnapshotId.parse(bare[:-9])
    return found


def renamed_folders(location: str, names: Iterable[str]) -> list[str]:
    """Paths of folders, not links, that were renamed away to be removed."""
    paths = [os.path.join(location, name) for name in names if deleted_id(name) is not None]
    return [path for path in paths if os.path.isdir(path) and not os.path.islink(path)]


def remove_attempt(ops: FileOps, folder: str) -> None:
    """Remove the files of an attempt whose register says `aborted`, the register last.

    The folder is renamed to `deleted-<id>` in between, so that whatever happens, what is left is
    either closed by its register or under a name that is no snapshot's.

    Raises:
        OSError: Something is left; again goes on from there.
    """
    try:
        names = ops.list_folder(folder)
    except FileNotFoundError:
        return
    # Whoever closed the register may have died before that was durable: not a byte goes before.
    ops.fsync_folder(folder)
    _for_all(
        (os.path.join(folder, name) for name in names if name != MANIFEST_NAME and is_ours(name)),
        lambda path: _unlink_if_there(ops, path),
    )
    location, name = os.path.split(folder)
    away = os.path.join(location, _DELETED + name)
    try:
        ops.rename(folder, away)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in _NOT_EMPTY:
            raise
        # An earlier removal left something foreign there; its folder came back with a late abort.
        away = f"{away}.{secrets.token_hex(4)}"
        ops.rename(folder, away)
    ops.fsync_folder(location)
    remove_renamed(ops, away)


def remove_renamed(ops: FileOps, away: str) -> None:
    """Remove our files in a renamed folder, and the folder unless something foreign is in it.

    Raises:
        OSError: Something of ours is left.
    """
    try:
        names = ops.list_folder(away)
    except FileNotFoundError:
        return
    _for_all(
        (os.path.join(away, name) for name in names if is_ours(name)),
        lambda path: _unlink_if_there(ops, path),
    )
    try:
        ops.remove_folder(away)
    except FileNotFoundError:
        pass
    except OSError as error:
        # Something foreign is inside; or something of ours that a slower process still put there.
        foreign = any(not is_ours(name) for name in names)
        if error.errno not in _NOT_EMPTY or not foreign:
            raise


def _for_all(paths: Iterable[str], act: Callable[[str], None]) -> None:
    """Try every one: what cannot be removed must not keep the space of the others."""
    first: OSError | None = None
    for path in paths:
        try:
            act(path)
        except OSError as error:
            first = first or error
    if first is not None:
        raise first


def _unlink_if_there(ops: FileOps, path: str) -> None:
    try:
        ops.unlink(path)
    except FileNotFoundError:
        pass
