"""The newest snapshot that all ranks have, safe before a deadline: finished or invisible (P7).

Ranks agree on it by one write-once key, no collective: each by itself might choose another one, and none
would be complete. All of them write that one first; older ones give way meanwhile. Nothing is taken back at the
deadline: what is not published then is not listed, and its memory stays for the restart.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Final

import msgspec

from shardstore.cluster.coordination import Stopped
from shardstore.engine.commit import Outcome, commit_on_rank_0, fail_key
from shardstore.engine.kept import KeptSnapshots
from shardstore.engine.listing import SnapshotInfo
from shardstore.engine.saving import SavePipeline
from shardstore.engine.session import PendingSave, Session
from shardstore.errors import CoordinationError, ShardStoreError
from shardstore.format.records import SnapshotId
from shardstore.tiers.fileops import FileOps

_AGREE_SHARE: Final = 0.25
"""Of the time: then each rank writes the newest that it has itself."""
_SEAL_SHARE: Final = 0.125
"""Of the time: how long a flush waits for what was staged to get its name."""
_LOOK_S: Final = 0.05
_START_S: Final = 1.0
"""Longest time between a signal and the flush that it starts."""


class _Offer(msgspec.Struct, frozen=True):
    """A snapshot that a rank has, and whether it can have it further out in time."""

    id: SnapshotId
    fits: bool


class Flusher:
    """Flushes on one rank; one flush at a time. Any thread."""

    def __init__(
        self, session: Session, pipeline: SavePipeline, kept: KeptSnapshots, ops: FileOps
    ) -> None:
        """Nothing runs yet."""
        self._session = session
        self._pipeline = pipeline
        self._kept = kept
        self._ops = ops
        self._changed = threading.Condition()
        self._turns: deque[str] = deque()
        """Names of flushes that run or wait, first come, first served: in the same order on all ranks."""
        self._num_begun, self._num_over = 0, 0

    def start(self, name: str, timeout_s: float) -> None:
        """`run`, in the background. Does not wait."""
        with self._changed:
            self._num_begun += 1
            self._turns.append(name)
            self._changed.notify_all()
        threading.Thread(
            target=self._run_behind, args=(name, timeout_s), name="shardstore-flush", daemon=True
        ).start()

    def _run_behind(self, name: str, timeout_s: float) -> None:
        try:
            self._run_in_turn(name, timeout_s)
        finally:
            with self._changed:
                self._num_over += 1
                self._changed.notify_all()

    def wait_started(self, timeout_s: float) -> None:
        """Wait until what was started, and something was or is about to be, is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_begun > 0, min(timeout_s, _START_S))
            self._changed.wait_for(lambda: self._num_over == self._num_begun, timeout_s)

    def run(self, name: str, timeout_s: float) -> SnapshotInfo | None:
        """Have the newest snapshot of all ranks safe in the outermost tier.

        Args:
            name: Used once; equal on all ranks.
            timeout_s: How long it may take. It never raises for what does not work: what was saved is
                told by its own save.

        Returns:
            What is safe now; None if there is nothing, or it took too long.
        """
        with self._changed:
            self._turns.append(name)
        return self._run_in_turn(name, timeout_s)

    def _run_in_turn(self, name: str, timeout_s: float) -> SnapshotInfo | None:
        until = time.monotonic() + timeout_s
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: self._turns[0] == name, timeout_s):
                    return None
            return self._run(name, until) if self._session.has_outer else None
        finally:
            with self._changed:
                self._turns.remove(name)
                self._changed.notify_all()

    def _run(self, name: str, until: float) -> SnapshotInfo | None:
        session, started = self._session, time.monotonic()
        try:
            self._ops.point("flush")
            chosen = self._choose(name, until)
            if chosen is None:
                session.log("flush: no snapshot of all ranks can be further out than it is")
                return None
            info = self._bring_out(chosen, until)
            tier, seconds = session.outermost.tier, time.monotonic() - started
            if info is None:
                session.warn(
                    "flush: %s is not on the %s after %.1f s; a restart finds it if memory survives",
                    chosen, tier, seconds,
                )  # fmt: skip
            else:
                session.log("flush: %s is on the %s after %.1f s", chosen, tier, seconds)
            return info
        except (ShardStoreError, OSError) as error:
            session.warn("flush: %s", error)
            return None

    # ------------------------------------------------------------------ choice

    def _choose(self, name: str, until: float) -> SnapshotId | None:
        session = self._session
        offers = self._offers(until)
        left = max(0.0, until - time.monotonic())
        self._ops.point("post staged")
        try:
            stored = session.coordinator.gather_decide(
                f"{name}/staged",
                msgspec.json.encode(offers),
                _newest_of_all,
                phase="agreeing on what to flush",
                timeout_s=left * _AGREE_SHARE,
                is_total=True,
            )
        except CoordinationError as error:
            session.warn("flush: %s. This rank writes the newest that it has", error)
            return max((o.id for o in offers if o.fits), key=lambda i: i.order, default=None)
        return msgspec.json.decode(stored, type=SnapshotId | None)

    def _offers(self, until: float) -> list[_Offer]:
        session = self._session
        pending = self._pipeline.pending
        named_by = time.monotonic() + (until - time.monotonic()) * _SEAL_SHARE
        for save in pending:
            save.sealed.wait(max(0.0, named_by - time.monotonic()))
        rate = session.meter.phase("write")
        left_bytes: dict[SnapshotId, int] = {}
        newest = session.memory.newest_complete
        for snapshot_id in session.memory.ids():
            if newest is not None and snapshot_id.order < newest.order:
                continue
            reader = session.memory.open_shard(snapshot_id)
            if reader is not None:
                with reader:
                    is_safe = session.memory.is_safe(snapshot_id)
                    left_bytes[snapshot_id] = 0 if is_safe else reader.nbytes
        for save in pending:
            if save.id is not None and save.raised is None and save.broken is None:
                left_bytes[save.id] = save.root_nbytes - save.written_bytes
        left = max(0.0, until - time.monotonic())
        speed = rate.nbytes / rate.seconds if rate.seconds > 0 else 0.0
        return [
            _Offer(snapshot_id, fits=not speed or nbytes / speed <= left)
            for snapshot_id, nbytes in left_bytes.items()
        ]

    # ------------------------------------------------------------------- write

    def _bring_out(self, snapshot_id: SnapshotId, until: float) -> SnapshotInfo | None:
        urgency = self._session.urgency
        for save in self._pipeline.pending:
            if save.id == snapshot_id and save.persist:
                with urgency.prefer(snapshot_id, until=until):
                    self._pipeline.spill_now(save, until=until)
                    return self._settle(save, until)
        with urgency.prefer(snapshot_id, until=until, is_kept=True):
            return self._ask_for(snapshot_id, until)

    def _settle(self, save: PendingSave, until: float) -> SnapshotInfo | None:
        """Publish on rank 0, past older saves that still wait; hear of it elsewhere."""
        session = self._session
        if session.rank == 0 and not self._publish(save, until):
            return None
        heard = session.coordinator.watch([f"outcome/{save.count}"])
        try:
            while time.monotonic() < until:
                if save.committed.done():  # whoever was told has removed the key
                    return save.committed.result()
                try:
                    stored = heard.result(_LOOK_S)
                except FutureTimeoutError:
                    continue
                assert not isinstance(stored, Stopped)
                outcome = msgspec.json.decode(stored[0], type=Outcome)
                return self._info(save) if outcome.failure is None else None
        finally:
            heard.cancel()
        return None

    def _publish(self, save: PendingSave, until: float) -> bool:
        """False if not all ranks were in time; the save itself goes on."""
        session = self._session
        while save.completion is None:
            left = until - time.monotonic()
            if left <= 0 or save.settled.wait(min(left, _LOOK_S)):
                break
        if save.settled.is_set():
            return True
        if save.completion is None or save.completion.failure is not None:
            return False
        heard = session.coordinator.watch(
            [f"durable/{save.count}/{rank}" for rank in range(session.world_size)],
            stop=fail_key(save),
        )
        try:
            # The commit behind may be faster, and the keys be gone before this looks at them.
            while save.outcome is None:
                if time.monotonic() >= until:
                    return False
                with suppress(FutureTimeoutError):
                    if isinstance(heard.result(_LOOK_S), Stopped):
                        return False
                    break
        finally:
            heard.cancel()
        self._ops.point("publish flushed")
        return commit_on_rank_0(session, save).failure is None

    def _ask_for(self, snapshot_id: SnapshotId, until: float) -> SnapshotInfo | None:
        """What only memory has: of persist=False, or of an earlier run. All ranks spill it when asked."""
        session = self._session
        memory = session.memory
        if not memory.is_safe(snapshot_id):
            self._kept.watch()
            if session.rank == 0:
                self._kept.ask(snapshot_id)
            pause = threading.Event()
            while not memory.is_safe(snapshot_id):
                if time.monotonic() >= until:
                    return None
                pause.wait(_LOOK_S)
        with session.lock:
            info = session.complete.get(snapshot_id)
        if info is None:
            return None
        return msgspec.structs.replace(info, tiers=(*info.tiers, session.outermost.tier))

    def _info(self, save: PendingSave) -> SnapshotInfo:
        assert save.id is not None
        return SnapshotInfo(
            step=save.step,
            id=save.id.name,
            tiers=("memory", self._session.outermost.tier),
            nbytes=save.nbytes,
            created=save.created,
            pinned=False,
            metadata=save.metadata,
        )


def _newest_of_all(values: list[bytes]) -> bytes:
    """On rank 0: the newest that every rank has and can finish."""
    offers = [msgspec.json.decode(value, type=list[_Offer]) for value in values]
    common = set.intersection(*({o.id for o in each if o.fits} for each in offers))
    return msgspec.json.encode(max(common, key=lambda i: i.order, default=None))
