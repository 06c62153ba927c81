"""Which snapshot all ranks restore: a function of what every rank can read (P4, P5), run on rank 0."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Final, Literal

import msgspec

from shardstore.engine.catalog import Catalog, RootEntry, newest_first
from shardstore.engine.placement import lacking_ranks, misplaced
from shardstore.errors import CorruptSnapshotError, FormatError, TierError
from shardstore.format.records import Manifest, SnapshotId

_LOG: Final = logging.getLogger("shardstore")


class Holding(msgspec.Struct, frozen=True):
    """One rank's readable shard in memory."""

    id: SnapshotId
    world_size: int
    is_complete: bool
    """A mark or this run's own knowledge says that all ranks had it."""


class Inventory(msgspec.Struct, frozen=True):
    """What one rank can offer."""

    holdings: tuple[Holding, ...] = ()
    marked: tuple[SnapshotId, ...] = ()
    """Memory-only snapshots that were complete once, readable here or not."""
    aborted: tuple[SnapshotId, ...] = ()
    """Saves of this run that are known to have failed."""


class Skip(msgspec.Struct, frozen=True):
    """A snapshot that was passed over, and why."""

    id: str
    step: int
    reason: str


class Candidate(msgspec.Struct, frozen=True):
    """The snapshot to try next."""

    id: SnapshotId
    world_size: int
    is_committed: bool
    """There is a manifest: headers must match it."""


class Nothing(msgspec.Struct, frozen=True):
    """There is no candidate (left)."""

    kind: Literal["absent", "unreadable"]
    """`absent`: nothing was ever committed, or not that step."""
    detail: str = ""


class Chooser:
    """Offers restorable snapshots, newest first, judged as far as headers and registers tell.

    Restorable: every rank of its world can read, in some tier, a sealed shard of the same whole id.
    Shards of a torn attempt on the root count, those of an aborted one do not.
    """

    def __init__(
        self, inventories: Sequence[Inventory], catalog: Catalog | None, *, step: int | None
    ) -> None:
        """`inventories` by rank; `step` restricts to the attempts at one step."""
        self._inventories = inventories
        self._catalog = catalog
        self._step = step
        self.skipped: list[Skip] = []
        self._existed: list[str] = []
        self._candidates = self._iterate()

    def next(self) -> Candidate | Nothing:
        """The next one to try."""
        for candidate in self._candidates:
            return candidate
        reasons = [f"{skip.id}: {skip.reason}" for skip in self.skipped] + self._existed
        if reasons:
            return Nothing("unreadable", "\n".join(f"  - {reason}" for reason in reasons))
        return Nothing("absent")

    def skip(self, candidate: Candidate, reason: str) -> None:
        """Record why a candidate was passed over."""
        self.skipped.append(Skip(candidate.id.name, candidate.id.step, reason))

    def _iterate(self) -> Iterator[Candidate]:
        root_ids = self._ids_on_root()
        memory_ids = {h.id for inventory in self._inventories for h in inventory.holdings}
        marked = {i for inventory in self._inventories for i in inventory.marked}
        for snapshot_id in newest_first(root_ids | memory_ids | marked):
            if self._step is not None and snapshot_id.step != self._step:
                continue
            entry = RootEntry(snapshot_id, "torn")
            if self._catalog is not None and snapshot_id in root_ids:
                entry = self._catalog.entry(snapshot_id)
            candidate = self._judge(entry)
            if candidate is not None:
                yield candidate

    def _ids_on_root(self) -> set[SnapshotId]:
        """What the root has. One that cannot be listed is no empty one, but hides nothing that is near."""
        if self._catalog is None:
            return set()
        try:
            return set(self._catalog.ids())
        except TierError as error:
            _LOG.warning("%s: only what all ranks have near them can be restored", error)
            self._existed.append(str(error))
            return set()

    def _judge(self, entry: RootEntry) -> Candidate | None:
        snapshot_id = entry.id
        if entry.state == "aborted" or any(snapshot_id in i.aborted for i in self._inventories):
            return None
        if entry.state == "damaged":
            self.skipped.append(
                Skip(snapshot_id.name, snapshot_id.step, f"corrupt manifest: {entry.problem}")
            )
            return None
        if entry.manifest is not None:
            return self._judge_committed(entry.manifest)
        return self._judge_uncommitted(snapshot_id)

    def _judge_committed(self, manifest: Manifest) -> Candidate | None:
        found = Candidate(manifest.id, manifest.world_size, is_committed=True)
        if self._catalog is None or not self._catalog.spans_hosts:
            return found
        try:
            reason = misplaced(
                self._catalog,
                manifest.id,
                world_size=manifest.world_size,
                near=self._held(manifest.id),
                manifest=manifest,
            )
        except TierError as error:
            reason = str(error)
        if reason:
            self.skip(found, reason)
        return None if reason else found

    def _held(self, snapshot_id: SnapshotId) -> dict[int, Holding]:
        """What ranks have of it near them."""
        return {
            rank: holding
            for rank, inventory in enumerate(self._inventories)
            for holding in inventory.holdings
            if holding.id == snapshot_id
        }

    def _judge_uncommitted(self, snapshot_id: SnapshotId) -> Candidate | None:
        held = self._held(snapshot_id)
        try:
            ranks_on_root, stored = self._ranks_on_root(snapshot_id)
        except TierError as error:
            self.skipped.append(Skip(snapshot_id.name, snapshot_id.step, str(error)))
            ranks_on_root, stored = set(), set()
        world_size = self._world_size(snapshot_id, [h.world_size for h in held.values()], stored)
        present = {rank for rank in held if rank < world_size} | ranks_on_root
        if world_size and present >= set(range(world_size)):
            return Candidate(snapshot_id, world_size, is_committed=False)
        marked = any(snapshot_id in inventory.marked for inventory in self._inventories)
        if marked or any(h.is_complete for h in held.values()):
            if world_size > len(self._inventories) and len(held) == len(self._inventories):
                # Saved by more ranks than there are: let the comparison say so.
                return Candidate(snapshot_id, world_size, is_committed=False)
            missing = sorted(set(range(world_size or len(self._inventories))) - present)
            self._existed.append(
                f"{snapshot_id}: was complete in memory, but no readable copy is left on "
                f"rank {', '.join(map(str, missing))}"
            )
        elif self._catalog is not None and world_size and {*stored, *held} >= {*range(world_size)}:
            # Stored whole, but not where the ranks are now.
            try:
                reason = misplaced(self._catalog, snapshot_id, world_size=world_size, near=held)
            except TierError as error:
                reason = str(error)
            self._existed.append(f"{snapshot_id}: {reason}")
        return None

    def _ranks_on_root(self, snapshot_id: SnapshotId) -> tuple[set[int], set[int]]:
        """Ranks that find their file on the root, and ranks whose file is there: hosts may share none."""
        if self._catalog is None:
            return set(), set()
        stored = set(self._catalog.tier.list_ranks(snapshot_id))
        return stored - lacking_ranks(self._catalog, snapshot_id), stored

    def _world_size(self, snapshot_id: SnapshotId, known: Sequence[int], stored: set[int]) -> int:
        if known:
            return max(known)
        if not stored or self._catalog is None:
            return 0
        try:
            return self._catalog.read_header(snapshot_id, min(stored)).header.world_size
        except (TierError, FormatError, CorruptSnapshotError):
            return 0
