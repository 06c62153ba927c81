"""What this rank has on its host's disk, between memory and the root: what is readable, and what may go."""

from __future__ import annotations

import threading
from collections.abc import Collection

from shardstore.engine.catalog import Catalog
from shardstore.engine.sealed import read_prefix
from shardstore.errors import CorruptSnapshotError, FormatError, FormatVersionError, TierError
from shardstore.format.gist import Gist, read_gist
from shardstore.format.header import is_header_whole
from shardstore.format.records import SnapshotId
from shardstore.tiers.base import ShardReader
from shardstore.tiers.localdisk import LocalDisk


class OnDisk:
    """Knows this rank's files by their headers, each read once. Any thread."""

    def __init__(self, disk: LocalDisk, *, local_ranks: tuple[int, ...]) -> None:
        """Nothing is read yet. `local_ranks`: of this host, whose lowest looks after what others left."""
        self.disk = disk
        self._local_ranks = local_ranks
        self._lock = threading.Lock()
        self._gists: dict[SnapshotId, Gist | None] = {}
        """None: it was read, and is damaged or not ours."""
        self._stubborn: set[SnapshotId] = set()
        """Of these a file or the folder was still there after it was removed."""

    def gists(self, step: int | None = None) -> dict[SnapshotId, Gist]:
        """Readable snapshots here (at one step), oldest first."""
        found = {}
        for snapshot_id in self.disk.ids():
            if step is None or snapshot_id.step == step:
                gist = self._gist(snapshot_id)
                if gist is not None:
                    found[snapshot_id] = gist
        return found

    def unread(self) -> list[SnapshotId]:
        """Files of which nothing is known: a fault that may pass, or another version wrote them."""
        found = self.disk.ids()
        return [i for i in found if self._gist(i) is None and not self._is_useless(i)]

    def _is_useless(self, snapshot_id: SnapshotId) -> bool:
        """Whether this rank's file was read, and is no shard that anybody can use."""
        with self._lock:
            return snapshot_id in self._gists and self._gists[snapshot_id] is None

    def _gist(self, snapshot_id: SnapshotId) -> Gist | None:
        with self._lock:
            if snapshot_id in self._gists:
                return self._gists[snapshot_id]
        try:
            gist = self._read(snapshot_id)
        except (TierError, FormatVersionError):
            return None  # for now
        with self._lock:
            return self._gists.setdefault(snapshot_id, gist)

    def _read(self, snapshot_id: SnapshotId) -> Gist | None:
        try:
            reader = self.disk.open_shard(snapshot_id)
            if reader is None:
                return None
            with reader:
                gist = _gist_of(reader)
        except FormatVersionError:
            raise
        except (CorruptSnapshotError, FormatError):
            return None
        ours = gist is not None and gist.id == snapshot_id and gist.rank == self.disk.rank
        return gist if ours else None

    def is_kept(self, snapshot_id: SnapshotId) -> bool:
        """Whether this rank's file was saved with persist=False."""
        gist = self._gist(snapshot_id) if self.disk.has(snapshot_id) else None
        return gist is not None and not gist.persist

    def remove(self, snapshot_id: SnapshotId, *, for_good: bool = True) -> None:
        """Drop this rank's file, and what could not be dropped the last time.

        Args:
            snapshot_id: Whose file.
            for_good: It will not be written again: a removal that fails is tried again.
        """
        with self._lock:
            self._gists.pop(snapshot_id, None)
            to_remove = {snapshot_id, *self._stubborn}
        for leaving in to_remove:
            self.disk.remove(leaving)
        with self._lock:
            self._stubborn -= to_remove
            if not for_good:
                to_remove.discard(snapshot_id)
            self._stubborn |= {i for i in to_remove if self.disk.has_folder(i)}

    def make_room(self, catalog: Catalog) -> bool:
        """Give up one file that nobody needs here: aborted, or committed on the root, oldest first.

        Returns:
            False if there is none, or none of them can be removed.

        Raises:
            TierError: The root cannot be read.
        """
        for snapshot_id in self.disk.ids():
            if _is_spare(catalog, snapshot_id, self.disk.rank):
                self.remove(snapshot_id)
                if not self.disk.has(snapshot_id):
                    return True
        if self.disk.rank == min(self._local_ranks):
            for snapshot_id, rank in self.disk.others(self._local_ranks):
                if _is_spare(catalog, snapshot_id, rank):
                    self.disk.remove(snapshot_id, rank)
                    if not self.disk.has(snapshot_id, rank):
                        return True
        return False

    def clear_leftovers(
        self,
        catalog: Catalog | None,
        *,
        newest: SnapshotId | None,
        whole: set[SnapshotId],
        unread: Collection[SnapshotId],
        world_size: int,
    ) -> None:
        """Remove what earlier runs left that no restart of this topology can use.

        Args:
            catalog: Of the root.
            newest: What all ranks agreed to protect.
            whole: Every rank can read these near it.
            unread: Of these some rank could not say: they may be whole, and nobody gives up its part.
            world_size: Of this job; files of another one are left alone.

        Raises:
            ShardStoreError: The root cannot be read.
        """
        self.disk.remove_orphans()
        for snapshot_id in self.disk.ids():
            on_root = catalog.state(snapshot_id) if catalog is not None else "torn"
            gist = self._gist(snapshot_id)
            other_job = gist is not None and gist.world_size != world_size
            # What the root says of a damaged one may be readable again tomorrow.
            is_listed = on_root in ("committed", "damaged")
            in_use = snapshot_id in whole or is_listed or other_job
            newer = newest is None or snapshot_id.order >= newest.order
            is_useless = self._is_useless(snapshot_id) and on_root != "committed"
            is_unclear = snapshot_id in unread or (gist is None and not is_useless)
            if on_root == "aborted" or is_useless or not (in_use or newer or is_unclear):
                self.remove(snapshot_id)


def _is_spare(catalog: Catalog, snapshot_id: SnapshotId, rank: int) -> bool:
    state = catalog.state(snapshot_id)
    has_file = state == "committed" and rank in catalog.tier.list_ranks(snapshot_id)
    return has_file or state == "aborted"


def _gist_of(reader: ShardReader) -> Gist | None:
    prefix = read_prefix(reader)
    gist = read_gist(prefix, file_nbytes=reader.nbytes)
    if gist is None and is_header_whole(prefix):
        raise FormatVersionError(f"{reader.source}: another version of shardstore wrote it")
    return gist
