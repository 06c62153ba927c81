"""From a staged slot to a committed snapshot: seal, spill, complete, commit; one worker thread each.

Sealing never waits for a spill, and neither waits for another rank. Joint steps (complete, outcome) run
on threads of their own, over the coordinator, never over a process group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Final

import msgspec

from shardstore.engine.commit import (
    Outcome,
    agree_complete,
    commit_on_rank_0,
    fail_key,
    settle_elsewhere,
)
from shardstore.engine.entries import entry_key, post_entry
from shardstore.engine.failures import Failures, save_failed
from shardstore.engine.freeing import free_memory_once_on_disks, on_disk_key
from shardstore.engine.kept import KeptSnapshots
from shardstore.engine.listing import SnapshotInfo
from shardstore.engine.retention import plan_deletions
from shardstore.engine.runs import RunNumber
from shardstore.engine.session import (
    Failure,
    PendingSave,
    Session,
    failure_of,
)
from shardstore.engine.spill import copy_sealed, write_shard, write_to_disk
from shardstore.engine.workers import Worker
from shardstore.errors import CoordinationError, SaveFailedError, ShardStoreError
from shardstore.format.records import SnapshotId, TensorPiece
from shardstore.format.shardfile import ShardLayout, digest_of, encode_header, header_digest
from shardstore.tiers.adoption import free_absent_ranks
from shardstore.tiers.fileops import FileOps

_SMALL_JOIN_S: Final = 5.0


class SavePipeline:
    """The background of one rank. `submit` hands over a save; its futures tell the rest."""

    def __init__(
        self, session: Session, failures: Failures, kept: KeptSnapshots, ops: FileOps
    ) -> None:
        """No thread runs before the first save."""
        self._session = session
        self._kept = kept
        self._failures = failures
        self._ops = ops
        self._run = RunNumber(session)
        self._has_freed_absent = False
        self._pending: list[PendingSave] = []
        self._lock = threading.Lock()
        self._sealer: Worker[PendingSave] = Worker("seal", self._seal)
        self._spiller: Worker[PendingSave] = Worker("spill", self._spill)
        self._passer: Worker[PendingSave] = Worker("pass", self._pass_on)
        self._completer: Worker[PendingSave] = Worker("complete", self._complete)
        self._committer: Worker[PendingSave] = Worker("commit", self._commit)
        self._workers = (
            self._sealer, self._spiller, self._passer, self._completer, self._committer,
        )  # fmt: skip

    def submit(self, save: PendingSave) -> None:
        """Take a save: staged, or with `raised` or `broken` set. Every rank submits every save that it enters."""
        with self._lock:
            self._pending = [p for p in self._pending if not p.settled.is_set()]
            self._pending.append(save)
        self._sealer.submit(save)

    @property
    def pending(self) -> list[PendingSave]:
        """Saves that are not settled yet, oldest first."""
        with self._lock:
            return [p for p in self._pending if not p.settled.is_set()]

    def number(self, save: PendingSave) -> SnapshotId:
        """The id of a save that is not submitted yet.

        Waits for the run's number, and so, at the first save of a run, for all other ranks to come to it.

        Raises:
            TierError, CoordinationError: The number cannot be had.
        """
        save.number = Future()
        if not self._sealer.submit(save):
            raise ShardStoreError("the store was closed meanwhile")
        return SnapshotId(save.step, save.number.result(), save.count, self._session.nonce)

    # -------------------------------------------------------------------- seal

    def _seal(self, save: PendingSave) -> None:
        if save.number is not None and not save.number.done():
            try:
                save.number.set_result(self._run.ensure(save.count))
            except Exception as error:  # noqa: BLE001 - who asked for it raises it
                save.number.set_exception(error)
            return
        is_spilling = False
        try:
            run = self._run.ensure(save.count)
            if (failure := save.raised or save.broken) is not None:
                self._propose_failure(save, failure)
                return
            save.id = SnapshotId(save.step, run, save.count, self._session.nonce)
            is_spilling = self._spiller.submit(save)  # writes while the digests are taken
            self._build(save)
            save.is_sealed = True
        except Exception as error:  # noqa: BLE001 - all of it becomes the save's failure
            if save.slot is not None:
                self._session.memory.abandon_slot(save.slot)
            if save.streamed is not None:
                save.streamed.writer.discard()
            self._report(save, error)
        finally:
            save.sealed.set()
            self._completer.submit(save)
            if not is_spilling:
                save.spilled.set()
        if save.layout is not None:
            self._session.memory.prepare(save.layout.nbytes)

    def _build(self, save: PendingSave) -> None:
        slot, header, layout = save.slot, save.header, save.layout
        if save.streamed is not None:
            assert layout is not None
            save.header = save.streamed.header
            self._post(save, layout, save.streamed.data)
            return
        assert slot is not None
        assert header is not None
        assert layout is not None
        assert save.id is not None
        self._ops.point("digest")
        with self._session.meter.measure("digest", layout.nbytes - layout.data_start):
            pieces = tuple(
                self._digested(piece, slot.view[start:stop]) if piece.key else piece
                for piece, (start, stop) in zip(header.pieces, layout.spans, strict=True)
            )
        header = msgspec.structs.replace(header, run=save.id.run, pieces=pieces)
        data = encode_header(header, layout)
        self._ops.point("seal")
        self._session.memory.seal(slot, save.id, data, kept=not save.persist)
        save.header = header
        self._post(save, layout, data)

    def _post(self, save: PendingSave, layout: ShardLayout, data: bytes) -> None:
        assert save.header is not None
        self._ops.point("post sealed")
        post_entry(
            self._session.coordinator,
            str(save.count),
            save.header,
            layout.nbytes,
            header_digest(data),
            in_memory=save.streamed is None,
        )

    def _digested(self, piece: TensorPiece, data: memoryview) -> TensorPiece:
        digest = digest_of(data)
        self._session.coordinator.progress(len(data))
        return TensorPiece(piece.key, piece.offsets, piece.sizes, piece.device, digest)

    def _report(self, save: PendingSave, error: BaseException) -> None:
        """Tell all ranks that this one failed."""
        self._propose_failure(save, failure_of(error, self._session.rank))

    def _propose_failure(self, save: PendingSave, failure: Failure) -> None:
        """The first cause stands."""
        try:
            self._session.coordinator.propose(fail_key(save), msgspec.json.encode(failure))
        except CoordinationError as unreachable:
            self._session.warn(
                "%s failed (%s) and it cannot be told: %s", save.label, failure.cause, unreachable
            )

    # ------------------------------------------------------------------- spill

    def _spill(self, save: PendingSave) -> None:
        """Write to the tier after memory, while the digests are taken."""
        session = self._session
        is_passed_on = False
        try:
            if not session.has_outer or not save.persist:
                return
            self._ops.point("spill")
            started = time.monotonic()
            done: bool | None = None
            if session.on_disk is not None and save.streamed is None:
                done = write_to_disk(session, save)
                if done and session.catalog is not None:
                    self._count_written(save, started)
                    self._ops.point("post on disk")
                    save.watches = free_memory_once_on_disks(session, save)
                    is_passed_on = self._passer.submit(save)
                    return
            if done is None:
                done = write_shard(session, session.create_outermost, save)
            if done:
                self._count_written(save, started)
                self._post_durable(save)
        except Exception as error:  # noqa: BLE001 - all of it becomes the save's failure
            self._report(save, error)
        finally:
            if not is_passed_on:
                save.spilled.set()

    def _pass_on(self, save: PendingSave) -> None:
        """From memory or the disk to the root. Its memory may serve other saves meanwhile."""
        session = self._session
        try:
            assert save.id is not None
            self._ops.point("pass on")
            started = time.monotonic()
            copy_sealed(session, session.create_outermost, save.id)
            self._count_written(save, started)
            self._post_durable(save)
        except Exception as error:  # noqa: BLE001 - all of it becomes the save's failure
            self._report(save, error)
        finally:
            save.spilled.set()

    def _count_written(self, save: PendingSave, started: float) -> None:
        nbytes = save.layout.nbytes if save.layout else 0
        self._session.meter.add("write", nbytes, time.monotonic() - started)

    def _post_durable(self, save: PendingSave) -> None:
        self._ops.point("post durable")
        self._session.coordinator.post(f"durable/{save.count}/{self._session.rank}", b"1")

    # ---------------------------------------------------------------- complete

    def _complete(self, save: PendingSave) -> None:
        """Learn whether all ranks sealed: one write-once key. P moves; without a root that is all."""
        session = self._session
        try:
            save.completion = completion = agree_complete(session, save)
        except Exception as error:  # noqa: BLE001 - the outcome is unknown here
            self._finish_unknown(save, error)
            save.settled.set()
            return
        if completion.failure is None and completion.in_memory and save.id is not None:
            session.know_complete(self._info(save), save.id)
            self._free_absent_ranks()
        if not session.has_outer or not save.persist:
            self._finish_in_memory(save, completion.failure)
            save.settled.set()
        else:
            self._committer.submit(save)

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
        if not self._session.has_outer and save.persist:
            with self._session.lock:
                persisted = [i for i in self._session.complete if self._session.is_counted(i)]
            for old in plan_deletions(persisted, self._session.keep):
                self._session.forget(old)
        self._finish_committed(save)

    # ------------------------------------------------------------------ commit

    def _commit(self, save: PendingSave) -> None:
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
        session.memory.mark_safe(save.id)
        if session.catalog is None:
            self._mark_on_disk(save)
        for released in outcome.released:
            session.forget(released)
        self._finish_committed(save, outcome)
        self._remove_old()

    def _mark_on_disk(self, save: PendingSave) -> None:
        """Without a root: what all ranks have on their disks is complete, and a restart may count on it."""
        session = self._session
        assert save.id is not None
        assert session.on_disk is not None
        with session.lock:
            session.complete.setdefault(save.id, self._info(save, tiers=("disk",)))
        try:
            session.on_disk.disk.mark_complete(save.id)
        except ShardStoreError as error:
            session.warn("%s", error)

    def _remove_old(self) -> None:
        """Retention, second half: the bytes of what is off the list."""
        session = self._session
        if session.catalog is None or session.rank != 0:
            return
        with session.retention_lock:
            try:
                self._ops.point("remove old")
                session.catalog.remove_aborted()
            except (ShardStoreError, OSError) as error:
                session.warn("an old snapshot could not be removed, it is tried again: %s", error)

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
        self._session.log("%s is committed (%s)", info.id, ", ".join(tiers))
        self._retire_keys(save)
        meter = self._session.meter
        meter.count("committed")
        meter.add(
            "commit", save.layout.nbytes if save.layout else 0, time.monotonic() - save.started
        )
        _resolve(lambda: save.committed.set_result(info))

    def _finish_failed(self, save: PendingSave, failure: Failure) -> None:
        """Tell first, then clean up: whatever goes wrong there, the failure is known."""
        if failure.is_skip:
            self._session.meter.count("skipped")
            self._session.log("the %s is skipped: %s", save.label, failure.describe())
        else:
            self._session.meter.count("failed")
            self._failures.add(save, failure)
        error = save_failed(save.step, failure)
        try:
            if save.id is not None:
                self._session.know_failed(save.id)
        finally:
            if failure.is_skip:
                _resolve(lambda: save.committed.set_result(None))
            else:
                _resolve(lambda: save.committed.set_exception(error))
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
        self._failures.add(save, failure_of(error, self._session.rank))
        _resolve(lambda: save.committed.set_exception(unknown))

    def _retire_keys(self, save: PendingSave) -> None:
        """The outcome is known here: this rank needs the save's keys no more."""
        coordinator, count = self._session.coordinator, save.count
        coordinator.forget(entry_key(str(count), coordinator.rank))
        coordinator.forget(f"durable/{count}/{coordinator.rank}")
        shared = [fail_key(save), f"complete/{count}", f"outcome/{count}"]
        if self._session.on_disk is not None:
            for watch in save.watches:
                watch.cancel()
            coordinator.forget(on_disk_key(save, coordinator.rank))
            shared.append(on_disk_key(save))
        coordinator.retire(f"save/{count}", shared)

    def _clean_up(self, save: PendingSave) -> None:
        """Remove what this rank wrote to the disk and the root, once its spill is over."""
        session = self._session
        if not session.has_outer or save.id is None or not save.persist:
            return
        save.spilled.wait(session.timeout_s)
        try:
            if session.catalog is None:
                assert session.on_disk is not None
                session.on_disk.remove(save.id)
                return
            if session.catalog.state(save.id) in ("committed", "damaged"):
                return  # whatever was told: nothing is taken from under a register
            if session.on_disk is not None:
                session.on_disk.remove(save.id)
            session.catalog.tier.remove_shard(save.id, session.rank)
            if session.rank == 0:
                session.catalog.try_remove(save.id)
        except (ShardStoreError, OSError) as error:
            session.warn("%s", error)

    # ----------------------------------------------------------------- leaving

    def stop(self, *, timeout_s: float) -> None:
        """End the threads after what is queued; callers drained before."""
        for worker in self._workers:
            worker.stop()
            worker.join(timeout_s)
        self._kept.stop(timeout_s)

    def stop_own(self, timeout_s: float) -> bool:
        """Finish this rank's own seals and spills, wait for no rank; False if that took too long."""
        self._sealer.stop()
        done = self._sealer.join(timeout_s)
        self._spiller.stop()
        done = self._spiller.join(timeout_s) and done
        for worker in (self._completer, self._committer):
            worker.stop()
            worker.join(_SMALL_JOIN_S)
        return self._kept.stop(_SMALL_JOIN_S) and done


def _resolve(call: Callable[[], None]) -> None:
    """Complete a future that close() may have completed before."""
    with suppress(InvalidStateError):
        call()
