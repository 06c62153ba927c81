"""From what was typed to a root: a path, a snapshot's folder or file, or help towards the right one."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import click

from shardstore.cli.foreign import is_near_tier, is_root, looks_like, roots_below
from shardstore.cli.output import note
from shardstore.engine.catalog import Catalog
from shardstore.engine.listing import resolve_root
from shardstore.errors import ShardStoreError
from shardstore.format.records import SnapshotId
from shardstore.tiers.addresses import is_url
from shardstore.tiers.fileops import current_ops
from shardstore.tiers.places import nearest
from shardstore.tiers.roots import open_root

_MAX_NAMES: Final = 4
_PATIENCE_S: Final = 90.0
"""With remote storage: somebody waits at a terminal."""


class PlaceError(click.ClickException):
    """The path is not what the command needs."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Place:
    """A root, and the snapshot in it whose folder was given."""

    root: str
    snapshot: SnapshotId | None = None
    is_empty: bool = False
    """The folder is there, and nothing is in it."""

    @property
    def catalog(self) -> Catalog:
        """Its registers."""
        return open_catalog(self.root)


def open_catalog(root: str) -> Catalog:
    """Registers of a resolved root.

    Raises:
        PlaceError: Nothing can open it.
    """
    try:
        if is_url(root):
            return _open_remote(root)
        return Catalog(open_root(root, current_ops()))
    except (ValueError, ShardStoreError) as error:
        raise PlaceError(str(error)) from None


@lru_cache(maxsize=4)
def _open_remote(root: str) -> Catalog:
    """One client for a command."""
    return Catalog(open_root(root, current_ops(), timeout_s=_PATIENCE_S))


def find_root(text: str, *, may_be_empty: bool = False) -> Place:
    """Find the root that `text` names.

    Args:
        text: A path; that of a snapshot's folder, or of a file in it, names the root around it.
        may_be_empty: An empty folder is fine: nothing was saved yet.

    Raises:
        PlaceError: It is no root; the message says what it is and what may have been meant.
    """
    try:
        path = resolve_root(text)
    except ValueError as error:
        raise PlaceError(str(error)) from None
    assert path is not None
    if is_url(path):
        return _find_remote(path, may_be_empty=may_be_empty)
    if not os.path.lexists(path):
        raise _missing(path)
    given = SnapshotId.parse(os.path.basename(path))
    if given is None and not os.path.isdir(path):
        given = SnapshotId.parse(os.path.basename(os.path.dirname(path)))
        if given is None:
            raise PlaceError(f"{path} is a file. Give the folder that holds the snapshots")
        path = os.path.dirname(path)
    if given is not None:
        root = os.path.dirname(path)
        note(f"{path} is one snapshot: its root is {root}")
        return Place(root, given)
    names = _names(path)
    if is_root(names) and not is_near_tier(path, names):
        _note_no_folders(path)
        return Place(path)
    if not names:
        if may_be_empty:
            note(f"{path} is empty: nothing was saved here yet, or another path was meant")
            return Place(path, is_empty=True)
        raise PlaceError(f"{path} is empty: nothing was saved here yet, or another path was meant")
    raise _foreign(path, names)


def _find_remote(url: str, *, may_be_empty: bool) -> Place:
    """On remote storage there are no folders: what has a name below it is one."""
    root, given = url, None
    for _ in range(2):  # a snapshot's folder, or a file in it
        parent, _, last = root.rpartition("/")
        given = SnapshotId.parse(last)
        if given is not None:
            root = parent
            note(f"{url} is in one snapshot: its root is {root}")
            return Place(root, given)
        if root != url or "." not in last:
            break
        root = parent
    try:
        names = [name for name, _ in open_catalog(url).tier.list_names()]
    except ShardStoreError as error:
        raise PlaceError(str(error)) from None
    if is_root(names):
        return Place(url)
    if names:
        raise _foreign(url, names)
    if may_be_empty:
        note(f"{url} is empty: nothing was saved here yet, or another address was meant")
        return Place(url, is_empty=True)
    raise PlaceError(f"{url} is empty: nothing was saved here yet, or another address was meant")


def _note_no_folders(root: str) -> None:
    """Whoever moved a snapshot away and left a link should hear that no restore follows it."""
    with os.scandir(root) as entries:
        passed_over = [
            entry.path
            for entry in entries
            if SnapshotId.parse(entry.name) is not None and not entry.is_dir(follow_symlinks=False)
        ]
    for path in sorted(passed_over):
        note(f"{path} has a snapshot's name and is no folder: it is passed over, by a restore, too")


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError as error:
        raise PlaceError(
            f"{path} cannot be read: {error.strerror}. Use an account that may, or mount it again"
        ) from None


def _missing(path: str) -> PlaceError:
    found = nearest(path)
    if not os.path.isdir(found):
        return PlaceError(f"{path} does not exist: {found} is a file")
    lines = [f"{path} does not exist. The nearest folder that does is {found}"]
    try:
        names = os.listdir(found)
    except OSError:
        names = []
    if SnapshotId.parse(os.path.basename(path)) is not None and found == os.path.dirname(path):
        lines.append(f"The snapshot was deleted, or never was: see shardstore list {found}")
    missing = os.path.relpath(path, found).split(os.sep)[0]
    similar = difflib.get_close_matches(missing, names, n=_MAX_NAMES, cutoff=0.6)
    meant = [os.path.join(found, name) for name in similar]
    meant += [root for root in roots_below(found, names) if root not in meant]
    if is_root(names) and found not in meant:
        meant.insert(0, found)
    if meant:
        lines.append(f"Did you mean {' or '.join(meant[:_MAX_NAMES])}?")
    return PlaceError("\n".join(lines))


def _foreign(path: str, names: Collection[str]) -> PlaceError:
    kind = looks_like(path, names)
    lines = [f"{path} is not a root of shardstore: it has no snapshots and no records of runs"]
    if kind is not None:
        lines.append(f"It looks like {kind}")
    if os.path.basename(path).startswith("deleted-"):
        lines.append("It is what is left of a deleted snapshot: shardstore gc removes it")
    meant = roots_below(path, names)
    if not meant and is_root(_names_or_none(os.path.dirname(path))):
        meant = [os.path.dirname(path)]
    if meant:
        lines.append(f"Did you mean {' or '.join(meant)}?")
    else:
        shown = sorted(names)[:_MAX_NAMES]
        rest = f" and {len(names) - len(shown)} more" if names and len(names) > len(shown) else ""
        lines.append(f"It holds {', '.join(shown)}{rest}")
    return PlaceError("\n".join(lines))


def _names_or_none(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
