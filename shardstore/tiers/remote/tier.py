"""The root on remote storage: unique keys, no rename, no folders; the manifest is put last (P4)."""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from shardstore.errors import TierError
from shardstore.format.manifest import (
    MANIFEST_NAME,
    MANIFEST_OPENING,
    MAX_MANIFEST_NBYTES,
    shard_file_name,
)
from shardstore.format.marks import Mark, mark_file
from shardstore.format.records import SnapshotId
from shardstore.format.register import read_register
from shardstore.tiers.base import Found, Survey
from shardstore.tiers.marks import marks_among
from shardstore.tiers.remote.faults import Fault
from shardstore.tiers.remote.objects import Entry, Listing
from shardstore.tiers.remote.reader import RemoteReader
from shardstore.tiers.remote.records import Records
from shardstore.tiers.remote.requests import Requests
from shardstore.tiers.remote.writer import RemoteWriter
from shardstore.tiers.removing import KEEP_CLOSED_S, is_ours, is_run_temp, is_temp

_LOG: Final = logging.getLogger("shardstore")
T = TypeVar("T")

_RUN: Final = re.compile(r"run-([0-9a-f]{8})\.json")
_SHARD: Final = re.compile(r"rank-([0-9]{5}|[1-9][0-9]{5,})\.safetensors")
_MAX_RECORD_NBYTES: Final = 8 << 20
_VISIBLE_S: Final = 30.0
"""How long an object that was written may be invisible to others."""
_LOOK_AGAIN_S: Final = 0.2


