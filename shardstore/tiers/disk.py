"""Shard files on a local or shared POSIX file system: temp file, fsync, rename, fsync of the folders."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Collection, Iterable
from typing import Final

from shardstore.errors import TierError
from shardstore.format.manifest import (
    MANIFEST_NAME,
    MANIFEST_OPENING,
    MAX_MANIFEST_NBYTES,
    shard_file_name,
)
from shardstore.format.marks import Mark, mark_file
from shardstore.format.records import SnapshotId
from shardstore.tiers.base import Found, Survey
from shardstore.tiers.diskshard import DiskReader, DiskWriter
from shardstore.tiers.fileops import FileOps, make_folders, translated
from shardstore.tiers.marks import drop_mark, marks_among, put_mark
from shardstore.tiers.removing import (
    deleted_id,
    is_run_temp,
    is_temp,
    remove_attempt,
    remove_renamed,
    renamed_folders,
)

_RUN: Final = re.compile(r"run-([0-9a-f]{8})\.json")
_SHARD: Final = re.compile(r"rank-([0-9]{5}|[1-9][0-9]{5,})\.safetensors")
_PEEK_NBYTES: Final = 1 << 16
_MAX_RUN_NBYTES: Final = 1 << 16


class DiskTier:
    """A folder that holds one sub-folder per snapshot attempt (layout: docs/format.md).

    Safe to call from several threads and from every rank; nothing is written before the first `put`
    or `claim_run`, so that a read-only folder can be restored from. File modes follow the umask.
    """

    keeps_index = False
    keep_closed_s = 0.0
    is_shared: bool | None = None
    is_exclusive: bool | None = True
    is_failing = False

    def __init__(self, location: str, *, name: str, ops: FileOps) -> None:
        """`location` is an absolute path; it need not exist yet."""
        self.location = location
        self.name = name
        self._ops = ops

    def _folder(self, snapshot_id: SnapshotId) -> str:
        return os.path.join(self.location, snapshot_id.name)

    def _names(self, path: str, operation: str) -> list[str]:
        """Names in a folder, none if there is no folder."""
        with translated(self.name, operation, path):
            try:
                return self._ops.list_folder(path)
            except FileNotFoundError:
                return []

    def list_ids(self) -> list[SnapshotId]:
        """Every attempt that has a folder here; foreign names, links and files are passed over."""
        return self._ids_among(self._names(self.location, "list"))

    def _ids_among(self, names: Iterable[str]) -> list[SnapshotId]:
        found = (SnapshotId.parse(name) for name in names)
        return [i for i in found if i is not None and self._may_be_folder(self._folder(i))]

    @staticmethod
    def _may_be_folder(path: str) -> bool:
        """False only if it is surely none: what cannot be looked at is not taken for absent."""
        try:
            return stat.S_ISDIR(os.lstat(path).st_mode)
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def survey(self) -> Survey:
        """See RootTier; sizes are not looked at. A folder that cannot be listed seems empty."""
        attempts: dict[SnapshotId, dict[str, Found]] = {}
        names = self._names(self.location, "list")
        for snapshot_id in self._ids_among(names):
            try:
                found = self._names(self._folder(snapshot_id), "list")
            except TierError:
                found = []
            attempts[snapshot_id] = dict.fromkeys(found, Found(-1))
        return Survey(attempts, tuple(names))

    def list_ranks(self, snapshot_id: SnapshotId) -> list[int]:
        """Ranks whose shard is here, sorted."""
        names = self._names(self._folder(snapshot_id), "list")
        return sorted(int(match[1]) for name in names if (match := _SHARD.fullmatch(name)))

    # ------------------------------------------------------------------ shards

    def create_shard(self, snapshot_id: SnapshotId, rank: int, nbytes: int) -> DiskWriter:
        """Reserve the space of one shard under a temp name."""
        folder = self._folder(snapshot_id)
        target = os.path.join(folder, shard_file_name(rank))
        with translated(self.name, "write", target, needed_bytes=nbytes):
            self._make_attempt_folder(folder)
            return DiskWriter(self._ops, self.name, target, nbytes)

    def _make_attempt_folder(self, folder: str) -> None:
        self._make_location()
        try:
            self._ops.make_folder(folder)
        except FileExistsError:
            pass
        # Another rank may have made the folder and not yet synced its name.
        self._ops.fsync_folder(self.location)

    def _make_location(self) -> None:
        """Make the root folder, and make the names of all that had to be made durable."""
        for made in make_folders(self._ops, self.location):
            self._ops.fsync_folder(os.path.dirname(made))

    def _discard(self, path: str) -> None:
        try:
            self._ops.unlink(path)
        except OSError:
            pass

    def open_shard(self, snapshot_id: SnapshotId, rank: int) -> DiskReader:
        """Open one rank's shard file."""
        path = os.path.join(self._folder(snapshot_id), shard_file_name(rank))
        return DiskReader(self._ops, self.name, path)

    def make_durable(self, snapshot_id: SnapshotId, ranks: Iterable[int]) -> None:
        """Sync the shards of `ranks`, the folder and its parent."""
        folder = self._folder(snapshot_id)
        for rank in ranks:
            path = os.path.join(folder, shard_file_name(rank))
            with translated(self.name, "sync", path):
                fd = self._ops.open_existing(path)
                try:
                    self._ops.fsync(fd)
                finally:
                    os.close(fd)
        with translated(self.name, "sync", folder):
            self._ops.fsync_folder(folder)
            self._ops.fsync_folder(self.location)

    def remove_shard(self, snapshot_id: SnapshotId, rank: int) -> None:
        """Remove one rank's files of a failed attempt, and the folder if that emptied it."""
        folder = self._folder(snapshot_id)
        for name in (shard_file_name(rank), f"{shard_file_name(rank)}.tmp"):
            self._discard(os.path.join(folder, name))
        try:
            self._ops.remove_folder(folder)
        except OSError:
            pass  # other ranks' files or the register are still there

    # ---------------------------------------------------------------- register

    def read_manifest(self, snapshot_id: SnapshotId) -> bytes | None:
        """Content of the register, None while it does not exist."""
        path = os.path.join(self._folder(snapshot_id), MANIFEST_NAME)
        return self._read_small(path, MAX_MANIFEST_NBYTES, opening=MANIFEST_OPENING)

    def read_manifests(
        self, ids: Collection[SnapshotId]
    ) -> dict[SnapshotId, bytes | TierError | None]:
        """See RootTier."""
        found: dict[SnapshotId, bytes | TierError | None] = {}
        for snapshot_id in ids:
            try:
                found[snapshot_id] = self.read_manifest(snapshot_id)
            except TierError as error:
                found[snapshot_id] = error
        return found

    def register_tag(self, snapshot_id: SnapshotId) -> str:
        """See RootTier: files have nothing that always differs."""
        del snapshot_id
        return ""

    def _read_small(self, path: str, limit: int, *, opening: bytes = b"") -> bytes | None:
        """Content of a record, None if there is none; its beginning where that is not `opening`."""
        with translated(self.name, "read", path):
            try:
                fd = self._ops.open_existing(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            try:
                size = os.fstat(fd).st_size
                if size > limit:
                    raise OSError(errno.EFBIG, f"{size:,} bytes, no record has more than {limit:,}")
                if size > _PEEK_NBYTES:  # something else is not worth the memory
                    beginning = self._read(fd, _PEEK_NBYTES)
                    if not beginning.startswith(opening):
                        return beginning
                return self._read(fd, size)
            finally:
                os.close(fd)

    def _read(self, fd: int, nbytes: int) -> bytes:
        buffer = memoryview(bytearray(nbytes))
        return bytes(buffer[: self._ops.read_at(fd, buffer, 0)])

    def create_manifest(
        self,
        snapshot_id: SnapshotId,
        data: bytes,
        *,
        make_folder: bool,
        ranks: Collection[int] = (),
    ) -> bytes | None:
        """Create the register exclusively; returns what it holds afterwards.

        Args:
            snapshot_id: Whose register.
            data: Its content.
            make_folder: For an abort. A commit never makes the folder: if it is gone, the attempt was
                aborted and removed, and None is returned.
            ranks: For a commit: whose shards must be in the same folder. Where one is missing, the attempt
                was aborted, removed, and its folder made anew by a rank that was late.
        """
        folder = self._folder(snapshot_id)
        path = os.path.join(folder, MANIFEST_NAME)
        if make_folder:
            with translated(self.name, "publish", path, needed_bytes=len(data)):
                self._make_attempt_folder(folder)
        try:
            # The temp file is in that folder before they are looked for, and linked within it after:
            # whoever renames the folder away in between takes the temp file along.
            created = self._create_exclusively(
                path, data, may_create=lambda: {*ranks} <= {*self.list_ranks(snapshot_id)}
            )
        except TierError as error:
            if isinstance(error.__cause__, FileNotFoundError) and not make_folder:
                return None
            raise
        stored = self.read_manifest(snapshot_id)
        if stored is None and not created and not make_folder:
            return None
        if stored is None:
            raise TierError(
                f"{self.name}: {path} vanished right after it was created: another process deletes here",
                tier=self.name, key=path, operation="publish",
            )  # fmt: skip
        return stored

    def _create_exclusively(
        self, path: str, data: bytes, *, may_create: Callable[[], bool] = lambda: True
    ) -> bool:
        """Link a synced temp file to `path`; False if that name is taken, or it may not be created."""
        folder = os.path.dirname(path)
        temp = os.path.join(folder, f".{os.path.basename(path)}.{secrets.token_hex(4)}.tmp")
        with translated(self.name, "publish", path, needed_bytes=len(data)):
            self._write_synced(temp, data)
            try:
                created = may_create()
                if created:
                    self._ops.link(temp, path)
            except FileExistsError:
                created = False
            except OSError:
                # In doubt (an error after the link was made): the register itself is the answer.
                created = False
                if self._read_small(path, MAX_MANIFEST_NBYTES) is None:
                    raise
            finally:
                self._discard(temp)
            self._ops.fsync_folder(folder)
            self._ops.fsync_folder(os.path.dirname(folder))
        return created

    def _write_synced(self, path: str, data: bytes) -> None:
        fd = self._ops.open_new(path)
        try:
            self._ops.write_at(fd, memoryview(data), 0)
            self._ops.fsync(fd)
        except BaseException:
            self._discard(path)
            raise
        finally:
            os.close(fd)

    def replace_manifest(self, snapshot_id: SnapshotId, data: bytes) -> None:
        """Replace the register by one rename."""
        self._replace(os.path.join(self._folder(snapshot_id), MANIFEST_NAME), data, "replace")

    def _replace(self, path: str, data: bytes, operation: str) -> None:
        """Create or replace a small file, atomically and durably, in a folder that is there."""
        folder, name = os.path.split(path)
        temp = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.tmp")
        with translated(self.name, operation, path, needed_bytes=len(data)):
            self._write_synced(temp, data)
            try:
                self._ops.rename(temp, path)
            except BaseException:
                self._discard(temp)
                raise
            self._ops.fsync_folder(folder)

    def remove(self, snapshot_id: SnapshotId) -> None:
        """Remove our files of an aborted attempt, then rename the folder away and remove it.

        A name that is not ours keeps the renamed folder in place: nothing foreign is deleted.
        """
        folder = self._folder(snapshot_id)
        with translated(self.name, "delete", folder):
            remove_attempt(self._ops, folder)

    def remove_deleted(self, name: str) -> None:
        """Remove what is left in a folder that was renamed away, as after a crash in `remove`."""
        if deleted_id(name) is None:
            raise ValueError(f"{name} is not the name of a folder that is being removed")
        away = os.path.join(self.location, name)
        with translated(self.name, "delete", away):
            remove_renamed(self._ops, away)

    def list_deleted(self) -> list[str]:
        """Names of the folders that an unfinished `remove` renamed away."""
        paths = renamed_folders(self.location, self._names(self.location, "list"))
        return [os.path.basename(path) for path in paths]

    def list_names(self, folder: str = "") -> list[tuple[str, int]]:
        """Names, and sizes in bytes, of all that is in the root or in one of its folders.

        Args:
            folder: A name in the root; empty for the root itself. That it is gone is fine.
        """
        path = os.path.join(self.location, folder)
        found = []
        for name in self._names(path, "list"):
            try:
                found.append((name, os.lstat(os.path.join(path, name)).st_size))
            except OSError:
                continue  # it went meanwhile
        return found

    def read_small(self, name: str) -> bytes | None:
        """A small file in the root itself, None if it is not there."""
        return self._read_small(os.path.join(self.location, name), _MAX_RUN_NBYTES)

    def put_small(self, name: str, data: bytes) -> None:
        """See RootTier."""
        self.make_location()
        self._replace(os.path.join(self.location, name), data, "write")

    def remove_small(self, name: str) -> None:
        """See RootTier."""
        path = os.path.join(self.location, name)
        with translated(self.name, "delete", path):
            drop_mark(self._ops, path)

    def list_unfinished(self) -> list[tuple[SnapshotId, str]]:
        """None: whatever is begun here has a name."""
        return []

    def check(self) -> None:
        """See RootTier."""
        self.list_ids()

    def check_writable(self) -> None:
        """Nothing is known before a write."""

    def on_wait(self, waiting: Callable[[], None]) -> None:
        """It waits for nothing."""

    def close(self) -> None:
        """It waits for nothing."""

    def remove_temp(self, folder: str, name: str) -> None:
        """Remove a file that a dead process was writing; `folder` as in `list_names`."""
        path = os.path.join(self.location, folder, name)
        if not (is_temp(name) if folder else is_run_temp(name)):
            raise ValueError(f"{path} is not the name of a file that is being written")
        with translated(self.name, "delete", path):
            drop_mark(self._ops, path)

    # ------------------------------------------------------------------- marks

    def marks(self, snapshot_id: SnapshotId) -> frozenset[Mark]:
        """Marks beside a snapshot."""
        return marks_among(self._names(self._folder(snapshot_id), "list"))

    def put_mark(self, snapshot_id: SnapshotId, mark: Mark) -> None:
        """Put a mark beside a snapshot whose folder is there, durably."""
        path = os.path.join(self._folder(snapshot_id), mark_file(mark))
        with translated(self.name, "mark", path):
            put_mark(self._ops, path)

    def drop_mark(self, snapshot_id: SnapshotId, mark: Mark) -> None:
        """Remove a mark, durably; that it is not there is fine."""
        path = os.path.join(self._folder(snapshot_id), mark_file(mark))
        with translated(self.name, "mark", path):
            drop_mark(self._ops, path)

    # -------------------------------------------------------------------- runs

    def run_numbers(self) -> list[int]:
        """Numbers of all claimed runs."""
        names = self._names(self.location, "list")
        return [int(match[1], 16) for name in names if (match := _RUN.fullmatch(name))]

    def make_location(self) -> None:
        """Make the folder itself, durably, unless it is there."""
        with translated(self.name, "create", self.location):
            self._make_location()

    def claim_run(self, run: int, record: bytes) -> bool:
        """Create `run-XXXXXXXX.json` exclusively; False if another job has that number."""
        return self._create_exclusively(self._run_path(run), record)

    def read_run(self, run: int) -> bytes | None:
        """A run's record, None if it is not visible from this host."""
        return self._read_small(self._run_path(run), _MAX_RUN_NBYTES)

    def _run_path(self, run: int) -> str:
        return os.path.join(self.location, f"run-{run:08x}.json")
