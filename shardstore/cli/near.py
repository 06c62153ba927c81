"""Copies of snapshots in the tiers of this host: memory, and the disk if it is told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import click

from shardstore.cli.places import open_catalog
from shardstore.engine.listing import resolve_disk, resolve_name
from shardstore.errors import ShardStoreError
from shardstore.format.gist import Gist, read_gist
from shardstore.format.records import SnapshotId
from shardstore.format.shardfile import header_length
from shardstore.tiers.base import RootTier, ShardReader
from shardstore.tiers.disk import DiskTier
from shardstore.tiers.diskshard import DiskReader
from shardstore.tiers.fileops import current_ops
from shardstore.tiers.leftovers import Namespace, read_namespace, user_folder


@dataclass(frozen=True, slots=True)
class Near:
    """What this host has beside the root."""

    memory: Namespace | None
    disk: DiskTier | None
    root: RootTier

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
        for open_reader in self._copies(snapshot_id):
            gist = _gist(open_reader)
            if gist is not None and gist.id == snapshot_id:
                return gist
        return None

    def _copies(self, snapshot_id: SnapshotId) -> Iterator[Callable[[], ShardReader]]:
        """A copy in each tier, near to far."""
        path = self.memory.shard_path(snapshot_id) if self.memory is not None else None
        if path is not None:
            yield partial(DiskReader, current_ops(), "memory", path)
        tiers: list[RootTier] = [self.root] if self.disk is None else [self.disk, self.root]
        for tier in tiers:
            for rank in tier.list_ranks(snapshot_id)[:1]:
                yield partial(tier.open_shard, snapshot_id, rank)


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
    return Near(memory, on_disk, open_catalog(root).tier)


def _gist(open_reader: Callable[[], ShardReader]) -> Gist | None:
    try:
        with open_reader() as reader:
            length = header_length(reader.read(0, 8), reader.nbytes, source=reader.source)
            return read_gist(reader.read(0, 8 + length), file_nbytes=reader.nbytes)
    except ShardStoreError:
        return None
