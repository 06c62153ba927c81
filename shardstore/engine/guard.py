"""What a trainer asks in its loop while the scheduler may take its machine away (P6, P7)."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from types import TracebackType

from shardstore.cluster.preemption import Grace, Notice, PreemptionWatch, StopPoint
from shardstore.engine.flush import Flusher
from shardstore.engine.plan import check_step
from shardstore.engine.session import Session
from shardstore.errors import ShardStoreError


class PreemptionGuard:
    """Listens for the scheduler's signal on all ranks. A context manager; made by `guard_preemption`.

    Once a signal has come to any rank, every rank flushes the newest snapshot that all have, in the background,
    and `should_stop` becomes true on all of them at the same step.
    """

    def __init__(
        self,
        session: Session,
        flusher: Flusher,
        *,
        name: str,
        grace_s: float,
        signals: Sequence[signal.Signals],
        earlier: PreemptionGuard | None = None,
    ) -> None:
        """Listen to nothing yet. `name` is used once, equal on all ranks; `earlier` is the guard before this one."""
        self._session = session
        self._flusher = flusher
        self._name = name
        self._grace = Grace(grace_s)
        self._watch = PreemptionWatch(session.coordinator, name, self._grace, signals, self._heard)
        self._stop = StopPoint(session.coordinator, name, self._grace)
        self._pid = os.getpid()
        self._state = "new"
        self._earlier = earlier
        self.later: PreemptionGuard | None = None
        """The guard after this one: it is told what this one still hears."""
        if earlier is not None:
            earlier.later = self

    def __enter__(self) -> PreemptionGuard:
        """Listen. Only the main thread can.

        Raises:
            ValueError: Not on the main thread, or another guard listens in this process.
            ShardStoreError: It was entered before.
        """
        if self._state != "new":
            raise ShardStoreError("a guard is entered once: call guard_preemption again")
        earlier = self._earlier
        if earlier is not None and earlier.was_left:
            earlier.release()  # its signal, if one has come, is known
        self._watch.start()
        if earlier is not None and earlier.is_preempted:
            self.follow(earlier.remaining_s)
        self._session.grace = self._grace
        self._state = "on"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the signals to whoever had them, unless one has come: then the store's `close` does that."""
        if os.getpid() != self._pid:
            return  # a forked child that leaves the `with` of its parent
        self._state = "left"
        self._stop.leave()
        if not (self._grace.has_begun or self._watch.has_caught):
            self._watch.release()

    def should_stop(self, step: int) -> bool:
        """Whether to end the loop at this step, after a last `save`: the same answer on all ranks.

        Every rank asks at the same steps, at a step's boundary, such that what one rank does in step k never
        waits for a later step of another rank. Costs next to nothing until a signal has come to some rank; then it
        waits for the ranks to agree, about a second.

        Args:
            step: The step that was just done.

        Raises:
            ValueError: `step` is not an integer from 0 on.
            ShardStoreError: The guard is not entered, or was left.
        """
        if self._state != "on" or os.getpid() != self._pid:
            raise ShardStoreError(
                "should_stop was called outside of the `with` of its guard_preemption"
            )
        answer = self._stop.ask(check_step(step))
        if answer and not self._session.is_stopping:
            self._session.is_stopping = True
            self._session.log(
                "all ranks stop at step %d, with %.1f s left", step, self._grace.remaining_s
            )
        return answer

    @property
    def is_preempted(self) -> bool:
        """Whether a signal has come to some rank, as this rank knows. May differ between ranks: steers no collective."""
        return self._grace.has_begun

    @property
    def remaining_s(self) -> float:
        """Seconds until the scheduler kills: infinite until a signal has come, never below 0."""
        return self._grace.remaining_s

    @property
    def was_left(self) -> bool:
        """Whether its `with` is over."""
        return self._state == "left"

    def follow(self, remaining_s: float) -> None:
        """The guard before this one knows of a signal, perhaps since its `with` was left (for that guard)."""
        if self._grace.begin(late_s=self._grace.grace_s - remaining_s):
            self._stop.hear()
            if self.later is not None:
                self.later.follow(remaining_s)

    def listen_again(self) -> None:
        """While the store closes: what is still written deserves the same notice (for the store)."""
        if self._state == "left":
            self._watch.listen_again()

    def release(self) -> None:
        """Put the signal handlers back, whatever has come (for the store)."""
        self._watch.release()

    def _heard(self, notice: Notice) -> None:
        session = self._session
        if notice.rank == session.rank:
            session.warn(
                "%s received: %.1f s are left. The newest snapshot of all ranks is flushed; should_stop "
                "tells all ranks where to stop",
                notice.signal, self._grace.remaining_s,
            )  # fmt: skip
        else:
            session.log("rank %d (%s) received %s", notice.rank, notice.host, notice.signal)
        if self.later is not None:
            self.later.follow(self._grace.remaining_s)
        # Before anybody can know where to stop: all ranks flush in the same order.
        self._flusher.start(f"{self._name}/flush", self._grace.usable_s)
        self._stop.hear()

    def __repr__(self) -> str:
        left = f", {self.remaining_s:.1f} s left" if self.is_preempted else ""
        return f"PreemptionGuard({self._state}, grace {self._grace.grace_s:g} s{left})"
