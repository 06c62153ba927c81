"""Snapshots that only memory has leave it when some rank needs the room, on all ranks (P3).

They are of persist=False, or of an earlier run that had no time to spill them.

They go to the root, or to the disks where there is none.

The rank that needs room asks, under a number that only one question gets. Every rank answers the
questions in the order of their numbers, in the background: it writes its shard, and rank 0 publishes when
all have. Nobody gives up the memory copy before the snapshot is committed; if that fails, it just stays.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any, Final

import msgspec

from shardstore.cluster.coordination import Stopped
from shardstore.engine.entries import collect_entries, entry_key, post_entry
from shardstore.engine.marking import keep_pins, mark_near
from shardstore.engine.sealed import SealedShard, manifest_of, read_sealed_header
from shardstore.engine.session import Failure, Session, failure_of
from shardstore.engine.spill import copy_sealed
from shardstore.engine.workers import Worker
from shardstore.errors import CoordinationError, ShardStoreError
from shardstore.format.records import SnapshotId
from shardstore.tiers.fileops import FileOps

_EVERY_S: Final = 0.1
_EVERY_S_PER_RANK: Final = 1 / 4096
"""Ranks look for questions as rarely as is needed for rank 0 to hear some thousand of them a second."""


class _Question(msgspec.Struct, frozen=True):
    number: int
    id: SnapshotId

    @property
    def name(self) -> str:
        return f"kept-{self.number}"

    @property
    def label(self) -> str:
        return f"spilling {self.id}, whose memory is needed"


class KeptSnapshots:
    """Hears and answers on one rank, which asks as well. Idle until `watch`."""

    def __init__(self, session: Session, ops: FileOps) -> None:
        """No thread runs before the first question."""
        self._session = session
        self._ops = ops
        # Re-entrant: a question that is there already is heard while listening begins.
        self._lock = threading.RLock()
        self._next = 0
        self._wanted: list[SnapshotId] = []
        self._heard: Future[Any] | None = None
        self._worker: Worker[_Question] = Worker("kept", self._answer)
        if session.has_outer:
            session.memory.ask_spill = self.ask
            if session.has_only_near:
                self.watch()

    def watch(self) -> None:
        """Listen for questions: there is something now that may be asked for. Again is fine."""
        with self._lock:
            if self._heard is None and self._session.has_outer:
                self._listen()

    def ask(self, snapshot_id: SnapshotId) -> None:
        """Have all ranks spill this one. Does not wait; the memory tier hears what became of it."""
        with self._lock:
            self._wanted.append(snapshot_id)
            if self._heard is None:
                self._listen()
            self._propose()

    def stop(self, timeout_s: float) -> bool:
        """Answer nothing more than what was heard; False if that takes too long."""
        self._worker.stop()
        return self._worker.join(timeout_s)

    # ---------------------------------------------------------------- questions

    def _listen(self) -> None:
        every_s = _EVERY_S + _EVERY_S_PER_RANK * self._session.world_size
        self._heard = self._session.coordinator.watch([_ask_key(self._next)], every_s=every_s)
        self._heard.add_done_callback(self._hear)

    def _propose(self) -> None:
        """Try for the next number; another rank's question may get it, then this one's gets a later."""
        if self._wanted:
            question = msgspec.json.encode(self._wanted[0])
            self._session.coordinator.propose_later(_ask_key(self._next), question)

    def _hear(self, heard: Future[Any]) -> None:
        """On the thread of the key-value store's client."""
        if heard.cancelled() or heard.exception() is not None:
            return
        with self._lock:
            question = _Question(
                self._next, msgspec.json.decode(heard.result()[0], type=SnapshotId)
            )
            self._next += 1
            self._wanted = [i for i in self._wanted if i != question.id]
            self._listen()
            self._propose()
        self._worker.submit(question)

    # ------------------------------------------------------------------ answers

    def _answer(self, question: _Question) -> None:
        session = self._session
        try:
            self._ops.point("spill kept")
            sealed = self._write(question.id)
            self._ops.point("post kept")
            post_entry(
                session.coordinator,
                question.name,
                sealed.header,
                sealed.nbytes,
                sealed.digest,
                in_memory=True,
            )
        except Exception as error:  # noqa: BLE001 - told to all ranks, which then keep their copies
            self._tell(question, failure_of(error, session.rank))
        try:
            failure = self._decide(question) if session.rank == 0 else self._hear_outcome(question)
        except CoordinationError as error:
            session.memory.mark_stays(question.id)
            session.warn(
                "%s: the outcome is unknown, it stays in memory: %s", question.label, error
            )
            return
        self._finish(question, failure)

    def _tell(self, question: _Question, failure: Failure) -> None:
        try:
            self._session.coordinator.propose(_fail_key(question), msgspec.json.encode(failure))
        except CoordinationError as unreachable:
            self._session.warn(
                "%s failed (%s) and it cannot be told: %s",
                question.label, failure.cause, unreachable,
            )  # fmt: skip

    def _write(self, snapshot_id: SnapshotId) -> SealedShard:
        """This rank's file, from its slot; what is there already is not written again."""
        session = self._session
        if self._is_further_out(snapshot_id):
            reader = session.memory.open_shard(snapshot_id)
            if reader is not None:
                with reader:
                    return read_sealed_header(reader)
        started = time.monotonic()
        sealed = copy_sealed(session, session.outermost, snapshot_id)
        session.meter.add("write", sealed.nbytes, time.monotonic() - started)
        return sealed

    def _is_further_out(self, snapshot_id: SnapshotId) -> bool:
        session = self._session
        if session.catalog is not None:
            return session.catalog.state(snapshot_id) == "committed"
        return session.on_disk is not None and session.on_disk.disk.has(snapshot_id)

    def _decide(self, question: _Question) -> Failure | None:
        """On rank 0: wait for all ranks' files, publish, tell the outcome. None: committed."""
        session = self._session
        try:
            found = collect_entries(
                session, question.name, what=question.label, stop=_fail_key(question)
            )
            failure = found.failure or self._publish(question.id, found.shards)
        except CoordinationError as error:
            if not getattr(error, "missing_ranks", ()):
                raise
            failure = failure_of(error, session.rank)
        session.coordinator.propose(_outcome_key(question), msgspec.json.encode(failure))
        return failure

    def _publish(self, snapshot_id: SnapshotId, shards: dict[int, SealedShard]) -> Failure | None:
        session = self._session
        self._ops.point("publish kept")
        with session.retention_lock:  # `delete` either finds it published, or is known here
            if snapshot_id in session.aborted:
                return Failure(session.rank, "it was deleted meanwhile")
            if session.catalog is None:
                return None  # on the disks of all ranks
            keep_pins(session, snapshot_id)
            try:
                is_exclusive = session.catalog.is_exclusive
                manifest = manifest_of(shards, writer=session.writer, is_exclusive=is_exclusive)
                if session.catalog.publish(manifest):
                    return None
            except (ShardStoreError, OSError) as error:
                if session.catalog.state(snapshot_id) != "committed":
                    return failure_of(error, session.rank)
                return None
        return Failure(session.rank, "another process closed this attempt as aborted")

    def _hear_outcome(self, question: _Question) -> Failure | None:
        """Elsewhere: what rank 0 decided. It alone may, so giving up here decides nothing."""
        heard = self._session.coordinator.wait(
            [_outcome_key(question)], phase=question.label, ranks=[0]
        )
        assert not isinstance(heard, Stopped)
        return msgspec.json.decode(heard[0], type=Failure | None)

    def _finish(self, question: _Question, failure: Failure | None) -> None:
        session, snapshot_id = self._session, question.id
        session.coordinator.forget(entry_key(question.name, session.rank))
        session.coordinator.retire(question.name, [_fail_key(question), _outcome_key(question)])
        if failure is None:
            session.meter.count("spilled")
            self._mark(snapshot_id)
            session.memory.mark_safe(snapshot_id)
            session.log("%s has left memory, which was needed", snapshot_id)
            return
        session.memory.mark_stays(snapshot_id)
        if session.rank in (0, failure.rank):
            session.warn("%s failed, it stays in memory: %s", question.label, failure.describe())
        self._remove(snapshot_id)

    def _mark(self, snapshot_id: SnapshotId) -> None:
        """Without a root a mark says, beside the file, that all ranks had it; and the pin goes along."""
        session = self._session
        if session.catalog is None and snapshot_id in session.pinned:
            mark_near(session, snapshot_id, "pinned")
        if session.catalog is None and session.on_disk is not None:
            try:
                session.on_disk.disk.mark_complete(snapshot_id)
            except ShardStoreError as error:
                session.warn("%s", error)

    def _remove(self, snapshot_id: SnapshotId) -> None:
        """Remove what this rank wrote, unless it is a snapshot all the same."""
        session = self._session
        try:
            if session.catalog is None:
                if session.on_disk is not None:
                    session.on_disk.remove(snapshot_id, for_good=False)
            elif session.catalog.state(snapshot_id) not in ("committed", "damaged"):
                session.catalog.tier.remove_shard(snapshot_id, session.rank)
        except (ShardStoreError, OSError) as error:
            session.warn("%s", error)


def _ask_key(number: int) -> str:
    return f"kept-{number}/ask"


def _fail_key(question: _Question) -> str:
    return f"{question.name}/fail"


def _outcome_key(question: _Question) -> str:
    return f"{question.name}/outcome"
