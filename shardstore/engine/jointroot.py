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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from shardstore.engine.catalog import Catalog
from shardstore.engine.farshard import FarShard
from shardstore.engine.peers import Peers, Question, View
from shardstore.engine.steward import close_register, publish_part, view_of
from shardstore.errors import TierError
from shardstore.format.manifest import MANIFEST_NAME, decode_manifest
from shardstore.format.marks import Mark
from shardstore.format.records import Manifest, SnapshotId
from shardstore.tiers.base import Found, RootTier, ShardReader, ShardWriter, Survey

_SCAN_S: Final = 2.0
"""How long a thread goes on with what `list_ids` told it."""


class _Scan:
    """What the other roots held when a thread asked for all of it."""

    def __init__(self, found: Mapping[int, Sequence[View]]) -> None:
        self.views = {rank: {view.id: view for view in views} for rank, views in found.items()}
        self.until = time.monotonic() + _SCAN_S

    @property
    def ids(self) -> set[SnapshotId]:
        return {i for views in self.views.values() for i in views}

    def of(self, snapshot_id: SnapshotId) -> dict[int, View]:
        nothing = View(snapshot_id, "torn")
        return {rank: views.get(snapshot_id, nothing) for rank, views in self.views.items()}


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
        self.keep_closed_s = own.keep_closed_s
        self.is_exclusive = own.is_exclusive
        self.is_failing = False
        self._catalog = Catalog(own)
        self._scans = threading.local()

    # -------------------------------------------------------------------- views

    def _scan(self) -> _Scan:
        """What every other root has of all attempts, just now."""
        values = self.peers.must(Question("overview"))
        found = {r: msgspec.msgpack.decode(v, type=tuple[View, ...]) for r, v in values.items()}
        self._scans.last = scan = _Scan(found)
        return scan

    def _last_scan(self) -> _Scan | None:
        scan: _Scan | None = getattr(self._scans, "last", None)
        return scan if scan is not None and time.monotonic() < scan.until else None

    def _views(self, snapshot_id: SnapshotId) -> dict[int, View]:
        """What every other root has of one attempt, by first rank."""
        scan = self._last_scan()
        return self._look(snapshot_id) if scan is None else scan.of(snapshot_id)

    def _look(self, snapshot_id: SnapshotId) -> dict[int, View]:
        """The same, just now."""
        self._forget()
        values = self.peers.must(Question("look", id=snapshot_id))
        return {rank: msgspec.msgpack.decode(v, type=View) for rank, v in values.items()}

    def _forget(self) -> None:
        self._scans.last = None

    def places(self, snapshot_id: SnapshotId) -> dict[int, tuple[int, ...]]:
        """Whose files are on which root, by its first rank; rank 0's own root is 0."""
        found = {rank: tuple(view.ranks) for rank, view in self._views(snapshot_id).items()}
        return {0: tuple(self.own.list_ranks(snapshot_id)), **found}

    def is_half_committed(self, snapshot_id: SnapshotId) -> bool:
        """Whether some registers say committed, and the others are still to be created."""
        views = [*self._views(snapshot_id).values(), view_of(self._catalog, snapshot_id)]
        states = {view.state for view in views if view.ranks or view.state != "torn"}
        return states == {"committed", "torn"}

    def list_ids(self) -> list[SnapshotId]:
        """Every attempt that has a folder on any root."""
        return list({*self.own.list_ids(), *self._scan().ids})

    def survey(self) -> Survey:
        """Names of what every root has of each attempt: one look at each. Of the root itself, this host's."""
        own, scan = self.own.survey(), self._scan()
        attempts = {}
        for snapshot_id in {*own.attempts, *scan.ids}:
            names = {*own.attempts.get(snapshot_id, ())}
            for view in scan.of(snapshot_id).values():
                names.update(view.names)
            attempts[snapshot_id] = dict.fromkeys(names, Found(-1))
        return Survey(attempts, own.names)

    def read_manifests(
        self, ids: Collection[SnapshotId]
    ) -> dict[SnapshotId, bytes | TierError | None]:
        """See RootTier; the others are asked once for all."""
        found: dict[SnapshotId, bytes | TierError | None] = {}
        scan = self._last_scan() or self._scan()
        for snapshot_id in ids:
            try:
                found[snapshot_id] = self._read_manifest(snapshot_id, scan.of(snapshot_id))
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
        return FarShard(self.peers, others[0], snapshot_id, rank)

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
        return self._read_manifest(snapshot_id, self._views(snapshot_id))

    def _read_manifest(self, snapshot_id: SnapshotId, views: Mapping[int, View]) -> bytes | None:
        own = self.own.read_manifest(snapshot_id)
        state = self._catalog.state_of(snapshot_id, own)
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
        listed = {*own}
        for answer in answers.values():
            stored = msgspec.msgpack.decode(answer, type=bytes | None)
            if stored is None:
                return None
            theirs = decode_manifest(stored, source=MANIFEST_NAME, expect=snapshot_id)
            if theirs.state != "committed":
                return stored
            listed |= {*theirs.ranks_here}
        if not {*ranks} <= listed:
            return None  # a file went since they were looked for
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
        values = self.peers.must(Question("deleted")).values()
        found = (msgspec.msgpack.decode(value, type=list[str]) for value in values)
        return sorted({*self.own.list_deleted()}.union(*found))

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
        """Marks beside a snapshot on any root, just now."""
        views = self._look(snapshot_id)
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
        values = self.peers.must(Question("runs")).values()
        found = (msgspec.msgpack.decode(value, type=list[int]) for value in values)
        return sorted({*self.own.run_numbers()}.union(*found))

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
