"""The roots of hosts that share none, as rank 0 sees them: like one root tier (P4, private roots).

Every root holds the files of its ranks, and a register of its own. Together they say:

- **aborted** if one of them does: a snapshot is taken off all lists by the first that is taken off one;
- **committed** if one of them does, and none is aborted: a register is created only when all files on all
  roots are durable. Rank 0's is created last, and a save is told as committed when all are;
- else torn.

Rank 0 asks for everything on other hosts through `Peers`. What cannot be learned is an error, never "no".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from types import TracebackType
from typing import Final

import msgspec

from shardstore.engine.catalog import Catalog
from shardstore.engine.peers import Peers, Question, RootViews, View
from shardstore.engine.steward import close_register, publish_part, view_of
from shardstore.errors import TierError
from shardstore.format.manifest import MANIFEST_NAME, decode_manifest, shard_file_name
from shardstore.format.marks import Mark, mark_file
from shardstore.format.records import Manifest, SnapshotId
from shardstore.tiers.base import Found, RootTier, ShardReader, ShardWriter, Survey

_SCAN_S: Final = 2.0
"""How long a thread goes on with what `list_ids` told it."""
_MAX_PART_NBYTES: Final = 4 << 20
"""Of a header that another host sends."""


class _Scan:
    """What the other roots held when a thread asked for all ids."""

    def __init__(self, overviews: Mapping[int, RootViews]) -> None:
        self.views = {
            rank: {view.id: view for view in overview.views} for rank, overview in overviews.items()
        }
        self.until = time.monotonic() + _SCAN_S


class JointTier:
    """All roots of a run as one RootTier; only on rank 0. Files of other ranks are read by their headers.

    A thread that lists all ids learns with them what every root has of each, in one question, and goes on
    with that for its next reads; anything that it writes ends this.
    """

    def __init__(self, own: RootTier, peers: Peers) -> None:
        """`own` is the root of this host; the others are asked through `peers`."""
        self.own = own
        self.peers = peers
        self.name = own.name
        self.location = own.location
        self.is_shared = own.is_shared
        self.classes = peers.all
        self.keeps_index = False
        self.is_exclusive = own.is_exclusive
        self.is_failing = False
        self._catalog = Catalog(own)
        self._scans = threading.local()

    # -------------------------------------------------------------------- views

    def _overviews(self) -> dict[int, RootViews]:
        values = self.peers.must(Question("overview"))
        return {rank: msgspec.msgpack.decode(v, type=RootViews) for rank, v in values.items()}

    def _views(self, snapshot_id: SnapshotId) -> dict[int, View]:
        """What every other root has of one attempt, by first rank."""
        scan: _Scan | None = getattr(self._scans, "last", None)
        if scan is not None and time.monotonic() < scan.until:
            nothing = View(snapshot_id, "torn")
            return {rank: views.get(snapshot_id, nothing) for rank, views in scan.views.items()}
        return self._look(snapshot_id)

    def _look(self, snapshot_id: SnapshotId) -> dict[int, View]:
        """The same, just now."""
        self._forget()
        values = self.peers.must(Question("look", id=snapshot_id))
        return {rank: msgspec.msgpack.decode(v, type=View) for rank, v in values.items()}

    def _forget(self) -> None:
        self._scans.last = None

    def places(self, snapshot_id: SnapshotId) -> dict[int, tuple[int, ...]]:
        """Whose files are on which root, by its first rank; rank 0's own root is 0."""
        found = {rank: view.ranks for rank, view in self._views(snapshot_id).items()}
        return {0: tuple(self.own.list_ranks(snapshot_id)), **found}

    def is_half_committed(self, snapshot_id: SnapshotId) -> bool:
        """Whether some registers say committed, and the others are still to be created."""
        views = [*self._views(snapshot_id).values(), view_of(self._catalog, snapshot_id)]
        states = {view.state for view in views if view.ranks or view.state != "torn"}
        return states == {"committed", "torn"}

    def list_ids(self) -> list[SnapshotId]:
        """Every attempt that has a folder on any root."""
        own = self.own.list_ids()
        scan = self._scans.last = _Scan(self._overviews())
        return list({*own, *(i for views in scan.views.values() for i in views)})

    def survey(self) -> Survey:
        """Names of what every root has of each attempt."""
        attempts = {}
        for snapshot_id in self.list_ids():
            names = [shard_file_name(rank) for rank in self.list_ranks(snapshot_id)]
            names += [mark_file(mark) for mark in self.marks(snapshot_id)]
            try:
                is_closed = self.read_manifest(snapshot_id) is not None
            except TierError:
                is_closed = True
            if is_closed:
                names.append(MANIFEST_NAME)
            attempts[snapshot_id] = dict.fromkeys(names, Found(-1))
        return Survey(attempts, tuple(name for name, _ in self.own.list_names()))

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
        """See RootTier: there is no index of these."""
        del snapshot_id
        return ""

    def list_ranks(self, snapshot_id: SnapshotId) -> list[int]:
        """Ranks whose shard is on any root."""
        return sorted({rank for ranks in self.places(snapshot_id).values() for rank in ranks})

    # ------------------------------------------------------------------- shards

    def create_shard(self, snapshot_id: SnapshotId, rank: int, nbytes: int) -> ShardWriter:
        """Begin a shard on this host's root."""
        return self.own.create_shard(snapshot_id, rank, nbytes)

    def open_shard(self, snapshot_id: SnapshotId, rank: int) -> ShardReader:
        """Open a shard of this host, or one elsewhere, of which only the header is meant to be read."""
        places = self.places(snapshot_id)
        others = [first for first, ranks in places.items() if first and rank in ranks]
        if rank in places[0] or not others:
            return self.own.open_shard(snapshot_id, rank)
        return _FarReader(self.peers, others[0], snapshot_id, rank)

    def remove_shard(self, snapshot_id: SnapshotId, rank: int) -> None:
        """Remove one from this host's root; every rank does so on its own."""
        self.own.remove_shard(snapshot_id, rank)

    def make_durable(self, snapshot_id: SnapshotId, ranks: Iterable[int]) -> None:
        """Sync the shards on all roots."""
        here = {*self.own.list_ranks(snapshot_id)} & {*ranks}
        if here:
            self.own.make_durable(snapshot_id, sorted(here))
        whom = [first for first, view in self._look(snapshot_id).items() if view.ranks]
        self.peers.must(Question("sync", id=snapshot_id), whom=whom)

    # ----------------------------------------------------------------- register

    def read_manifest(self, snapshot_id: SnapshotId) -> bytes | None:
        """The register that counts: see the beginning of this file."""
        own, views = self.own.read_manifest(snapshot_id), self._views(snapshot_id)
        state = self._catalog.state(snapshot_id) if own is not None else "torn"
        for first, view in views.items():
            if view.state == "aborted" and state != "aborted":
                return self._fetch(first, snapshot_id)
        if state == "aborted":
            return own
        for first, view in views.items():
            if view.state == "damaged":
                host = self.peers.classes[first].host
                raise TierError(
                    f"{self.name}: the manifest of {snapshot_id} on host {host} (rank {first}) cannot be read",
                    tier=self.name, key=MANIFEST_NAME, operation="read",
                )  # fmt: skip
        if own is not None:
            return own
        first = next((rank for rank, view in views.items() if view.state == "committed"), 0)
        return self._fetch(first, snapshot_id) if first else None

    def _fetch(self, first: int, snapshot_id: SnapshotId) -> bytes | None:
        values = self.peers.must(Question("manifest", id=snapshot_id), whom=[first])
        return msgspec.msgpack.decode(values[first], type=bytes | None)

    def create_manifest(
        self,
        snapshot_id: SnapshotId,
        data: bytes,
        *,
        make_folder: bool,
        ranks: Collection[int] = (),
    ) -> bytes | None:
        """Close the registers of all roots: as committed only if that is possible on all of them."""
        self._forget()
        manifest = decode_manifest(data, source=self.location, expect=snapshot_id)
        if manifest.state == "aborted":
            return self._abort(snapshot_id, data, make_folder=make_folder)
        return self._publish(manifest, data, ranks)

    def _publish(self, manifest: Manifest, data: bytes, ranks: Collection[int]) -> bytes | None:
        """The others first, this host's last: until then it can still be aborted."""
        snapshot_id = manifest.id
        views = self._look(snapshot_id)
        own = {*self.own.list_ranks(snapshot_id)}
        if not {*ranks} <= own.union(*(view.ranks for view in views.values())):
            return None
        whom = [first for first, view in views.items() if view.ranks]
        answers = self.peers.must(Question("publish", id=snapshot_id, data=data), whom=whom)
        for answer in answers.values():
            stored = msgspec.msgpack.decode(answer, type=bytes | None)
            if stored is None or not _is_committed(stored, snapshot_id):
                return stored
        return publish_part(self._catalog, manifest) if own else data

    def _abort(self, snapshot_id: SnapshotId, data: bytes, *, make_folder: bool) -> bytes | None:
        """One register that says so is enough; it stays until all do (`remove`)."""
        stored, problem = None, None
        try:
            stored = self.own.create_manifest(snapshot_id, data, make_folder=make_folder)
        except TierError as error:
            problem = error
        if stored is not None and _is_committed(stored, snapshot_id):
            return stored
        answers = self.peers.ask(Question("abort", id=snapshot_id, data=data))
        is_closed = any(not isinstance(answer, TierError) for answer in answers.values())
        if problem is not None and not is_closed:
            raise problem
        return stored if stored is not None else data

    def replace_manifest(self, snapshot_id: SnapshotId, data: bytes) -> None:
        """Take it off the list of every root that has it."""
        views = self._look(snapshot_id)
        is_here = self.own.read_manifest(snapshot_id) is not None
        whom = [first for first, view in views.items() if view.state in ("committed", "damaged")]
        if is_here or not whom:
            self.own.replace_manifest(snapshot_id, data)
        self.peers.must(Question("unlist", id=snapshot_id, data=data), whom=whom)

    def remove(self, snapshot_id: SnapshotId) -> None:
        """Remove it everywhere, once every root says that it is no snapshot."""
        views, own = self._look(snapshot_id), view_of(self._catalog, snapshot_id)
        whom = [first for first, view in views.items() if view.has_folder]
        open_ = [first for first in whom if views[first].state != "aborted"]
        data = self.read_manifest(snapshot_id)
        if data is not None and not _is_committed(data, snapshot_id):
            self.peers.must(Question("abort", id=snapshot_id, data=data), whom=open_)
            if own.has_folder and own.state != "aborted":
                close_register(self._catalog, snapshot_id, data)
        self.peers.must(Question("remove", id=snapshot_id), whom=whom)
        self.own.remove(snapshot_id)

    # --------------------------------------------------------------------- rest

    def remove_deleted(self, name: str) -> None:
        """Remove one of `list_deleted`, wherever it is."""
        self.own.remove_deleted(name)
        self.peers.must(Question("remove deleted", name=name))

    def list_deleted(self) -> list[str]:
        """Names of what an interrupted `remove` left on any root."""
        found = {*self.own.list_deleted()}
        return sorted(found.union(*(o.deleted for o in self._overviews().values())))

    def list_names(self, folder: str = "") -> list[tuple[str, int]]:
        """Names and sizes of what is on any root; this host's where a name is on several."""
        found: dict[str, int] = {}
        for value in self.peers.must(Question("names", folder=folder)).values():
            found |= dict(msgspec.msgpack.decode(value, type=list[tuple[str, int]]))
        return sorted({**found, **dict(self.own.list_names(folder))}.items())

    def read_small(self, name: str) -> bytes | None:
        """A small file of this host's root, else of another."""
        return self._first(self.own.read_small(name), Question("small", name=name))

    def remove_temp(self, folder: str, name: str) -> None:
        """Remove a file that a dead process was writing, wherever it is."""
        self.own.remove_temp(folder, name)
        self.peers.must(Question("remove temp", folder=folder, name=name))

    def marks(self, snapshot_id: SnapshotId) -> frozenset[Mark]:
        """Marks beside a snapshot on any root."""
        views = self._views(snapshot_id)
        return self.own.marks(snapshot_id).union(*(view.marks for view in views.values()))

    def put_mark(self, snapshot_id: SnapshotId, mark: Mark) -> None:
        """Put a mark beside a snapshot on every root that has a part of it."""
        views = self._look(snapshot_id)
        whom = [first for first, view in views.items() if view.has_folder]
        if not whom or view_of(self._catalog, snapshot_id).has_folder:
            self.own.put_mark(snapshot_id, mark)
        self.peers.must(Question("mark", id=snapshot_id, mark=mark), whom=whom)

    def drop_mark(self, snapshot_id: SnapshotId, mark: Mark) -> None:
        """Remove a mark from every root."""
        views = self._look(snapshot_id)
        whom = [first for first, view in views.items() if view.has_folder]
        if not whom or view_of(self._catalog, snapshot_id).has_folder:
            self.own.drop_mark(snapshot_id, mark)
        self.peers.must(Question("unmark", id=snapshot_id, mark=mark), whom=whom)

    def run_numbers(self) -> list[int]:
        """Numbers of all runs that any root knows."""
        found = {*self.own.run_numbers()}
        return sorted(found.union(*(o.runs for o in self._overviews().values())))

    def put_small(self, name: str, data: bytes) -> None:
        """See `register_tag`."""
        self.own.put_small(name, data)

    def remove_small(self, name: str) -> None:
        """See `register_tag`."""
        self.own.remove_small(name)

    def list_unfinished(self) -> list[tuple[SnapshotId, str]]:
        """Of this host's root."""
        return self.own.list_unfinished()

    def check(self) -> None:
        """Make sure that this host's root can be read from."""
        self.own.check()

    def check_writable(self) -> None:
        """Find out whether this host's root could be written to."""
        self.own.check_writable()

    def on_wait(self, waiting: Callable[[], None]) -> None:
        """See RootTier."""
        self.own.on_wait(waiting)

    def close(self) -> None:
        """See RootTier."""
        self.own.close()

    def make_location(self) -> None:
        """Make this host's root."""
        self.own.make_location()

    def claim_run(self, run: int, record: bytes) -> bool:
        """Claim a number on this host's root; the first ranks of the others do so on theirs."""
        return self.own.claim_run(run, record)

    def read_run(self, run: int) -> bytes | None:
        """A run's record on this host's root, else on another."""
        return self._first(self.own.read_run(run), Question("run", rank=run))

    def _first(self, own: bytes | None, question: Question) -> bytes | None:
        if own is not None:
            return own
        values = self.peers.must(question).values()
        found = [msgspec.msgpack.decode(value, type=bytes | None) for value in values]
        return next((data for data in found if data is not None), None)


