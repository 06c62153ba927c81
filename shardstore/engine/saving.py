"""From a staged slot to a committed snapshot: seal, spill, complete, commit; one worker thread each.

Sealing never waits for a spill, and neither waits for another rank. Joint steps (complete, outcome) run
on threads of their own, over the coordinator, never over a process group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

import msgspec

from shardstore.engine.commit import fail_key
from shardstore.engine.entries import in_common, post_entry
from shardstore.engine.failures import Failures
from shardstore.engine.foresight import Foresight
from shardstore.engine.freeing import free_memory_once_on_disks
from shardstore.engine.kept import KeptSnapshots
from shardstore.engine.outcomes import Outcomes, resolve
from shardstore.engine.rootfile import ReplicaPlanner, Replicas
from shardstore.engine.runs import RunNumber
from shardstore.engine.session import Failure, PendingSave, Session, failure_of
from shardstore.engine.spill import pass_on, write_shard, write_to_disk
from shardstore.engine.spillonce import SHARED, WHOLE
from shardstore.engine.transitions import passed, report_staged, staged
from shardstore.engine.workers import Worker
from shardstore.errors import CoordinationError, ShardStoreError
from shardstore.format.records import SnapshotId, TensorPiece
from shardstore.format.shardfile import ShardLayout, digest_of, encode_header, header_digest
from shardstore.tiers.fileops import FileOps

_SMALL_JOIN_S: Final = 5.0
_LOOK_S: Final = 0.02


class SavePipeline:
    """The background of one rank. `submit` hands over a save; its futures tell the rest."""

    def __init__(
        self, session: Session, failures: Failures, kept: KeptSnapshots, ops: FileOps
    ) -> None:
        """No thread runs before the first save."""
        self._session = session
        self._kept = kept
        self._outcomes = Outcomes(session, failures, kept, ops)
        self._ops = ops
        self._run = RunNumber(session)
        self._foresight = Foresight(session, ops)
        self._planner = ReplicaPlanner()
        self._pending: list[PendingSave] = []
        self._urgent: list[threading.Thread] = []
        """What a flush has begun to write; one flush at a time."""
        self._lock = threading.Lock()
        self._copier: Worker[PendingSave] = Worker("copy", self._copy)
        self._sealer: Worker[PendingSave] = Worker("seal", self._seal)
        self._spiller: Worker[PendingSave] = Worker("spill", self._spill)
        self._passer: Worker[PendingSave] = Worker("pass", self._pass_on)
        self._completer: Worker[PendingSave] = Worker("complete", self._complete)
        self._committer: Worker[PendingSave] = Worker("commit", self._outcomes.learn_commit)
        self._workers = (
            self._copier,
            self._sealer,
            self._spiller,
            self._passer,
            self._completer,
            self._committer,
        )

    def submit(self, save: PendingSave) -> None:
        """Take a save: staged, or with `raised` or `broken` set. Every rank submits every save that it enters."""
        with self._lock:
            self._pending = [p for p in self._pending if not p.settled.is_set()]
            self._pending.append(save)
        if save.late is None:
            self._sealer.submit(save)
        else:
            self._copier.submit(save)

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

    def foresee(self, nbytes: int) -> None:
        """Warn if the disk will not hold what is to be kept, for shards of `nbytes`; once."""
        self._foresight.look(nbytes)

    # -------------------------------------------------------------------- copy

    def _copy(self, save: PendingSave) -> None:
        """Copy what `save` left for later. Only then may an optimizer step, or the next save begin."""
        late = save.late
        assert late is not None
        try:
            self._ops.point("late copy")
            with self._session.meter.measure("stage", late.nbytes):
                late.run()
            self._ops.point("late copied")
        except Exception as error:  # noqa: BLE001 - all of it becomes the save's failure
            save.broken = failure_of(error, self._session.rank)
            if save.slot is not None:
                self._session.memory.abandon_slot(save.slot)
                save.slot = None
        finally:
            save.late = None
            staged(self._session, save)
            self._sealer.submit(save)  # before the next save is: order is what identity rests on
            late.done.set()
            resolve(save.staged, None)
            report_staged(self._session, save)

    # -------------------------------------------------------------------- seal

    def _seal(self, save: PendingSave) -> None:
        if save.number is not None and not save.number.done():
            try:
                run = self._run.ensure(save.count)
                self._foresight.look(save.nbytes)
                save.number.set_result(run)
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
            replicas = self._plan_replicas(save)
            if save.persist:
                self._foresight.look(save.root_nbytes)
            is_spilling = self._spiller.submit(save)  # writes while the digests are taken
            self._build(save, replicas)
            save.is_sealed = True
            passed(
                self._session,
                save,
                "sealed",
                tier=save.streamed.tier if save.streamed else "memory",
            )
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

    def _plan_replicas(self, save: PendingSave) -> Replicas | None:
        """What of this save is stored by other ranks; a file that is streamed to the root is whole there."""
        if not self._session.shares_replicas or not save.persist:
            return None
        assert save.header is not None
        assert save.layout is not None
        replicas = self._planner.plan(save.header, save.layout)
        if save.streamed is None or save.streamed.tier == "disk":
            save.form = replicas.form
        elif replicas.form is not None:
            self._session.warn_once(
                "streamed whole",
                'a state that memory has no room for goes to the root whole: replicas="once" saves '
                "nothing there. Raise memory=",
            )
        return replicas

    def _build(self, save: PendingSave, replicas: Replicas | None) -> None:
        slot, header, layout = save.slot, save.header, save.layout
        if save.streamed is not None:
            assert layout is not None
            save.header, data = save.streamed.header, save.streamed.data
            if save.form is not None:
                save.shared_header = save.form.header(save.header, data, layout.nbytes)
            self._post(save, layout, data, replicas)
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
        if save.form is not None:
            save.shared_header = save.form.header(header, data, layout.nbytes)
        self._post(save, layout, data, replicas)

    def _post(
        self, save: PendingSave, layout: ShardLayout, data: bytes, replicas: Replicas | None
    ) -> None:
        assert save.header is not None
        self._ops.point("post sealed")
        post_entry(
            self._session.coordinator,
            str(save.count),
            save.header,
            layout.nbytes,
            header_digest(data),
            in_memory=save.streamed is None,
            common=in_common(save, replicas, layout.nbytes, header_digest(data)),
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
        if save.spill_turn.acquire(blocking=False):
            self._write(save)

    def _pass_on(self, save: PendingSave) -> None:
        """From memory or the disk to the root. Its memory may serve other saves meanwhile."""
        if save.pass_turn.acquire(blocking=False):
            self._hand_on(save)

    def spill_now(self, save: PendingSave, *, until: float) -> bool:
        """Write this one to the outermost tier, past those before it in the queue.

        On a thread of its own: however long a disk takes, this waits no longer than `until` (monotonic seconds).

        Returns:
            Whether its spill is over.
        """
        if save.spill_turn.acquire(blocking=False):
            self._behind(lambda: self._write(save, is_urgent=True))
        while (left := until - time.monotonic()) > 0 and not save.spilled.wait(min(left, _LOOK_S)):
            if save.is_on_disk and save.pass_turn.acquire(blocking=False):
                self._behind(lambda: self._hand_on(save))
        return save.spilled.is_set()

    def _behind(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="shardstore-urgent", daemon=True)
        self._urgent = [t for t in self._urgent if t.is_alive()] + [thread]
        thread.start()

    def _write(self, save: PendingSave, *, is_urgent: bool = False) -> None:
        """`is_urgent`: to the outermost tier at once."""
        session = self._session
        is_passed_on = False
        try:
            if not session.has_outer or not save.persist:
                return
            self._ops.point("spill")
            started = time.monotonic()
            done: bool | None = None
            is_streamed_there = save.streamed is not None and save.streamed.tier == "disk"
            by_disk = session.on_disk is not None and save.streamed is None
            if is_streamed_there or (by_disk and not (is_urgent and session.catalog is not None)):
                done = write_to_disk(session, save)
                if done and session.catalog is not None:
                    self._count_written(save, started, "disk")
                    self._ops.point("post on disk")
                    save.watches = free_memory_once_on_disks(session, save)
                    is_passed_on = self._passer.submit(save)
                    save.is_on_disk = is_passed_on
                    return
            if done is None:
                done = write_shard(session, session.outermost, save)
            if done:
                self._count_written(save, started, session.outermost.tier)
                self._post_durable(save)
        except Exception as error:  # noqa: BLE001 - all of it becomes the save's failure
            self._report(save, error)
        finally:
            if not is_passed_on:
                save.spilled.set()

    def _hand_on(self, save: PendingSave) -> None:
        session = self._session
        try:
            assert save.id is not None
            self._ops.point("pass on")
            started = time.monotonic()
            if pass_on(session, session.outermost, save):
                self._count_written(save, started, session.outermost.tier)
                self._post_durable(save)
        except Exception as error:  # noqa: BLE001 - all of it becomes the save's failure
            self._report(save, error)
        finally:
            save.spilled.set()

    def _count_written(self, save: PendingSave, started: float, tier: str) -> None:
        nbytes = save.root_nbytes if save.is_shared else save.nbytes
        self._session.meter.add("write", nbytes, time.monotonic() - started - save.held_s)
        save.held_s = 0.0
        passed(self._session, save, "written", tier=tier)

    def _post_durable(self, save: PendingSave) -> None:
        self._ops.point("post durable")
        written = SHARED if save.is_shared else WHOLE
        self._session.coordinator.post(f"durable/{save.count}/{self._session.rank}", written)

    # ---------------------------------------------------------------- outcomes

    def _complete(self, save: PendingSave) -> None:
        try:
            goes_on = self._outcomes.learn_complete(save)
        finally:
            save.joint.set()
        if goes_on:
            self._committer.submit(save)

    # ----------------------------------------------------------------- leaving

    def stop(self, *, timeout_s: float) -> None:
        """End the threads after what is queued; callers drained before."""
        for worker in self._workers:
            worker.stop()
            worker.join(timeout_s)
        self._kept.stop(timeout_s)

    def let_go(self) -> None:
        """End the threads after what is queued; wait for none."""
        for worker in self._workers:
            worker.stop()
        self._kept.stop(0.0)

    def stop_own(self, timeout_s: float) -> bool:
        """Finish this rank's own seals and spills, wait for no rank; False if that took too long."""
        done = True
        for worker in (self._copier, self._sealer, self._spiller, self._passer):
            worker.stop()
            done = worker.join(timeout_s) and done
        for thread in self._urgent:
            thread.join(timeout_s)
            done = not thread.is_alive() and done
        for worker in (self._completer, self._committer):
            worker.stop()
            worker.join(_SMALL_JOIN_S)
        return self._kept.stop(_SMALL_JOIN_S) and done