class RemoteTier:
    """A folder of objects that holds one sub-folder per snapshot attempt (layout: docs/format.md).

    Safe to call from several threads and from every rank. Nothing is written before the first shard
    or run record.
    """

    keeps_index = True
    is_shared: bool | None = True

    def __init__(
        self,
        requests: Requests,
        *,
        name: str = "root",
        keep_closed_s: float = KEEP_CLOSED_S,
        visible_s: float = _VISIBLE_S,
    ) -> None:
        """Nothing is asked yet.

        Args:
            requests: Of the store.
            name: Of the tier.
            keep_closed_s: How long the register of an attempt that was removed stays: no slower process
                can commit it then.
            visible_s: How long to look for what must be there.
        """
        self.name = name
        self.location = requests.store.location
        self.is_exclusive: bool | None = None
        self._requests = requests
        self._store = requests.store
        self._records = Records(requests, name=name)
        self.keep_closed_s = keep_closed_s
        self._closed: set[SnapshotId] = set()
        """What was closed here and is removed next: its register is new."""
        self._visible_s = visible_s
        self._pause = threading.Event()

    def _run(self, operation: str, key: str, request: Callable[[], T], **options: bool) -> T:
        return self._requests.run(operation, key, request, **options)

    def on_wait(self, waiting: Callable[[], None]) -> None:
        """Call `waiting` whenever bytes move, or a request waits for another attempt."""
        self._requests.waiting = waiting

    @property
    def is_failing(self) -> bool:
        """Whether storage has not answered for a while."""
        return self._requests.is_failing

    def close(self) -> None:
        """Nothing is tried again from now on; connections are given up."""
        self._requests.leave()
        self._pause.set()
        try:
            self._store.close()
        except Exception as error:  # noqa: BLE001 - whoever leaves has other worries
            _LOG.debug("%s: closing %s failed: %s", self.name, self.location, error)

    def check(self) -> None:
        """Make sure that the server, the credentials and the bucket are good; reads only.

        Raises:
            TierError: They are not, or that cannot be found out now.
        """
        self._run("open", "", self._store.check)

    def check_writable(self) -> None:
        """Find out whether a write would be refused, as far as can be told without leaving anything.

        Raises:
            TierError: It would.
        """
        self._run("write to", "", self._store.check_writable)

    # ----------------------------------------------------------------- listing

    def _listing(self, prefix: str, *, is_flat: bool = False, is_behind: bool = False) -> Listing:
        return self._run(
            "list",
            prefix,
            lambda: self._store.listing(prefix, is_flat=is_flat),
            is_behind=is_behind,
        )

    def _names(self, snapshot_id: SnapshotId, *, is_behind: bool = False) -> dict[str, Entry]:
        prefix = f"{snapshot_id.name}/"
        objects = self._listing(prefix, is_behind=is_behind).objects
        return {key.removeprefix(prefix): entry for key, entry in objects.items()}

    def list_ids(self) -> list[SnapshotId]:
        """Every attempt that has an object here."""
        found = (SnapshotId.parse(name) for name in self._listing("").folders)
        return [snapshot_id for snapshot_id in found if snapshot_id is not None]

    def survey(self) -> Survey:
        """See RootTier: one listing of everything."""
        attempts: dict[SnapshotId, dict[str, Found]] = {}
        names = []
        for key, entry in self._run("list", "", self._look_at_all).objects.items():
            folder, slash, name = key.partition("/")
            snapshot_id = SnapshotId.parse(folder) if slash else None
            if not slash:
                names.append(key)
            elif snapshot_id is not None and "/" not in name:
                attempts.setdefault(snapshot_id, {})[name] = Found(entry.nbytes, entry.tag)
        return Survey(attempts, tuple(names))

    def _look_at_all(self) -> Listing:
        found = self._store.listing("", is_flat=True)
        if not found.objects and self._store.entry(_run_key(1)) is not None:
            # Nothing was ever saved here, says this; nobody may begin anew because of it.
            raise Fault("broken", f"the listing is empty, and {_run_key(1)} is there")
        return found

    def list_ranks(self, snapshot_id: SnapshotId) -> list[int]:
        """Ranks whose shard is here, sorted."""
        return _ranks_among(self._names(snapshot_id))

    def list_names(self, folder: str = "") -> list[tuple[str, int]]:
        """See RootTier."""
        prefix = f"{folder}/" if folder else ""
        listing = self._listing(prefix)
        found = [(key.removeprefix(prefix), e.nbytes) for key, e in listing.objects.items()]
        return found + [(key.removeprefix(prefix), 0) for key in listing.folders]

    # ------------------------------------------------------------------ shards

    def create_shard(self, snapshot_id: SnapshotId, rank: int, nbytes: int) -> RemoteWriter:
        """Begin one shard; nothing is sent yet."""
        return RemoteWriter(self._requests, _shard_key(snapshot_id, rank), nbytes)

    def open_shard(self, snapshot_id: SnapshotId, rank: int) -> RemoteReader:
        """Open one shard."""
        key = _shard_key(snapshot_id, rank)

        def look() -> Entry:
            entry = self._store.entry(key)
            if entry is None:
                self._records.check_unlisted(key)
                raise FileNotFoundError(f"there is no object {key}")
            return entry

        entry = self._run("open", key, look)
        return RemoteReader(self._requests, self.name, key, entry.nbytes)

    def probe_writer(self, key: str, nbytes: int) -> RemoteWriter:
        """A shard's writer for any object in the root itself: to try out how storage works."""
        return RemoteWriter(self._requests, key, nbytes)

    def probe_reader(self, key: str, nbytes: int) -> RemoteReader:
        """The same for reading."""
        return RemoteReader(self._requests, self.name, key, nbytes)

    def make_durable(self, snapshot_id: SnapshotId, ranks: Iterable[int]) -> None:
        """What can be seen on an object store is durable; that it can be seen is checked."""
        for rank in ranks:
            self.open_shard(snapshot_id, rank)

    def remove_shard(self, snapshot_id: SnapshotId, rank: int) -> None:
        """Remove what this rank left of an attempt that failed; what cannot be removed now is left to gc."""
        key = _shard_key(snapshot_id, rank)
        try:
            self._delete([key, f"{key}.tmp"], key)
        except TierError:
            pass

    def _delete(self, keys: Collection[str], about: str) -> None:
        if keys:
            self._run("delete", about, lambda: self._store.delete(sorted(keys)), changes=True)

    # ---------------------------------------------------------------- register

    def read_manifest(self, snapshot_id: SnapshotId) -> bytes | None:
        """Content of the register, None while it does not exist."""
        key = f"{snapshot_id.name}/{MANIFEST_NAME}"
        return self._records.read(key, MAX_MANIFEST_NBYTES, MANIFEST_OPENING)

    def read_manifests(
        self, ids: Collection[SnapshotId]
    ) -> dict[SnapshotId, bytes | TierError | None]:
        """See RootTier: several at a time."""

        def read(snapshot_id: SnapshotId) -> bytes | TierError | None:
            try:
                return self.read_manifest(snapshot_id)
            except TierError as error:
                return error

        if not ids:
            return {}
        with ThreadPoolExecutor(min(len(ids), self._store.num_parallel)) as pool:
            return dict(zip(ids, pool.map(read, ids), strict=True))

    def register_tag(self, snapshot_id: SnapshotId) -> str:
        """See RootTier."""
        key = f"{snapshot_id.name}/{MANIFEST_NAME}"
        entry = self._run("look at", key, lambda: self._store.entry(key))
        return "" if entry is None else entry.tag

    def create_manifest(
        self,
        snapshot_id: SnapshotId,
        data: bytes,
        *,
        make_folder: bool,
        ranks: Collection[int] = (),
    ) -> bytes | None:
        """See RootTier. `ranks` may map ranks to the sizes that their shards must have."""
        if not make_folder and not self._has_shards(snapshot_id, ranks):
            return self.read_manifest(snapshot_id)
        return self._create(f"{snapshot_id.name}/{MANIFEST_NAME}", data, "publish")

    def _has_shards(self, snapshot_id: SnapshotId, ranks: Collection[int]) -> bool:
        """Whether the shards of a commit are there. What was written may take a while to be seen."""
        deadline = time.monotonic() + self._visible_s
        while True:
            names = self._names(snapshot_id, is_behind=True)
            missing = {*ranks} - {*_ranks_among(names)}
            if not missing and names:
                break
            if MANIFEST_NAME in names or time.monotonic() >= deadline:
                return False
            if self._pause.wait(_LOOK_AGAIN_S):
                return False
            self._requests.waiting()
        if isinstance(ranks, Mapping):
            for rank, nbytes in ranks.items():
                found = names[shard_file_name(rank)].nbytes
                if found != nbytes:
                    where = self._requests.where(_shard_key(snapshot_id, rank))
                    raise TierError(
                        f"{self.name}: {where} has {found:,} bytes, {nbytes:,} were written",
                        tier=self.name, key=where, operation="publish",
                    )  # fmt: skip
        return True

    def _create(self, key: str, data: bytes, operation: str) -> bytes:
        return self._records.create(key, data, operation, is_exclusive=self.is_exclusive)

    def replace_manifest(self, snapshot_id: SnapshotId, data: bytes) -> None:
        """Replace the register by one put."""
        key = f"{snapshot_id.name}/{MANIFEST_NAME}"
        self._run("replace", key, lambda: self._store.put(key, data), changes=True)
        self._closed.add(snapshot_id)

    def remove(self, snapshot_id: SnapshotId) -> None:
        """Remove our objects of an aborted attempt; its register stays for a day."""
        names = self._names(snapshot_id)
        ours = [name for name in names if is_ours(name) and name != MANIFEST_NAME]
        self._delete([f"{snapshot_id.name}/{name}" for name in ours], snapshot_id.name)
        if MANIFEST_NAME in names and self._is_old(snapshot_id):
            self._delete([f"{snapshot_id.name}/{MANIFEST_NAME}"], snapshot_id.name)

    def _is_old(self, snapshot_id: SnapshotId) -> bool:
        if self.keep_closed_s <= 0:
            return True
        if snapshot_id in self._closed:
            self._closed.discard(snapshot_id)
            return False
        data = self.read_manifest(snapshot_id)
        register = None if data is None else read_register(data, expect=snapshot_id)
        return register is not None and time.time() - register.created > self.keep_closed_s

    def list_deleted(self) -> list[str]:
        """There are none: nothing is renamed."""
        return []

    def remove_deleted(self, name: str) -> None:
        """See `list_deleted`."""
        raise ValueError(f"{name}: nothing is renamed on remote storage")

    # ------------------------------------------------------- what the dead left

    def list_unfinished(self) -> list[tuple[SnapshotId, str]]:
        """See RootTier: uploads in parts that nobody sees, and that cost space."""
        found = set()
        for upload in self._run("list uploads", "", self._store.unfinished):
            folder, _, name = upload.key.partition("/")
            snapshot_id = SnapshotId.parse(folder)
            if snapshot_id is not None and _SHARD.fullmatch(name.removesuffix(".tmp")):
                found.add((snapshot_id, f"{name.removesuffix('.tmp')}.tmp"))
        return sorted(found, key=lambda one: (one[0].order, one[1]))

    def remove_temp(self, folder: str, name: str) -> None:
        """See RootTier; `name` may be one of `list_unfinished`."""
        key = f"{folder}/{name}" if folder else name
        if not (is_temp(name) if folder else is_run_temp(name)):
            raise ValueError(f"{key} is not the name of a file that is being written")
        target = key.removesuffix(".tmp")
        for upload in self._run("list uploads", key, self._store.unfinished):
            if upload.key in (target, key):
                abort = partial(self._store.abort_unfinished, upload)
                self._run("abort", key, abort, changes=True)
        self._delete([key], key)

    # ------------------------------------------------------------------- marks

    def marks(self, snapshot_id: SnapshotId) -> frozenset[Mark]:
        """Marks beside a snapshot."""
        return marks_among(self._names(snapshot_id))

    def put_mark(self, snapshot_id: SnapshotId, mark: Mark) -> None:
        """Put a mark beside a snapshot."""
        key = f"{snapshot_id.name}/{mark_file(mark)}"
        self._run("mark", key, lambda: self._store.put(key, b""), changes=True)

    def drop_mark(self, snapshot_id: SnapshotId, mark: Mark) -> None:
        """Remove a mark; that it is not there is fine."""
        key = f"{snapshot_id.name}/{mark_file(mark)}"
        self._delete([key], key)

    # -------------------------------------------------------------------- runs

    def run_numbers(self) -> list[int]:
        """Numbers of all claimed runs."""
        names = self._listing("").objects
        return [int(match[1], 16) for name in names if (match := _RUN.fullmatch(name))]

    def make_location(self) -> None:
        """Nothing has to be made; whether exclusive create is honoured is found out once."""
        if self.is_exclusive is not None:
            return
        key = f".probe-{secrets.token_hex(8)}"
        data = b"shardstore asks whether this is created only once\n"
        self._run("write", key, lambda: self._store.put(key, data), changes=True, is_behind=True)
        try:
            is_new = self._run(
                "write", key, lambda: self._store.create(key, data), changes=True, is_behind=True
            )
            self.is_exclusive = self._store.may_be_exclusive and not is_new
        finally:
            try:
                self._delete([key], key)
            except TierError as error:
                # Some buckets allow no removal: they can be saved to all the same.
                _LOG.warning("%s That small object stays, and so will old snapshots", error)

    def claim_run(self, run: int, record: bytes) -> bool:
        """Create `run-XXXXXXXX.json`; False if another job has that number."""
        return self._create(_run_key(run), record, "claim") == record

    def read_run(self, run: int) -> bytes | None:
        """A run's record, None if it cannot be seen."""
        return self._records.read(_run_key(run), _MAX_RECORD_NBYTES)

    def read_small(self, name: str) -> bytes | None:
        """See RootTier."""
        return self._records.read(name, _MAX_RECORD_NBYTES)

    def put_small(self, name: str, data: bytes) -> None:
        """See RootTier."""
        self._run("write", name, lambda: self._store.put(name, data), changes=True)

    def remove_small(self, name: str) -> None:
        """See RootTier."""
        self._delete([name], name)


def _ranks_among(names: Iterable[str]) -> list[int]:
    return sorted(int(match[1]) for name in names if (match := _SHARD.fullmatch(name)))


def _shard_key(snapshot_id: SnapshotId, rank: int) -> str:
    return f"{snapshot_id.name}/{shard_file_name(rank)}"


def _run_key(run: int) -> str:
    return f"run-{run:08x}.json"
