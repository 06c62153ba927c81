"""Copies of snapshots in the tiers of this host: memory, and the disk if it is told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import click

from shardstore.engine.listing import resolve_disk, resolve_name
from shardstore.errors import ShardStoreError
from shardstore.format.gist import Gist, read_gist
from shardstore.format.manifest import shard_file_name
from shardstore.format.records import SnapshotId
from shardstore.format.shardfile import header_length
from shardstore.tiers.disk import DiskTier
from shardstore.tiers.diskshard import DiskReader
from shardstore.tiers.fileops import current_ops
from shardstore.tiers.leftovers import Namespace, read_namespace, user_folder


@dataclass(frozen=True, slots=True)
class Near:
    """What this host has beside the root."""

    memory: Namespace | None
    disk: DiskTier | None
    root: DiskTier

    def ids(self) -> set[SnapshotId]:
        """Snapshots of which some rank has a file here."""
        found = set(self.memory.ids) if self.memory is not None else set()
        return found | (set(self.disk.list_ids()) if self.disk is not None else set())

    def ranks(self, snapshot_id: SnapshotId) -> dict[str, tuple[int, ...]]:
        """Ranks whose files are here, by tier; tiers without any are left out."""
        found: dict[str, tuple[int, ...]] = {}
        if self.memory is not None:
            found["memory"] = self.memory.ranks_of(snapshot_id)
        if self.disk is not None:
            found["disk"] = tuple(self.disk.list_ranks(snapshot_id))
        return {tier: ranks for tier, ranks in found.items() if ranks}

    def gist(self, snapshot_id: SnapshotId) -> Gist | None:
        """What some copy here or on the root says of itself; None if none can be read."""
        for path in self._paths(snapshot_id):
            gist = _gist(path)
            if gist is not None and gist.id == snapshot_id:
                return gist
        return None

    def _paths(self, snapshot_id: SnapshotId) -> Iterator[str]:
        """A copy in each tier, near to far."""
        path = self.memory.shard_path(snapshot_id) if self.memory is not None else None
        if path is not None:
            yield path
        for tier in (self.root,) if self.disk is None else (self.disk, self.root):
            for rank in tier.list_ranks(snapshot_id)[:1]:
                yield os.path.join(tier.location, snapshot_id.name, shard_file_name(rank))


def look_near(root: str, *, memory_dir: str, name: str | None, disk: str | None) -> Near:
    """Find what the store of this root keeps on this host.

    Raises:
        click.UsageError: `name` or `disk` cannot be one.
        TierError: It is there and cannot be read.
    """
    try:
        folder, base = resolve_name(name, root), resolve_disk(disk)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    assert folder is not None
    memory = read_namespace(os.path.join(user_folder(memory_dir), folder), current_ops())
    on_disk = None
    if base is not None:
        location = os.path.join(base, f"shardstore-{os.getuid()}", folder)
        on_disk = DiskTier(location, name="disk", ops=current_ops())
    return Near(memory, on_disk, DiskTier(root, name="root", ops=current_ops()))


def _gist(path: str) -> Gist | None:
    try:
        with DiskReader(current_ops(), "memory", path) as reader:
            length = header_length(reader.read(0, 8), reader.nbytes, source=path)
            return read_gist(reader.read(0, 8 + length), file_nbytes=reader.nbytes)
    except ShardStoreError:
        return None
