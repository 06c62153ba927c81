"""What dead runs left on a root and nobody will finish: find it, say why it may go, remove it.

Removing closes the register as `aborted` first (P4): where it turns out to be committed, that stands.
So a run that is taken for dead wrongly loses the save it was writing, never a committed snapshot.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from shardstore.engine.catalog import Catalog
from shardstore.engine.latepublish import whole_shards
from shardstore.engine.liveness import Judgement, Liveness, RunRecord, decode_record, judge
from shardstore.engine.overview import Overview
from shardstore.errors import FormatVersionError, ShardStoreError, TierError
from shardstore.format.manifest import MANIFEST_NAME
from shardstore.format.records import SnapshotId
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.heldmemory import HeldMemory
from shardstore.tiers.removing import KEEP_CLOSED_S, deleted_id, is_ours, is_run_temp, is_temp

Kind: TypeAlias = Literal["torn", "aborted", "deleted", "temp", "unreadable"]
"""torn: an attempt without a register. aborted: one whose register says that it is no snapshot, or one
that was deleted, with bytes left. deleted: a folder on its way out. temp: a file that was being
written. unreadable: nobody can say; it never goes."""

_LOG: Final = logging.getLogger("shardstore")
_REASON: Final = "left by a run that has ended"


@dataclass(frozen=True, slots=True)
class Orphan:
    """Something on a root that is no snapshot and that no restore uses."""

    kind: Kind
    folder: str
    """Name in the root of the folder that it is, or is in; empty for the root itself."""
    name: str
    """Name of the file, for `temp`; else empty."""
    id: SnapshotId | None
    nbytes: int
    """Of our files in it."""
    liveness: Liveness
    """Of the runs that may still work on it."""
    may_go: bool
    why: str
    """Why it may go, or what speaks against it and what would prove the contrary."""

    @property
    def run(self) -> int | None:
        """Number of the run that began it."""
        return None if self.id is None else self.id.run

    @property
    def path(self) -> str:
        """Relative to the root."""
        return os.path.join(self.folder, self.name) if self.name else self.folder


def find_orphans(
    catalog: Catalog,
    *,
    memory_dirs: Collection[str] = ("/dev/shm",),  # noqa: S108
    held: Collection[SnapshotId] | None = None,
    including_unknown: bool = False,
) -> list[Orphan]:
    """What is left over on a root, oldest run first; reads only, and needs no torch.

    A torn attempt may go when its run is proven dead, no memory that a restart would adopt has a file
    of it, and it is not what a restart would publish (whole, and newer than the newest committed).

    Args:
        catalog: Of the root.
        memory_dirs: Where memory tiers of this host may be, beside those that the runs recorded.
        held: What all ranks of a job hold in memory, on whatever hosts. None: only this host is looked
            at, so attempts of runs that had ranks on others are `unknown`.
        including_unknown: The caller answers for runs of which nothing can be proven.

    Raises:
        TierError: The root cannot be read.
    """
    search = _Search(catalog, memory_dirs, held, including_unknown=including_unknown)
    return search.all()


def remove_orphan(catalog: Catalog, orphan: Orphan, *, writer: Mapping[str, str]) -> str:
    """Remove one that may go. Foreign files in its folder stay, and so does the folder then.

    Returns:
        Empty if it is gone, else why it is not, or not all of it: again goes on from there.

    Raises:
        ValueError: It may not go.
    """
    if not orphan.may_go:
        raise ValueError(f"{orphan.path} must stay: {orphan.why}")
    try:
        if orphan.kind == "temp":
            catalog.tier.remove_temp(orphan.folder, orphan.name)
        elif orphan.kind == "deleted":
            catalog.tier.remove_deleted(orphan.folder)
        else:
            assert orphan.id is not None
            if not catalog.abort(orphan.id, reason=_REASON, writer=writer):
                return "it was committed meanwhile, and stays"
            catalog.tier.remove(orphan.id)
    except ShardStoreError as error:
        return str(error)
    return ""


class _Search:
    """One look at a root."""

    def __init__(
        self,
        catalog: Catalog,
        memory_dirs: Collection[str],
        held: Collection[SnapshotId] | None,
        *,
        including_unknown: bool,
    ) -> None:
        self._catalog = catalog
        self._including_unknown = including_unknown
        self._knows_all_memory = held is not None
        self._memory = HeldMemory(dict.fromkeys(held or (), "the memory of a rank"))
        location = catalog.tier.location
        self._unreadable: list[Orphan] = []
        self._records = {run: self._record(run) for run in catalog.tier.run_numbers()}
        self._judged = {run: judge(record, location) for run, record in self._records.items()}
        ops = FileOps()
        for folder in memory_dirs:
            self._memory.look_into_all(folder, ops)
        self._disks = HeldMemory()
        for record in self._records.values():
            # Also of a run of which nothing can be proven: it may have been on this host.
            if record is not None and record.memory:
                self._memory.look_into(record.memory, ops)
            if record is not None and record.disk:
                self._disks.look_into(record.disk, ops)

    def _record(self, run: int) -> RunRecord | None:
        """Of a run; one that cannot be read proves nothing, and must not hide the others."""
        try:
            return self._catalog.run_record(run)
        except ShardStoreError as error:
            name = f"run-{run:08x}.json"
            found = Orphan("unreadable", "", name, None, 0, "unknown", False, str(error))
            self._unreadable.append(found)
            return None

    def all(self) -> list[Orphan]:
        found = list(self._unreadable)
        overview = self._catalog.overview()
        states = {i: overview.state(i) for i in overview.ids if i not in overview.unread}
        for snapshot_id, error in overview.unread.items():
            found.append(
                Orphan("unreadable", snapshot_id.name, "", snapshot_id, 0, "unknown", False, str(error))
            )  # fmt: skip
        newest = self._newest_good(overview)
        for snapshot_id, state in states.items():
            if state == "torn":
                found.append(self._torn(snapshot_id, newest, overview))
            elif state == "aborted" and self._is_kept_closed(snapshot_id, overview):
                continue
            elif state == "aborted":
                found.append(self._aborted(snapshot_id, overview))
            elif any(map(is_temp, overview.names[snapshot_id])):
                found += self._temps(snapshot_id)
        found += self._unfinished()
        found += [self._deleted(name) for name in self._catalog.tier.list_deleted()]
        found += self._run_temps()
        return sorted(found, key=lambda o: (o.id.order if o.id else (0, 0, ""), o.path))

    # ------------------------------------------------------------------ attempts

    def _newest_good(self, overview: Overview) -> SnapshotId | None:
        """The newest committed one that nothing speaks against: a restart falls back from what is newer."""
        good = [
            r.id
            for r in overview.committed()
            if "damaged" not in overview.marks(r.id) and not self._catalog.is_cut(r, overview)
        ]
        return max(good, key=lambda i: i.order, default=None)

    def _torn(
        self, snapshot_id: SnapshotId, newest: SnapshotId | None, overview: Overview
    ) -> Orphan:
        judgement = self._attempt(snapshot_id)
        against = self._needed(snapshot_id, newest)
        return self._orphan("torn", snapshot_id, judgement, overview, against)

    def _needed(self, snapshot_id: SnapshotId, newest: SnapshotId | None) -> str:
        """What a restart would do with a torn attempt; empty for nothing."""
        if self._is_of_several_roots(snapshot_id):
            return (
                "its run kept a root on each of several hosts, and another one may have committed it: the "
                "next run on all of them settles that"
            )
        where = self._memory.where.get(snapshot_id)
        is_old = newest is not None and snapshot_id.order < newest.order
        if where is None and not is_old:
            where = self._disks.where.get(snapshot_id)
        if where is not None:
            return f"{where} still has a part of it, which a restart may use"
        if is_old:
            return ""
        try:
            is_whole = whole_shards(self._catalog, snapshot_id) is not None
        except (TierError, FormatVersionError) as error:
            return f"whether it is whole, and would be committed by the next start, cannot be read: {error}"
        except ShardStoreError:
            is_whole = False  # a restart reads the same, and publishes nothing
        if is_whole:
            return (
                "it is whole, and newer than all that is committed and good: the next start commits it, "
                "or falls back to it"
            )
        return ""

    def _is_kept_closed(self, snapshot_id: SnapshotId, overview: Overview) -> bool:
        """Whether nothing is left of it but its register, which stays for a day on object stores."""
        if not self._catalog.tier.keeps_index or {*overview.names[snapshot_id]} != {MANIFEST_NAME}:
            return False
        return time.time() - overview.registers[snapshot_id].created < KEEP_CLOSED_S

    def _aborted(self, snapshot_id: SnapshotId, overview: Overview) -> Orphan:
        judgement = self._own_run(snapshot_id)
        if judgement.liveness != "alive":
            judgement = Judgement("dead", "its register says that it is no snapshot")
        against = ""
        if self._is_of_several_roots(snapshot_id):
            against = (
                "its run kept a root on each of several hosts, and others may not know yet that it is no "
                "snapshot: the next run on all of them removes it"
            )
        return self._orphan("aborted", snapshot_id, judgement, overview, against)

    def _is_of_several_roots(self, snapshot_id: SnapshotId) -> bool:
        """Whether other hosts have parts of it, which cannot be seen from this one."""
        record = self._records.get(snapshot_id.run)
        return not self._catalog.spans_hosts and record is not None and bool(record.roots)

    def _orphan(
        self,
        kind: Kind,
        snapshot_id: SnapshotId,
        judgement: Judgement,
        overview: Overview,
        against: str = "",
    ) -> Orphan:
        nbytes = self._nbytes(snapshot_id.name, overview.sizes(snapshot_id))
        may_go = self._may_go(judgement) and not against
        why = against or judgement.why
        return Orphan(
            kind, snapshot_id.name, "", snapshot_id, nbytes, judgement.liveness, may_go, why
        )

    def _may_go(self, judgement: Judgement) -> bool:
        return judgement.liveness == "dead" or (
            judgement.liveness == "unknown" and self._including_unknown
        )

    def _own_run(self, snapshot_id: SnapshotId) -> Judgement:
        """Of the run that began an attempt."""
        record = self._records.get(snapshot_id.run)
        if record is not None and record.nonce != snapshot_id.nonce:
            return Judgement("unknown", "the record of its run number is another run's")
        return self._judged.get(snapshot_id.run) or Judgement(
            "unknown", "no record says which process began it"
        )

    def _attempt(self, snapshot_id: SnapshotId) -> Judgement:
        """Of all runs that may write to it: later ones as well, whose memory may hold it."""
        own = self._own_run(snapshot_id)
        record = self._records.get(snapshot_id.run)
        if own.liveness == "dead" and record is not None and not record.is_exclusive:
            return Judgement(
                "unknown",
                f"{own.why}; the store ignores exclusive create, so that nothing would keep a process that "
                "still works on it from committing it: make sure that there is none",
            )
        if own.liveness != "dead" or self._knows_all_memory:
            return own
        assert record is not None
        if record.num_other_hosts_ranks:
            return Judgement(
                "unknown",
                f"{own.why}; memory of its ranks on other hosts cannot be seen from here: look there",
            )
        unseen = self._memory.unseen + self._disks.unseen
        if unseen:
            return Judgement(
                "unknown",
                f"{own.why}; whether {unseen[0]} has a part of it cannot be seen by this user",
            )
        for run, judged in self._judged.items():
            if run > snapshot_id.run and judged.liveness == "unknown":
                return Judgement(
                    "unknown", f"{own.why}; run {run:,} may have it in memory: {judged.why}"
                )
        return own

    def _nbytes(self, folder: str, sizes: Mapping[str, int] | None = None) -> int:
        found = dict(self._catalog.tier.list_names(folder)) if sizes is None else sizes
        return sum(nbytes for name, nbytes in found.items() if is_ours(name))

    # --------------------------------------------------------------------- rest

    def _temps(self, snapshot_id: SnapshotId) -> list[Orphan]:
        """Files that were being written beside a committed snapshot: of its run, or of any later one."""
        names = self._catalog.tier.list_names(snapshot_id.name)
        temps = [(name, nbytes) for name, nbytes in names if is_temp(name)]
        if not temps:
            return []
        judgement = self._own_run(snapshot_id)
        for run, judged in self._judged.items():
            if (
                run > snapshot_id.run
                and judgement.liveness != "alive"
                and judged.liveness != "dead"
            ):
                judgement = judged
        may_go = self._may_go(judgement)
        return [
            Orphan("temp", snapshot_id.name, name, snapshot_id, nbytes, judgement.liveness, may_go, judgement.why)
            for name, nbytes in temps
        ]  # fmt: skip

    def _unfinished(self) -> list[Orphan]:
        """What no listing shows: uploads in parts. Of a run that is dead nobody will complete them."""
        found = []
        try:
            unfinished = self._catalog.tier.list_unfinished()
        except TierError as error:  # a permission of its own, on some storage
            _LOG.warning("%s Uploads that dead runs left cannot be found", error)
            return []
        for snapshot_id, name in unfinished:
            judgement = self._own_run(snapshot_id)
            may_go = self._may_go(judgement)
            found.append(
                Orphan("temp", snapshot_id.name, name, snapshot_id, 0, judgement.liveness, may_go, judgement.why)
            )  # fmt: skip
        return found

    def _deleted(self, folder: str) -> Orphan:
        names = self._catalog.tier.list_names(folder)
        foreign = sorted(name for name, _ in names if not is_ours(name))
        nbytes = self._nbytes(folder)
        may_go = len(foreign) < max(1, len(names))
        why = "it was deleted, and its removal was not finished"
        if foreign:
            why = f"{why}; {', '.join(foreign[:3])} in it is not ours, and stays"
        return Orphan("deleted", folder, "", deleted_id(folder), nbytes, "dead", may_go, why)

    def _run_temps(self) -> list[Orphan]:
        tier, found = self._catalog.tier, []
        for name, nbytes in tier.list_names():
            if is_run_temp(name):
                record = decode_record(tier.read_small(name))
                judgement = judge(record, tier.location)
                found.append(
                    Orphan("temp", "", name, None, nbytes, judgement.liveness, self._may_go(judgement), judgement.why)
                )  # fmt: skip
        return found
