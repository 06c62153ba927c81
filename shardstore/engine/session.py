"""What the parts of the engine share: one rank's tiers, its coordinator, and the joint facts it knows."""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from shardstore.cluster.coordination import Coordinator
from shardstore.cluster.preemption import Grace
from shardstore.engine.catalog import Catalog
from shardstore.engine.listing import SnapshotInfo
from shardstore.engine.liveness import RootClass
from shardstore.engine.ondisk import OnDisk
from shardstore.engine.progress import ProgressReporter
from shardstore.engine.retention import Keep, plan_deletions
from shardstore.engine.sealed import SealedShard
from shardstore.engine.stats import Meter
from shardstore.engine.transitions import of_memory
from shardstore.engine.urgency import Urgency
from shardstore.errors import TierError
from shardstore.format.records import ShardHeader, SnapshotId, TensorRow
from shardstore.format.shardfile import ShardLayout
from shardstore.tiers.base import ShardWriter
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.memory import MemoryTier
from shardstore.tiers.places import is_momentary
from shardstore.tiers.slots import Slot

if TYPE_CHECKING:
    from shardstore.engine.commit import Outcome
    from shardstore.engine.rootfile import SharedForm
    from shardstore.engine.steward import Steward
    from shardstore.engine.streaming import Streamed
    from shardstore.state.overlap import LateCopy

_LOG: Final = logging.getLogger("shardstore")


class Failure(msgspec.Struct, frozen=True):
    """Why a save or a phase failed, as one rank tells the others."""

    rank: int
    cause: str
    """Type and text of the first cause."""
    failed_ranks: tuple[int, ...] = ()
    is_outage: bool = False
    """The root did not answer for so long: this may pass, and what is near is whole."""
    is_skip: bool = False
    """No failure: a rank had no memory free, and on_full="skip" says to leave this save out."""

    def describe(self) -> str:
        """One line for messages."""
        return f"rank {self.rank}: {self.cause}"


class Completion(msgspec.Struct, frozen=True):
    """Whether all ranks have sealed a save, equal on all ranks."""

    failure: Failure | None = None
    """None: they have."""
    in_memory: bool = True
    """Every rank's copy is in memory, so that a restore need not wait for the root."""
    diverged_ranks: tuple[int, ...] = ()
    """Those whose replicas have other bytes than they, so that each stores its own."""


def failure_of(error: BaseException, rank: int) -> Failure:
    """Describe an exception of this rank."""
    ranks = getattr(error, "failed_ranks", ()) or getattr(error, "missing_ranks", ()) or (rank,)
    is_outage = isinstance(error, TierError) and is_momentary(error)
    return Failure(rank, f"{type(error).__name__}: {error}", tuple(ranks), is_outage)


@dataclass(frozen=True, slots=True)
class Target:
    """A tier beyond memory, as this rank writes to it."""

    tier: str
    create: Callable[[SnapshotId, int], ShardWriter]
    """Begins this rank's file of a snapshot, of so many bytes. Raises TierError."""


@dataclass(eq=False, slots=True)
class PendingSave:
    """One save on its way from `save` to its outcome. Filled by one stage after the other."""

    count: int
    step: int
    persist: bool
    created: float
    metadata: object = None
    header: ShardHeader | None = None
    layout: ShardLayout | None = None
    slot: Slot | None = None
    started: float = field(default_factory=time.monotonic)
    streamed: Streamed | None = None
    """This rank's file on the root, where memory had no room for the state."""
    late: LateCopy | None = None
    """What is still to be copied of live memory; None once it is, or if all was copied at once."""
    number: Future[int] | None = None
    """Somebody waits for the run's number before this save can go on."""
    id: SnapshotId | None = None
    raised: Failure | None = None
    """What `save` itself raised on this rank."""
    broken: Failure | None = None
    """Why this save ends here, though `save` raised nothing: like a failure in the background."""
    shards: dict[int, SealedShard] | None = None
    """All ranks' headers, on rank 0, once all have sealed."""
    is_sealed: bool = False
    """This rank's part is sealed and posted; settled once `sealed` is set."""
    watches: list[Future[Any]] = field(default_factory=list)
    """What this rank still looks out for; cancelled with the outcome."""
    completion: Completion | None = None
    """Whether all ranks sealed it."""
    joint: threading.Event = field(default_factory=threading.Event)
    """`completion` is known here, or never will be."""
    form: SharedForm | None = None
    """What of this rank's file the root gets, where replicas store the rest of it."""
    shared_header: bytes | None = None
    """The header of that, once this rank has sealed."""
    is_shared: bool = False
    """That is what this rank has written to the root."""
    diverged: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Groups of ranks that should be replicas and are not, on rank 0."""
    shared_ranks: frozenset[int] = frozenset()
    """Ranks whose file on the root is such a one; on rank 0, once all are durable."""
    committing: threading.Lock = field(default_factory=threading.Lock)
    outcome: Outcome | None = None
    """On rank 0, once it was decided; under `committing`."""
    spill_turn: threading.Lock = field(default_factory=threading.Lock)
    """Taken, and never given back, by who writes it to the tier after memory."""
    pass_turn: threading.Lock = field(default_factory=threading.Lock)
    """The same for who writes it from the disk to the root."""
    is_on_disk: bool = False
    """This rank's file is on its disk, and may be passed on to the root."""
    written_bytes: int = 0
    """Of this rank's file, on the way to the root; told by who writes."""
    counting: threading.Lock = field(default_factory=threading.Lock)
    held_s: float = 0.0
    """How long its writing gave way to that of a newer one."""
    seconds: dict[str, float] = field(default_factory=dict)
    """When this rank came to each transition, since the call of `save`."""
    staged: Future[None] = field(default_factory=Future)
    committed: Future[SnapshotInfo | None] = field(default_factory=Future)
    sealed: threading.Event = field(default_factory=threading.Event)
    """This rank's part is sealed, or never will be."""
    spilled: threading.Event = field(default_factory=threading.Event)
    """This rank's spill is over, or was not needed."""
    settled: threading.Event = field(default_factory=threading.Event)
    """The outcome is known and what it entails (retention, cleaning up) is done here."""

    def count_written(self, num_bytes: int) -> None:
        """So many bytes more are on their way to the root. From any thread."""
        with self.counting:
            self.written_bytes += num_bytes

    @property
    def label(self) -> str:
        """Name for messages and phases."""
        return f"save of step {self.step}"

    @property
    def nbytes(self) -> int:
        """Of this rank's file; 0 before it is laid out."""
        return self.layout.nbytes if self.layout is not None else 0

    @property
    def root_nbytes(self) -> int:
        """Of what this rank writes to the outermost tier, if its replicas are equal."""
        return self.form.layout.nbytes if self.form is not None else self.nbytes