def _is_committed(data: bytes, snapshot_id: SnapshotId) -> bool:
    return decode_manifest(data, source=MANIFEST_NAME, expect=snapshot_id).state == "committed"


class _FarReader:
    """A shard on another host's root, part by part over the key-value store: for headers."""

    def __init__(self, peers: Peers, first: int, snapshot_id: SnapshotId, rank: int) -> None:
        self._peers, self._first = peers, first
        self._id, self._rank = snapshot_id, rank
        self.tier = "root"
        self.source = f"rank {rank} of {snapshot_id} on host {peers.classes[first].host}"
        self.is_mapped = False
        self.may_differ_again = False
        self.chunk_bytes = _MAX_PART_NBYTES
        self.num_places = 1
        self.nbytes = self._read(0, 8)[0]

    def _read(self, start: int, stop: int) -> tuple[int, bytes]:
        question = Question("read", id=self._id, rank=self._rank, start=start, stop=stop)
        answers = self._peers.must(question, whom=[self._first])
        return msgspec.msgpack.decode(answers[self._first], type=tuple[int, bytes])

    def read(self, start: int, stop: int) -> bytes:
        """See ShardReader."""
        parts = bytearray()
        for at in range(start, stop, _MAX_PART_NBYTES):
            parts += self._read(at, min(stop, at + _MAX_PART_NBYTES))[1]
        return bytes(parts)

    def forget(self) -> None:
        """Nothing is kept."""

    def stream(
        self,
        start: int,
        stop: int,
        place: Callable[[int, int], memoryview],  # noqa: ARG002 - of the protocol
        arrived: Callable[[memoryview, int], None],
    ) -> int:
        """See ShardReader."""
        end = min(stop, self.nbytes)
        for at in range(start, end, _MAX_PART_NBYTES):
            arrived(memoryview(self.read(at, min(end, at + _MAX_PART_NBYTES))), at)
        return end

    def __enter__(self) -> _FarReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass
