"""The tier between memory and the root: this rank's shard files in a folder of its host."""

from __future__ import annotations

import os
from collections.abc import Iterable

from shardstore.errors import TierError
from shardstore.format.manifest import shard_file_name
from shardstore.format.marks import MARKS, Mark, mark_file
from shardstore.format.records import SnapshotId
from shardstore.tiers.disk import DiskTier
from shardstore.tiers.diskshard import DiskReader, DiskWriter, remove_if_orphan
from shardstore.tiers.fileops import FileOps, translated
from shardstore.tiers.marks import drop_mark, put_mark
from shardstore.tiers.slotfiles import mark_name


class LocalDisk:
    """Sealed files of one rank, in the layout of the root but without registers.

    A file counts by itself: the ranks agree on what is complete, and a mark says so where there is no
    root. Any thread. Nothing is written before the first shard.
    """

    name = "disk"

    def __init__(self, location: str, *, rank: int, ops: FileOps) -> None:
        """`location` is an absolute path, of this store alone; it need not exist yet."""
        self.location = location
        self.rank = rank
        self._tier = DiskTier(location, name=self.name, ops=ops)
        self._ops = ops

    def ids(self) -> list[SnapshotId]:
        """Snapshots of which this rank has a file here, oldest first; one may be unreadable just now."""
        found = [i for i in self._tier.list_ids() if _may_be_there(self._path(i))]
        return sorted(found, key=lambda i: i.order)

    def others(self, ranks: Iterable[int]) -> list[tuple[SnapshotId, int]]:
        """Files of ranks that are not among `ranks`, oldest first."""
        present = set(ranks)
        found = [
            (snapshot_id, rank)
            for snapshot_id in self._tier.list_ids()
            for rank in self._tier.list_ranks(snapshot_id)
            if rank not in present
        ]
        return sorted(found, key=lambda pair: pair[0].order)

    def marked(self) -> list[SnapshotId]:
        """Snapshots that this rank knew to be complete on all ranks; their file may be gone."""
        ids = self._tier.list_ids()
        return [i for i in ids if os.path.exists(self._path(i, mark_name(self.rank)))]

    def with_mark(self, mark: Mark) -> list[SnapshotId]:
        """Snapshots of which this rank has a file here, and a mark beside it."""
        name = mark_file(mark, self.rank)
        return [i for i in self.ids() if os.path.exists(self._path(i, name))]

    def has(self, snapshot_id: SnapshotId, rank: int | None = None) -> bool:
        """Whether the file of this rank, or of another one, is here."""
        name = None if rank is None else shard_file_name(rank)
        return os.path.exists(self._path(snapshot_id, name))

    def has_folder(self, snapshot_id: SnapshotId) -> bool:
        """Whether anything of a snapshot is here: a file of whatever rank, or an empty folder."""
        return os.path.exists(os.path.join(self.location, snapshot_id.name))

    def create_shard(self, snapshot_id: SnapshotId, nbytes: int) -> DiskWriter:
        """Reserve the space of this rank's file under a temp name.

        Raises:
            TierFullError: The disk has no room.
            TierError: It cannot be written to.
        """
        writer = self._tier.create_shard(snapshot_id, self.rank, nbytes)
        writer.own()
        return writer

    def open_shard(self, snapshot_id: SnapshotId) -> DiskReader | None:
        """Open this rank's file; None if there is none.

        Raises:
            TierError: It is there and cannot be opened.
        """
        try:
            return self._tier.open_shard(snapshot_id, self.rank)
        except TierError as error:
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                return None
            raise

    def mark_complete(self, snapshot_id: SnapshotId) -> None:
        """Leave a mark that all ranks have this one on their disks."""
        path = self._path(snapshot_id, mark_name(self.rank))
        with translated(self.name, "mark", path):
            try:
                os.close(self._ops.open_new(path))
            except FileExistsError:
                pass
            self._ops.fsync_folder(os.path.dirname(path))

    def put_mark(self, snapshot_id: SnapshotId, mark: Mark) -> None:
        """Put a mark beside this rank's file, durably; that there is no file is fine.

        Raises:
            TierError: It cannot be written.
        """
        path = self._path(snapshot_id, mark_file(mark, self.rank))
        if self.has(snapshot_id):
            with translated(self.name, "mark", path):
                put_mark(self._ops, path)

    def drop_mark(self, snapshot_id: SnapshotId, mark: Mark) -> None:
        """Remove a mark beside this rank's file, durably; that there is none is fine.

        Raises:
            TierError: It cannot be removed.
        """
        path = self._path(snapshot_id, mark_file(mark, self.rank))
        with translated(self.name, "mark", path):
            drop_mark(self._ops, path)

    def remove(self, snapshot_id: SnapshotId, rank: int | None = None) -> None:
        """Remove this rank's file and marks, or those of a rank that is no longer on this host."""
        rank = self.rank if rank is None else rank
        for name in (mark_name(rank), *(mark_file(mark, rank) for mark in MARKS)):
            try:
                self._ops.unlink(self._path(snapshot_id, name))
            except OSError:
                pass
        self._tier.remove_shard(snapshot_id, rank)

    def remove_orphans(self) -> None:
        """Remove what this rank's dead runs left under temp names."""
        for snapshot_id in self._tier.list_ids():
            remove_if_orphan(self._ops, f"{self._path(snapshot_id)}.tmp")

    def _path(self, snapshot_id: SnapshotId, name: str | None = None) -> str:
        return os.path.join(self.location, snapshot_id.name, name or shard_file_name(self.rank))


def _may_be_there(path: str) -> bool:
    """False only if it is surely not: what cannot be looked at is not taken for absent."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True
