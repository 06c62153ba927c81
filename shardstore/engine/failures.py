"""Failed saves, raised once on every rank at the same call (P6)."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

from shardstore.cluster.agreed import AgreedPoint, Patience
from shardstore.engine.session import Failure, PendingSave, Session
from shardstore.engine.transitions import lost
from shardstore.errors import SaveFailedError

_SHARE: Final = 0.5
"""How much of the timeout a save waits for the others' answer where to raise. A rank that never entered the
failed save never answers, and waits meanwhile for this rank in a later one: this rank must give up first."""


@dataclass(eq=False, slots=True)
class _Known:
    step: int
    failure: Failure
    point: AgreedPoint | None
    """Where to raise it; None: nowhere before `drain` or `close`."""

    def is_due(self, count: int) -> bool:
        """Whether save `count` raises it. Without an agreed point some rank is gone: who is left raises now."""
        return self.point is not None and (self.point.reached(count) or self.point.is_undecided())

    def is_untold(self) -> bool:
        """Not where every rank raised it by itself, in its own save."""
        return self.point is None or not self.point.all_flagged()


class Failures:
    """Failed saves that this rank has not raised yet.

    A rank hears of a failure at some moment of its own; which save raises it is agreed: the first one
    that no rank had entered when the last of them heard. `drain` and `close` raise what is left.
    """

    def __init__(self, session: Session, *, only_warn: bool) -> None:
        """`only_warn`: log instead of raising."""
        self._session = session
        self._only_warn = only_warn
        self._lock = threading.Lock()
        self._entered = 0
        self._known: list[_Known] = []

    def enter(self, count: int) -> None:
        """Save `count` begins."""
        with self._lock:
            self._entered = count

    def add(self, save: PendingSave, failure: Failure, *, is_borne: bool = False) -> None:
        """A save failed on some rank; called on every rank, in the background, before its future ends.

        With `is_borne` no save raises it, only `drain` or `close`.
        """
        is_here = failure.rank == self._session.rank
        lost(self._session, save, "failed", failure, is_warning=is_here or self._only_warn)
        if self._only_warn:
            return
        if is_borne:
            with self._lock:
                self._known.append(_Known(save.step, failure, None))
            return
        with self._lock:
            point = AgreedPoint(
                self._session.coordinator,
                f"raise/{save.count}",
                reached=self._entered,
                patience=self._patience,
            )
            point.signal(flag=save.raised is not None)
            self._known.append(_Known(save.step, failure, point))

    def _patience(self) -> Patience:
        session = self._session
        return Patience(session.in_time(session.timeout_s * _SHARE), is_total=session.is_ending)

    def due_at(self, count: int) -> SaveFailedError | None:
        """What save `count` must raise; waits for the other ranks' answer only after a failure."""
        with self._lock:
            known = list(self._known)
        return self._take([k for k in known if k.is_due(count)])

    def rest(self) -> SaveFailedError | None:
        """What `drain` or `close` must raise."""
        with self._lock:
            known = list(self._known)
        return self._take(known)

    def _take(self, due: list[_Known]) -> SaveFailedError | None:
        with self._lock:
            self._known = [k for k in self._known if k not in due]
        untold = [k for k in due if k.is_untold()]
        if not untold:
            return None
        first = untold[0]
        more = f" (and {len(untold) - 1} later saves failed as well)" if untold[1:] else ""
        return save_failed(first.step, first.failure, more)


def save_failed(step: int, failure: Failure, more: str = "") -> SaveFailedError:
    """The error of a failed save, the same text on every rank."""
    return SaveFailedError(
        f"the save of step {step} failed{more}; older snapshots are untouched. First cause, "
        f"{failure.describe()}",
        step=step,
        failed_ranks=failure.failed_ranks or (failure.rank,),
    )
