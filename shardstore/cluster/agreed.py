"""A point in a counted sequence of calls that all ranks reach with the same answer (P6).

A rank hears of an event at a moment of its own. It then *freezes*: it posts the last call that it had
answered "no", in the same critical section, so that no call slips in between. Rank 0 puts the point
behind the latest of them; frozen ranks wait for it before they answer later calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec

from shardstore.cluster.coordination import Coordinator
from shardstore.cluster.owner import Stopped
from shardstore.errors import CoordinationError


class _Reached(msgspec.Struct, frozen=True):
    at: int | None
    flag: bool


class _Point(msgspec.Struct, frozen=True):
    at: int | None
    """None: no point could be agreed."""
    all_flagged: bool


class Patience(NamedTuple):
    """How long to wait for other ranks."""

    timeout_s: float
    is_total: bool = False
    """Whatever their progress."""


class AgreedPoint:
    """One agreement. `reached` answers alike on every rank for the same call number.

    Condition: call k never waits for a later call of another rank.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        name: str,
        *,
        reached: int | None,
        patience: Callable[[], Patience],
        what: str = "where to raise",
    ) -> None:
        """Unfrozen.

        Args:
            coordinator: Of this rank.
            name: Used once; equal on all ranks.
            reached: Number of the last call that began already; None: none did.
            patience: How long to wait for the point, asked when the wait begins; then "no point" is proposed.
            what: What is agreed on, for messages.
        """
        self._coordinator = coordinator
        self._name = name
        self._patience = patience
        self._what = what
        self._lock = threading.Lock()
        self._reached = reached
        self._frozen = False
        self._is_deciding = False
        self._point: _Point | None = None

    def signal(self, *, flag: bool = False) -> None:
        """This rank has heard of the event. `flag` is a fact that `all_flagged` combines."""
        self.freeze(flag=flag)
        with self._lock:
            must_decide = self._coordinator.rank == 0 and not self._is_deciding
            self._is_deciding = True
        if must_decide:
            ranks = range(self._coordinator.world_size)
            heard = self._coordinator.watch([f"{self._name}/reached/{rank}" for rank in ranks])
            heard.add_done_callback(self._decide)

    def freeze(self, *, flag: bool = False) -> None:
        """Answer no further call before the point is known; this rank's last one is told to the others."""
        with self._lock:
            if self._frozen:
                return
            self._frozen = True
            mine = msgspec.json.encode(_Reached(self._reached, flag))
            self._coordinator.post(f"{self._name}/reached/{self._coordinator.rank}", mine)

    def _decide(self, heard: Future[Any]) -> None:
        """On rank 0's owner thread: the point is behind the latest call of any rank."""
        if heard.cancelled() or heard.exception() is not None:
            return
        posts = [msgspec.json.decode(value, type=_Reached) for value in heard.result()]
        latest = max((post.at for post in posts if post.at is not None), default=-1)
        point = _Point(latest + 1, all(post.flag for post in posts))
        self._coordinator.propose_later(f"{self._name}/point", msgspec.json.encode(point))

    def reached(self, number: int) -> bool:
        """Whether call `number` is at or past the point; numbers must not decrease."""
        with self._lock:
            if not self._frozen:
                self._reached = number
                return False
            if self._reached is not None and number <= self._reached:
                return False
        at = self._await().at
        return at is not None and number >= at

    def is_undecided(self) -> bool:
        """Whether no point could be agreed, because a rank is missing; waits for the answer."""
        return self._await().at is None

    def all_flagged(self) -> bool:
        """Whether every rank set its flag; waits for the point."""
        return self._await().all_flagged

    def _await(self) -> _Point:
        if self._point is None:
            self._point = self._ask()
        return self._point

    def _ask(self) -> _Point:
        key = f"{self._name}/point"
        timeout_s, is_total = self._patience()
        try:
            values = self._coordinator.wait(
                [key],
                phase=f"agreeing on {self._what}",
                ranks=[0],
                timeout_s=timeout_s,
                is_total=is_total,
            )
            assert not isinstance(values, Stopped)
            stored = values[0]
        except CoordinationError:
            nothing = msgspec.json.encode(_Point(None, all_flagged=False))
            try:
                stored = self._coordinator.propose(key, nothing, is_hurried=is_total)
            except CoordinationError:
                return _Point(None, all_flagged=False)
        return msgspec.json.decode(stored, type=_Point)
