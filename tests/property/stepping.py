"""Actors that take turns at single operations of storage, in an order that a seed decides."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from shardstore.testing import CountingOps

_TURN_S = 60.0


class Dead(BaseException):
    """The process of an actor ended: nothing in it may handle that."""


class Actor:
    """One thread, which does one operation per turn, through `ops`."""

    def __init__(self, name: str, life: Callable[[Actor], None], speed: float) -> None:
        self.name = name
        self.speed = speed
        self.is_over = False
        self.error: BaseException | None = None
        self.ops = CountingOps(lambda _name, _number: self.step(), count_reads=True)
        self.ops.arm()
        self._life = life
        self._is_dead = False
        self._ready: Callable[[], bool] = lambda: True
        self._turn = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        return not self.is_over and (self._is_dead or self._ready())

    def step(self, until: Callable[[], bool] = lambda: True) -> None:
        """On the actor's thread: let the others go on, and come back once `until` holds."""
        if self._is_dead:
            raise Dead  # not even clean-up
        self._ready = until
        self._back.release()
        self._take()

    def go(self) -> None:
        """On the scheduler's thread: let this one do one operation."""
        self._turn.release()
        assert self._back.acquire(timeout=_TURN_S), f"{self.name} does not come back"

    def kill(self) -> None:
        """No operation of this one has an effect any more."""
        self._is_dead = True
        while not self.is_over:
            self.go()
        self._thread.join(_TURN_S)

    def _take(self) -> None:
        assert self._turn.acquire(timeout=_TURN_S)
        if self._is_dead:
            raise Dead

    def _run(self) -> None:
        try:
            self._take()
            self._life(self)
        except Dead:
            pass
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error
        finally:
            self.is_over = True
            self._back.release()


def take_turns(
    chance: random.Random,
    actors: list[Actor],
    *,
    after_each: Callable[[], None],
    deaths: dict[int, list[Actor]],
) -> None:
    """Let ready actors do one operation at a time until none can; `deaths` come at their turn."""
    turn = 0
    try:
        while True:
            turn += 1
            for victim in deaths.get(turn, ()):
                if not victim.is_over:
                    victim.kill()
            ready = [actor for actor in actors if actor.is_ready]
            if not ready:
                return
            chance.choices(ready, [actor.speed for actor in ready])[0].go()
            after_each()
    finally:
        for actor in actors:
            if not actor.is_over:
                actor.kill()
