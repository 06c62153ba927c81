"""What can be restored, and where: no torch, so that listing costs nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import msgspec
import xxhash

from shardstore.engine.arguments import check_path
from shardstore.engine.catalog import Catalog
from shardstore.errors import shown
from shardstore.format.records import SnapshotId
from shardstore.format.register import Register
from shardstore.tiers.addresses import is_url, resolve_address
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.roots import open_root

if TYPE_CHECKING:
    from shardstore.engine.session import Session

_MAX_NAME: Final = 200
_SCHEME: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://")


class SnapshotInfo(msgspec.Struct, frozen=True):
    """A snapshot that can be restored."""

    step: int
    id: str
    """Whole identity; unequal for two saves of one step."""
    tiers: tuple[str, ...]
    """Where it is, near to far: `memory`, `disk`, `root`."""
    nbytes: int
    """Bytes of all ranks; of this rank alone where there is no manifest."""
    created: float
    """Seconds since the epoch."""
    pinned: bool
    """Retention never deletes it."""
    metadata: object
    here: tuple[int, ...] | None = None
    """Where hosts share no root: ranks whose files are on this one. None: all."""


def resolve_root(root: str | os.PathLike[str] | None) -> str | None:
    """Absolute path or URL of a root.

    Raises:
        ValueError: Neither, empty, or not to be told from another place.
    """
    return None if root is None else resolve_address(check_path(root, what="root"))


def resolve_disk(disk: str | os.PathLike[str] | None) -> str | None:
    """Absolute path of the folder between memory and the root.

    Raises:
        ValueError: Empty, or no local path.
    """
    if disk is None:
        return None
    try:
        text: str | bytes = os.fspath(disk)
    except TypeError:
        text = b""
    if not text or isinstance(text, bytes) or _SCHEME.match(text):
        raise ValueError(f"disk must be a path on a disk of this host or None, got {disk!r}")
    return os.path.abspath(os.path.expanduser(text))


def resolve_name(name: object, root: str | None) -> str | None:
    """Folder name of the memory namespace; None for anonymous memory (neither name nor root)."""
    if name is None:
        if root is None:
            return None
        place = root if is_url(root) else os.path.realpath(root)
        return xxhash.xxh3_64_hexdigest(place.encode())
    if not isinstance(name, str) or not name:
        raise ValueError(f"name must be a non-empty string, got {shown(name)}")
    try:
        safe = quote(name, safe=" +=@,")
    except UnicodeEncodeError:
        raise ValueError(f"name must be text that UTF-8 can hold, got {shown(name)}") from None
    if safe in (".", "..") or len(safe) > _MAX_NAME:
        safe = "name-" + xxhash.xxh3_128_hexdigest(name.encode())
    return safe


def info_of(manifest: Register, tiers: tuple[str, ...], *, pinned: bool) -> SnapshotInfo:
    """Describe a committed snapshot."""
    return SnapshotInfo(
        step=manifest.step,
        id=manifest.id.name,
        tiers=tiers,
        nbytes=manifest.nbytes,
        created=manifest.created,
        pinned=pinned,
        metadata=manifest.metadata,
        here=None if manifest.here is msgspec.UNSET else manifest.here,
    )


def list_session(session: Session) -> list[SnapshotInfo]:
    """Restorable snapshots as this rank knows them, oldest first; asks no other rank."""
    near: dict[SnapshotId, tuple[str, ...]] = dict.fromkeys(session.memory.ids(), ("memory",))
    for snapshot_id in session.on_disk.disk.ids() if session.on_disk is not None else ():
        near[snapshot_id] = (*near.get(snapshot_id, ()), "disk")
    with session.lock:
        found = {
            i: msgspec.structs.replace(info, tiers=near[i], pinned=i in session.pinned)
            for i, info in session.complete.items()
            if i in near
        }
    catalog = session.own_catalog
    if catalog is not None:
        overview = catalog.overview()
        for snapshot_id in overview.names.keys() & found.keys():
            # What a restore would pass over is not listed, whole as the memory copy may be.
            if overview.state(snapshot_id) in ("aborted", "damaged"):
                del found[snapshot_id]
        for manifest in overview.committed():
            tiers = near.get(manifest.id, ()) if manifest.id in found else ()
            pinned = manifest.id in session.pinned or "pinned" in overview.marks(manifest.id)
            found[manifest.id] = info_of(manifest, (*tiers, "root"), pinned=pinned)
    return [found[i] for i in sorted(found, key=lambda i: i.order)]


def list_snapshots(
    root: str | os.PathLike[str], *, storage_options: Mapping[str, object] | None = None
) -> list[SnapshotInfo]:
    """Committed snapshots in a root, oldest first. Read-only; needs no store, ranks or torch.

    Args:
        root: Path or URL.
        storage_options: For the client of remote storage.

    Raises:
        ValueError: `root` is neither.
        TierError: It cannot be read.
    """
    resolved = resolve_root(root)
    if resolved is None:
        raise ValueError("root must be a path or a URL")
    catalog = Catalog(open_root(resolved, FileOps(), storage_options=storage_options))
    overview = catalog.overview()
    return [
        info_of(manifest, ("root",), pinned="pinned" in overview.marks(manifest.id))
        for manifest in overview.committed()
    ]
