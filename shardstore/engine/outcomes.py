"""What becomes of a save on this rank: complete or not, committed or not, and what that entails."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TypeVar

import msgspec

from shardstore.engine.catalog import Catalog
from shardstore.engine.commit import (
    Outcome,
    agree_complete,
    commit_on_rank_0,
    fail_key,
    settle_elsewhere,
)
from shardstore.engine.entries import entry_key
from shardstore.engine.failures import Failures, save_failed
from shardstore.engine.freeing import on_disk_key
from shardstore.engine.kept import KeptSnapshots
from shardstore.engine.listing import SnapshotInfo
from shardstore.engine.marking import mark_damage
from shardstore.engine.orphans import find_orphans, remove_orphan
from shardstore.engine.otherjobs import has_successor
from shardstore.engine.session import Failure, PendingSave, Session, failure_of
from shardstore.engine.several import at_once
from shardstore.engine.transitions import lost, passed
from shardstore.errors import SaveFailedError, ShardStoreError
from shardstore.format.records import SnapshotId
from shardstore.tiers.adoption import free_absent_ranks
from shardstore.tiers.fileops import FileOps

T = TypeVar("T")


class Outcomes:
    """Learns outcomes together with the other ranks, and tells them to those who wait. Two threads."""

    def __init__(
        self, session: Session, failures: Failures, kept: KeptSnapshots, ops: FileOps
    ) -> None:
        """Nothing is learned yet."""
        self._session = session
        self._failures = failures
        self._kept = kept
        self._ops = ops
        self._has_freed_absent = False
        self._has_cleared = False
        self._has_looked = False
        self._unremoved: set[SnapshotId] = set()
        """Off the list, and could not be removed."""

    def learn_complete(self, save: PendingSave) -> bool:
        """Learn whether all ranks sealed: one write-once key. P moves; with memory alone that is all.

        Returns:
            Whether more is to come: the commit further out.
        """
        session = self._session
        try:
            save.completion = completion = agree_complete(session, save)
        except Exception as error:  # noqa: BLE001 - the outcome is unknown here
            self._finish_unknown(save, error)
            save.settled.set()
            return False
        if completion.failure is None and completion.in_memory and save.id is not None:
            session.know_complete(self._info(save), save.id)
            self._free_absent_ranks()
        if not session.has_outer or not save.persist:
            self._finish_in_memory(save, completion.failure)
            save.settled.set()
            return False
        return True

    def _free_absent_ranks(self) -> None:
        """Once per run, by the host's lowest rank: memory of ranks that moved to other hosts."""
        session = self._session
        if self._has_freed_absent or session.memory.folder is None:
            return
        self._has_freed_absent = True
        if session.rank == min(session.local_ranks):
            try:
                free_absent_ranks(
                    session.memory.folder, local_ranks=session.local_ranks, ops=self._ops
                )
            except ShardStoreError as error:
                session.warn("%s", error)

    def _finish_in_memory(self, save: PendingSave, failure: Failure | None) -> None:
        if failure is not None or save.id is None:
            self._finish_failed(save, failure or Failure(self._session.rank, "no run number"))
            return
        try:
            self._session.memory.mark_complete(save.id)
        except ShardStoreError as error:
            self._session.warn("%s", error)
        if not save.persist:
            self._kept.watch()
        mark_damage(self._session)
        if not self._session.has_outer and save.persist:
            for old in self._session.released_near():
                self._session.forget(old)
        self._finish_committed(save)

    def learn_commit(self, save: PendingSave) -> None:
        """Learn whether it is committed, and do what that entails: retention, or cleaning up."""
        try:
            self._learn_outcome(save)
        finally:
            save.settled.set()

    def _learn_outcome(self, save: PendingSave) -> None:
        session = self._session
        try:
            if session.rank == 0:
                outcome = commit_on_rank_0(session, save)
            else:
                outcome = settle_elsewhere(session, save)
        except Exception as error:  # noqa: BLE001 - the outcome is unknown here
            self._finish_unknown(save, error)
            return
        if outcome.failure is not None:
            self._finish_failed(save, outcome.failure)
            return
        assert save.id is not None
        mark_damage(session)
        session.memory.mark_safe(save.id)
        if session.catalog is None:
            self._mark_on_disk(save)
        for released in outcome.released:
            session.forget(released)
        self._finish_committed(save, outcome)
        self._remove_old(save.id, outcome.released)

    def _mark_on_disk(self, save: PendingSave) -> None:
        """Without a root: what all ranks have on their disks is complete, and a restart may count on it."""
        session = self._session
        assert save.id is not None
        assert session.on_disk is not None
        with session.lock:
            session.complete.setdefault(save.id, self._info(save, tiers=("disk",)))
            session.on_disks.add(save.id)
        try:
            session.on_disk.disk.mark_complete(save.id)
        except ShardStoreError as error:
            session.warn("%s", error)

    def _remove_old(self, committed: SnapshotId, released: Collection[SnapshotId]) -> None:
        """Retention, second half: the bytes of what is off the list."""
        session = self._session
        if session.catalog is None or session.rank != 0:
            return
        catalog = session.catalog
        with session.retention_lock:
            try:
                # Where something was released, that was looked at a moment ago.
                if not (released and catalog.tier.keeps_index) and has_successor(session):
                    return
                self._ops.point("remove old")
                if catalog.tier.keeps_index and self._has_looked:
                    # A look at all of it is many requests.
                    due = sorted({*released} | self._unremoved, key=lambda i: i.order)
                    removed = at_once(catalog.tier, catalog.try_remove, due)
                    self._unremoved = {i for i, gone in zip(due, removed, strict=True) if not gone}
                else:
                    self._has_looked = True
                    self._unremoved = catalog.remove_aborted(spare_runs=session.other_runs)
                if session.keep is not None and not self._has_cleared:
                    self._has_cleared = True
                    self._remove_orphans(catalog)
                catalog.keep_index(session.run, committed, released)
            except (ShardStoreError, OSError) as error:
                session.warn("an old snapshot could not be removed, it is tried again: %s", error)

    def _remove_orphans(self, catalog: Catalog) -> None:
        """Once per run: what runs before it left half written, where they are proven to have ended."""
        session = self._session
        self._ops.point("remove orphans")
        for orphan in find_orphans(catalog, memory_dirs=(), held=session.held):
            is_older = orphan.run is not None and orphan.run < session.run
            if orphan.kind in ("torn", "temp") and orphan.may_go and is_older:
                problem = remove_orphan(catalog, orphan, writer=session.writer)
                if problem:
                    session.warn("%s stays on the root for now: %s", orphan.path, problem)
                else:
                    session.log("%s is removed from the root: %s", orphan.path, orphan.why)

    # ------------------------------------------------------------------ finish

    def _info(self, save: PendingSave, *, tiers: tuple[str, ...] = ("memory",)) -> SnapshotInfo:
        assert save.id is not None
        nbytes = save.layout.nbytes if save.layout else 0
        return SnapshotInfo(
            step=save.step,
            id=save.id.name,
            tiers=tiers,
            nbytes=nbytes,
            created=save.created,
            pinned=False,
            metadata=save.metadata,
        )

    def _finish_committed(self, save: PendingSave, outcome: Outcome | None = None) -> None:
        tiers: tuple[str, ...] = ("memory",)
        if outcome is not None:
            in_memory = save.completion is not None and save.completion.in_memory
            session = self._session
            on_disk = session.on_disk
            has_file = on_disk is not None and save.id is not None and on_disk.disk.has(save.id)
            tiers = tuple(
                tier
                for tier, is_there in (
                    ("memory", in_memory),
                    ("disk", has_file),
                    ("root", session.catalog is not None),
                )
                if is_there
            )
        info = self._info(save, tiers=tiers)
        if outcome is not None:
            info = msgspec.structs.replace(info, nbytes=outcome.nbytes, metadata=outcome.metadata)
        passed(self._session, save, "committed", tier=", ".join(tiers), nbytes=info.nbytes)
        self._retire_keys(save)
        meter = self._session.meter
        meter.count("committed")
        meter.add(
            "commit", save.layout.nbytes if save.layout else 0, time.monotonic() - save.started
        )
        resolve(save.committed, info)

    def _finish_failed(self, save: PendingSave, failure: Failure) -> None:
        """Tell first, then clean up: whatever goes wrong there, the failure is known."""
        if failure.is_skip:
            self._session.meter.count("skipped")
            lost(self._session, save, "skipped", failure)
        else:
            self._session.meter.count("failed")
            self._failures.add(save, failure, is_borne=self._is_borne(save, failure))
        error = save_failed(save.step, failure)
        try:
            if save.id is not None:
                self._session.know_failed(save.id)
        finally:
            if failure.is_skip:
                resolve(save.committed, None)
            else:
                _refuse(save.committed, error)
        self._retire_keys(save)
        self._clean_up(save)

    def _finish_unknown(self, save: PendingSave, error: BaseException) -> None:
        unknown = SaveFailedError(
            f"the outcome of the {save.label} is unknown: {error}. It is committed if a restart lists "
            "it; this rank's state is untouched.",
            step=save.step,
            failed_ranks=getattr(error, "failed_ranks", ()),
        )
        unknown.__cause__ = error
        self._session.meter.count("failed")
        failure = failure_of(error, self._session.rank)
        self._failures.add(save, failure, is_borne=self._is_borne(save, failure))
        _refuse(save.committed, unknown)

    def _is_borne(self, save: PendingSave, failure: Failure) -> bool:
        """Whether training goes on without an error: the root is out, and what all ranks have near is whole.

        Equal on all ranks where the failure is.
        """
        done = save.completion
        if done is None or done.failure is not None:
            return False
        return failure.is_outage and (done.in_memory or self._session.on_disk is not None)

    def _retire_keys(self, save: PendingSave) -> None:
        """The outcome is known here: this rank needs the save's keys no more."""
        coordinator, count = self._session.coordinator, save.count
        coordinator.forget(entry_key(str(count), coordinator.rank))
        coordinator.forget(f"durable/{count}/{coordinator.rank}")
        shared = [fail_key(save), f"complete/{count}", f"outcome/{count}"]
        if self._session.on_disk is not None:
            shared.append(on_disk_key(save))
            self._stop_watching(save)
        coordinator.retire(f"save/{count}", shared)

    def _stop_watching(self, save: PendingSave) -> None:
        for watch in save.watches:
            watch.cancel()
        self._session.coordinator.forget(on_disk_key(save, self._session.rank))

    def _clean_up(self, save: PendingSave) -> None:
        """Remove what this rank wrote to the disk and the root, once its spill is over."""
        session = self._session
        if not session.has_outer or save.id is None or not save.persist:
            return
        save.spilled.wait(session.timeout_s)
        if session.on_disk is not None:
            self._stop_watching(save)  # the spill may have begun to after the outcome was known
        try:
            if session.catalog is None:
                assert session.on_disk is not None
                session.on_disk.remove(save.id)
                return
            state = session.catalog.state(save.id)
            if state in ("committed", "damaged"):
                return  # whatever was told: nothing is taken from under a register
            if state == "torn" and not self._close_late(session.catalog, save.id):
                return
            if session.on_disk is not None:
                session.on_disk.remove(save.id)
            session.catalog.tier.remove_shard(save.id, session.rank)
            if session.rank == 0:
                session.catalog.try_remove(save.id)
        except (ShardStoreError, OSError) as error:
            session.warn("%s", error)

    def _close_late(self, catalog: Catalog, snapshot_id: SnapshotId) -> bool:
        """Close a register that could not be closed with the outcome; False if nothing may be removed.

        Remote registers stay for a day, so that there `torn` means: not closed. A manifest that was sent
        may still arrive then, and would commit what is removed.
        """
        if not catalog.tier.keeps_index:
            return True
        session = self._session
        if not catalog.is_exclusive:
            session.warn(
                "%s is left to gc: nothing keeps its manifest from arriving late", snapshot_id
            )
            return False
        return catalog.abort(snapshot_id, reason="the save failed", writer=session.writer)


def resolve(future: Future[T], value: T) -> None:
    """Complete a future that close() may have completed before."""
    with suppress(InvalidStateError):
        future.set_result(value)


def _refuse(future: Future[T], error: BaseException) -> None:
    with suppress(InvalidStateError):
        future.set_exception(error)
