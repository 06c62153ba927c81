"""How a store ends: closed together, abandoned alone, or with the interpreter (P7)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from shardstore.engine.draining import drain
from shardstore.engine.failures import Failures
from shardstore.engine.flush import Flusher
from shardstore.engine.liveness import left
from shardstore.engine.saving import SavePipeline
from shardstore.engine.session import Session
from shardstore.errors import SaveFailedError, ShardStoreError
from shardstore.format.records import SnapshotId

_OWN_S: Final = 60.0
"""How long own seals and spills may take once the store was abandoned."""
_SEAL_S: Final = 10.0
"""How long an abandoned store tries to seal what was staged."""
_LAST_S: Final = 1.0
"""The most that leaving takes of a grace period's last part."""
_OTHERS_S: Final = 5.0
"""How long the interpreter's exit waits for outcomes that other ranks have a part in."""


class Leaver:
    """Ends one store, once."""

    def __init__(
        self,
        session: Session,
        pipeline: SavePipeline,
        failures: Failures,
        flusher: Flusher,
        on_gone: Callable[[], None],
    ) -> None:
        """`on_gone` runs when memory was given back or left for the restart."""
        self._session = session
        self._pipeline = pipeline
        self._failures = failures
        self._flusher = flusher
        self._on_gone = on_gone
        self._thread: threading.Thread | None = None

    def wait_outcomes(self, timeout_s: float | None) -> bool:
        """Wait until every save so far is settled; False if that took too long."""
        pending = self._pipeline.pending
        return not pending or drain(self._session, pending, timeout_s)

    def close(self, *, keep_memory: bool) -> SaveFailedError | None:
        """Drain, then leave together with the other ranks; returns what was not raised yet.

        In a grace period: flush, drain as long as there is time, and keep memory.
        """
        if self._session.is_ending:
            return self._close_in_time()
        if not self.wait_outcomes(None):
            return self._close_in_time()
        error = self._failures.rest()
        timeout_s = self._session.timeout_s
        self._pipeline.stop(timeout_s=timeout_s)
        keep_memory = keep_memory or self._has_only_copy()
        unmarked = [] if keep_memory else self._session.memory.unmark()
        clean = self._session.coordinator.close(timeout_s)
        must_keep = keep_memory or not clean or self._session.is_ending
        if must_keep:
            self._mark_again(unmarked)
        self._give_back(keep_memory=must_keep)
        return error

    def _has_only_copy(self) -> bool:
        """Whether the newest that this run saved for good is in memory alone, as after an outage of the root."""
        session = self._session
        newest = session.memory.newest_complete
        if newest is None or newest.run != session.run or session.memory.folder is None:
            return False
        is_here = newest in session.memory.ids() and not session.memory.is_kept(newest)
        if not session.has_outer or not is_here or session.memory.is_safe(newest):
            return False
        session.warn(
            "%s stays in memory: it is not on the %s. A restart restores it from there",
            newest, session.outermost.tier,
        )  # fmt: skip
        return True

    def _close_in_time(self) -> SaveFailedError | None:
        session = self._session
        flushed = self._flusher.run("flush/close", session.in_time(session.timeout_s))
        is_drained = self.wait_outcomes(session.in_time(session.timeout_s))
        error = self._failures.rest()
        for save in self._pipeline.pending:
            if flushed is not None and save.id is not None and save.id.name == flushed.id:
                continue  # only older ones keep it from being settled
            session.warn(
                "%s stays in memory: it was not on the %s in time",
                save.id or save.label, session.outermost.tier if session.has_outer else "other ranks",
            )  # fmt: skip
        last_s = max(self._least_s(), session.in_time(session.timeout_s))
        session.coordinator.close(last_s, is_total=True)
        if is_drained and self._pipeline.stop_own(max(self._least_s(), session.in_time(_OWN_S))):
            self._give_back(keep_memory=True)
        else:
            self._pipeline.let_go()
            self._on_gone()  # what still is written ends with the process; its memory stays
        return error

    def _least_s(self) -> float:
        """Time for leaving together when all that may be worked for is used up."""
        grace = self._session.grace
        return _LAST_S if grace is None else min(_LAST_S, grace.margin_s / 3)

    def abandon(self) -> None:
        """Leave without waiting for any rank; own seals and spills go on in the background."""
        if self._thread is None:
            # Not a daemon: the process must not end before the others have read the last decision.
            self._thread = threading.Thread(
                target=self._finish_own, name="shardstore-leave", daemon=False
            )
            self._thread.start()

    def join(self) -> None:
        """Wait for what `abandon` began."""
        if self._thread is not None:
            self._thread.join(self._session.in_time(_OWN_S))

    def finish_at_exit(self) -> None:
        """The interpreter ends: finish own spills; outcomes of others only if they come soon."""
        deadline = time.monotonic() + self._session.in_time(_OWN_S)
        for save in self._pipeline.pending:
            save.spilled.wait(max(0.0, deadline - time.monotonic()))
        patience_s = _OWN_S if self._session.world_size == 1 else _OTHERS_S
        self.wait_outcomes(self._session.in_time(patience_s))
        error = self._failures.rest()
        if error is not None:
            logging.getLogger("shardstore").error("%s", error)

    def _finish_own(self) -> None:
        session = self._session
        if session.is_ending:
            self._flusher.wait_started(session.in_time(_OWN_S))  # it needs the other ranks
        if session.world_size == 1:
            self.wait_outcomes(session.in_time(_OWN_S))
        # A first save needs the others once, for the run's number, before it can be sealed.
        deadline = time.monotonic() + session.in_time(min(_SEAL_S, session.timeout_s))
        for save in self._pipeline.pending:
            save.sealed.wait(max(0.0, deadline - time.monotonic()))
        session.coordinator.abandon()
        if self._pipeline.stop_own(session.in_time(_OWN_S)):
            self._give_back(keep_memory=True)

    def _mark_again(self, unmarked: list[SnapshotId]) -> None:
        """Memory stays after all."""
        try:
            for snapshot_id in unmarked:
                self._session.memory.mark_complete(snapshot_id)
        except ShardStoreError as error:
            self._session.warn("%s", error)

    def _give_back(self, *, keep_memory: bool) -> None:
        memory = self._session.memory
        self._session.ops.point("give back")
        memory.close(keep=keep_memory)
        memory.leave(remove=not keep_memory)
        if self._session.own_catalog is not None:
            self._session.own_catalog.tier.close()
        left(self._session.nonce)
        self._on_gone()