@dataclass(eq=False)
class Session:
    """One rank's side of a store, between construction and close."""

    coordinator: Coordinator
    memory: MemoryTier
    catalog: Catalog | None
    on_disk: OnDisk | None
    keep: Keep | None
    timeout_s: float
    writer: dict[str, str]
    nonce: str
    shared: bool | None = None
    """Whether all hosts see one root, as the caller says; None: it is found out."""
    is_one_folder: bool = False
    """Every rank saw the same folder when the store was opened: equal on all ranks."""
    classes: tuple[RootClass, ...] = ()
    """Where hosts share no root: who shares one. Equal on all ranks; empty: all see one, or there is none.
    On rank 0 the catalog is then of all roots, elsewhere of this host's."""
    steward: Steward | None = None
    """On the first rank of another root than rank 0's: answers for it."""
    ops: FileOps = field(default_factory=FileOps)
    """System calls; here for the named points of protocols."""
    shares_replicas: bool = False
    """On the root, replicas store in turn what they have in common."""
    host: str = field(default_factory=platform.node)
    boot_id: str = ""
    highest_adopted_run: int = 0
    local_ranks: tuple[int, ...] = (0,)
    lock: threading.RLock = field(default_factory=threading.RLock)
    complete: dict[SnapshotId, SnapshotInfo] = field(default_factory=dict)
    """Snapshots that every rank is known to have had in memory, or on disk."""
    marked: set[SnapshotId] = field(default_factory=set)
    on_disks: set[SnapshotId] = field(default_factory=set)
    """Those that every rank is known to have had on its disk, where that is the outermost tier."""
    aborted: set[SnapshotId] = field(default_factory=set)
    damaged: set[SnapshotId] = field(default_factory=set)
    """Snapshots that some rank could not read; equal on all ranks."""
    unmarked: set[SnapshotId] = field(default_factory=set)
    """Those whose bytes were wrong, and that have no mark yet that says so."""
    pinned: set[SnapshotId] = field(default_factory=set)
    """Pinned near the ranks, in memory or on disks; equal on all ranks. Pins on the root are there."""
    run: int = 0
    """Number of this run, once it is agreed."""
    other_runs: set[int] = field(default_factory=set)
    """Earlier runs that were alive at the first save of this one: other jobs on the same root."""
    held: set[SnapshotId] = field(default_factory=set)
    """On rank 0: what any rank had in memory or on its disk at the first save."""
    tables: dict[str, tuple[TensorRow, ...]] = field(default_factory=dict)
    """Tensor tables by digest, on rank 0."""
    adopted_world_sizes: dict[SnapshotId, int] = field(default_factory=dict)
    has_noted_versions: bool = False
    retention_lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while registers are changed by retention or delete; never while another rank is waited for."""
    meter: Meter = field(default_factory=Meter)
    told: set[str] = field(default_factory=set)
    """Topics of warnings that come once."""
    progress: ProgressReporter = field(default_factory=ProgressReporter)
    is_restoring: bool = False
    """Nothing is released: every snapshot may be a candidate (P5)."""
    released_meanwhile: list[SnapshotId] = field(default_factory=list)
    has_only_near: bool = False
    """An earlier run left snapshots that all ranks have, and that are not further out: equal on all ranks."""
    urgency: Urgency = field(default_factory=Urgency)
    grace: Grace | None = None
    """Of the last `guard_preemption`."""
    is_stopping: bool = False
    """`should_stop` has said so, on all ranks."""

    own_catalog: Catalog | None = field(init=False)
    """Of the root that this host sees, whatever others there are."""

    def __post_init__(self) -> None:
        """Nobody waits for memory beyond a grace period."""
        self.memory.in_time = self.in_time
        self.own_catalog = self.catalog

    @property
    def is_ending(self) -> bool:
        """The scheduler has given notice: the process ends soon."""
        return self.grace is not None and self.grace.has_begun

    @property
    def is_root_failing(self) -> bool:
        """Whether the root has not answered for a while."""
        return self.catalog is not None and self.catalog.tier.is_failing

    def in_time(self, seconds: float) -> float:
        """So many seconds, or as many as a grace period leaves."""
        return seconds if self.grace is None else min(seconds, self.grace.usable_s)

    @property
    def rank(self) -> int:
        """This rank, in the store's group."""
        return self.coordinator.rank

    @property
    def world_size(self) -> int:
        """Ranks of the store's group."""
        return self.coordinator.world_size

    @property
    def has_outer(self) -> bool:
        """Whether there is a tier beyond memory."""
        return self.catalog is not None or self.on_disk is not None

    @property
    def outermost(self) -> Target:
        """Where a snapshot is to be safe in the end: the root, else the disk."""
        if self.catalog is None:
            assert self.on_disk is not None
            return Target("disk", self.on_disk.disk.create_shard)
        root, rank = self.catalog.tier, self.rank
        return Target(root.name, lambda snapshot_id, n: root.create_shard(snapshot_id, rank, n))

    def is_counted(self, snapshot_id: SnapshotId) -> bool:
        """Whether retention counts one that this rank has near it: not what persist=False keeps."""
        if self.memory.is_kept(snapshot_id):
            return False
        return self.on_disk is None or not self.on_disk.is_kept(snapshot_id)

    def released_near(self, *more: SnapshotId) -> list[SnapshotId]:
        """What retention lets go where there is no root, of what is complete and `more`; oldest first.

        Where there are disks, what only memory has is no successor of what they have: like something
        damaged it does not count, and goes when it would go if it did. `more` is on all disks.
        """
        with self.lock:
            near = {*self.complete, *more}
            pinned, uncounted = set(self.pinned), set(self.damaged)
            if self.on_disk is not None:
                uncounted |= near - self.on_disks - {*more}
        counted = [i for i in near if self.is_counted(i)]
        return plan_deletions(counted, self.keep, pinned=pinned, damaged=uncounted)

    def know_complete(self, info: SnapshotInfo, snapshot_id: SnapshotId) -> None:
        """All ranks have this one in memory: it is the newest that a restart can count on."""
        with self.lock:
            self.complete[snapshot_id] = info
            newest = self.memory.newest_complete
            if newest is None or snapshot_id.order > newest.order:
                self.memory.set_newest_complete(snapshot_id)

    def know_failed(self, snapshot_id: SnapshotId) -> None:
        """This one will never be a snapshot."""
        with self.lock:
            self.aborted.add(snapshot_id)
            self._forget(snapshot_id)
        self.memory.mark_failed(snapshot_id)

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Pin every snapshot until the last vote: what retention releases meanwhile goes afterwards."""
        with self.retention_lock, self.lock:
            self.is_restoring = True
        try:
            yield
        finally:
            with self.lock:
                self.is_restoring = False
                released, self.released_meanwhile = self.released_meanwhile, []
            for snapshot_id in released:
                self.forget(snapshot_id)

    def forget(self, snapshot_id: SnapshotId) -> None:
        """This one was deleted: drop this rank's copies."""
        with self.lock:
            if self.is_restoring:
                self.released_meanwhile.append(snapshot_id)
                return
            self.aborted.add(snapshot_id)
            self.marked.discard(snapshot_id)
            self._forget(snapshot_id)
        self.memory.mark_failed(snapshot_id)
        if self.on_disk is not None:
            self.on_disk.remove(snapshot_id)
        of_memory(self, "released", snapshot_id)

    def _forget(self, snapshot_id: SnapshotId) -> None:
        self.complete.pop(snapshot_id, None)
        self.on_disks.discard(snapshot_id)
        self.pinned.discard(snapshot_id)
        left = max(self.complete, key=lambda i: i.order, default=None)
        if self.memory.newest_complete == snapshot_id:
            self.memory.set_newest_complete(left)

    def log(self, message: str, *values: object) -> None:
        """INFO on rank 0 only."""
        if self.rank == 0:
            _LOG.info(message, *values)

    def warn_once(self, topic: str, message: str, *values: object) -> None:
        """`warn`, the first time only."""
        with self.lock:
            if topic in self.told:
                return
            self.told.add(topic)
        self.warn(message, *values)

    def warn(self, message: str, *values: object) -> None:
        """WARNING where it happens."""
        _LOG.warning(f"rank {self.rank}: {message}", *values)


def writer_versions() -> dict[str, str]:
    """Versions to record beside what is written."""
    return {name: importlib.metadata.version(name) for name in ("shardstore", "torch")}
