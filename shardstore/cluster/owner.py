"""The one thread that talks to the key-value store (P2); everybody else waits on futures.

With the store's host stopped, a client call blocks without end in spite of timeouts, and a blocking
wait holds the client's lock against other threads. So calls are queued here, and callers bound their
own waiting.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from shardstore.cluster.kv import KeyValueStore
from shardstore.errors import CoordinationError

T = TypeVar("T")

_MIN_POLL_S: Final = 0.001
_MAX_POLL_S: Final = 0.05
_PROGRESS_EVERY_S: Final = 0.5
_END_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Stopped:
    """A wait that ended because its stop key appeared."""

    value: bytes


@dataclass(eq=False, slots=True)
class Watch:
    """Keys that somebody waits for; only the first outstanding one is polled."""

    keys: Sequence[str]
    stop: str | None
    future: Future[list[bytes] | Stopped]
    every_s: float = 0.0
    """Look no more often than this."""
    found: list[bytes] = field(default_factory=list)
    next_at: float = 0.0

    def poll(self, store: KeyValueStore) -> bool:
        """Look if it is time to; True when there is nothing left to look for."""
        if self.future.cancelled():
            return True
        if self.every_s:
            now = time.monotonic()
            if now < self.next_at:
                return False
            self.next_at = now + self.every_s
        while len(self.found) < len(self.keys):
            value = store.get(self.keys[len(self.found)])
            if value is None:
                break
            self.found.append(value)
        if len(self.found) == len(self.keys):
            _settle(self.future, list(self.found))
            return True
        stopped = store.get(self.stop) if self.stop is not None else None
        if stopped is not None:
            _settle(self.future, Stopped(stopped))
            return True
        return False


def _settle(future: Future[Any], value: object) -> None:
    try:
        if not future.done() and future.set_running_or_notify_cancel():
            future.set_result(value)
    except (InvalidStateError, RuntimeError):
        pass  # `_fail` was faster, on the thread that leaves


def _copied(error: CoordinationError) -> CoordinationError:
    """One for each future: whoever raises it adds the frames that it passes."""
    own = copy.copy(error)
    own.__cause__ = error.__cause__
    return own


class StoreOwner:
    """Runs queued calls in order and polls watches, with back-off from 1 to 50 ms."""

    def __init__(self, store: KeyValueStore, rank: int) -> None:
        """The thread starts at once."""
        self._store = store
        self._rank = rank
        self._calls: deque[tuple[Callable[[KeyValueStore], Any], Future[Any]]] = deque()
        self._watches: list[Watch] = []
        self._wake = threading.Condition()
        self._ended: CoordinationError | None = None
        self._bytes = 0
        self._told_bytes = 0
        self._told_at = 0.0
        self._thread = threading.Thread(target=self._run, name="shardstore-keys", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[KeyValueStore], T]) -> Future[T]:
        """Queue a call on the store."""
        future: Future[T] = Future()
        with self._wake:
            if self._ended is not None:
                future.set_exception(_copied(self._ended))
            else:
                self._calls.append((function, future))
                self._wake.notify()
        return future

    def watch(
        self, keys: Sequence[str], stop: str | None, *, every_s: float = 0.0
    ) -> Future[list[bytes] | Stopped]:
        """Wait for keys without blocking; cancel the future to give up."""
        future: Future[list[bytes] | Stopped] = Future()
        with self._wake:
            if self._ended is not None:
                future.set_exception(_copied(self._ended))
            else:
                self._watches.append(Watch(keys, stop, future, every_s))
                self._wake.notify()
        return future

    def progress(self, nbytes: int) -> None:
        """Count work done; told to the others about twice a second."""
        self._bytes += nbytes  # a lost update between threads only tells a smaller number
        if self._bytes - self._told_bytes == nbytes:
            with self._wake:
                self._wake.notify()

    def relay(self) -> None:
        """Tell those who wait for rank 0 that it waits for a rank that works."""
        self.call(lambda store: store.add(RELAY_KEY, 1))

    def end(self, reason: str) -> None:
        """Do what is queued, then refuse further calls; does not wait long for a call that hangs."""
        try:
            self.call(lambda _: None).result(_END_S)
        except (CoordinationError, FutureTimeoutError):
            pass
        self._fail(CoordinationError(reason, phase="leaving"))
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_S)

    def _fail(self, error: CoordinationError) -> None:
        with self._wake:
            if self._ended is None:
                self._ended = error
            futures: list[Future[Any]] = [future for _, future in self._calls]
            futures += [watch.future for watch in self._watches]
            self._calls.clear()
            self._watches.clear()
            self._wake.notify()
        for future in futures:
            try:
                if not future.done() and future.set_running_or_notify_cancel():
                    future.set_exception(_copied(error))
            except (InvalidStateError, RuntimeError):
                pass  # the owner's thread was faster

    def _run(self) -> None:
        pause_s = _MIN_POLL_S
        while True:
            with self._wake:
                if not self._calls and self._ended is None:
                    self._wake.wait(self._pause(pause_s))
                if self._ended is not None:
                    return
                calls = list(self._calls)
                watches = list(self._watches)
                # Calls stay queued until done, so that `_fail` reaches them if one hangs or breaks.
            try:
                for function, future in calls:
                    self._perform(function, future)
                done = [watch for watch in watches if watch.poll(self._store)]
                self._tell_progress()
            except Exception as error:  # noqa: BLE001 - whatever breaks the client ends it for all
                gone = CoordinationError(
                    f"store host (rank 0) is gone: {type(error).__name__}: {error}",
                    failed_ranks=(0,),
                    phase="talking to the other ranks",
                )
                gone.__cause__ = error
                self._fail(gone)
                return
            with self._wake:
                for watch in done:
                    if watch in self._watches:
                        self._watches.remove(watch)
            pause_s = _MIN_POLL_S if calls or done else min(_MAX_POLL_S, pause_s * 1.5)

    def _perform(self, function: Callable[[KeyValueStore], Any], future: Future[Any]) -> None:
        result = None
        if not future.cancelled():
            result = function(self._store)
        with self._wake:
            if self._calls and self._calls[0][1] is future:
                self._calls.popleft()
        _settle(future, result)

    def _pause(self, pause_s: float) -> float | None:
        pauses = [pause_s] if any(not watch.every_s for watch in self._watches) else []
        if self._bytes != self._told_bytes:
            pauses.append(_PROGRESS_EVERY_S)
        now = time.monotonic()
        pauses += [max(_MIN_POLL_S, w.next_at - now) for w in self._watches if w.every_s]
        return min(pauses, default=None)

    def _tell_progress(self) -> None:
        now = time.monotonic()
        if self._bytes != self._told_bytes and now - self._told_at >= _PROGRESS_EVERY_S:
            self._told_bytes, self._told_at = self._bytes, now
            self._store.set(progress_key(self._rank), str(self._told_bytes).encode())


RELAY_KEY: Final = "progress/relay"
"""Where rank 0 tells that some rank which it waits for works: never counted as work of its own."""


def progress_key(rank: int) -> str:
    """Where a rank tells how many bytes it has worked through."""
    return f"progress/{rank}"
