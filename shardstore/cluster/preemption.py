"""The scheduler's notice: how much time is left, and at which step all ranks stop. Knows nothing of stores."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from shardstore.cluster.agreed import AgreedPoint, Patience
from shardstore.cluster.coordination import Coordinator
from shardstore.cluster.signals import SignalCatcher
from shardstore.errors import shown

_POLL_S: Final = 0.5
_POLL_S_PER_RANK: Final = 1 / 2048
"""Ranks look for a signal of another rank as rarely as is needed for rank 0 to hear some thousand a second."""
_MARGIN_SHARE: Final = 0.15
_MARGIN_S: Final = 3.0
"""Kept for the process to end in: at most, and as a share of the grace period."""
_STEPS: Final = 1 << 40
"""More than there are steps: a rank that goes back to an earlier one begins a new lap of so many numbers."""


def check_signals(signals: object) -> tuple[signal.Signals, ...]:
    """Validate what to listen for.

    Raises:
        ValueError: None at all, no signal, or one that no process can catch.
    """
    given = [signals] if isinstance(signals, int) else signals
    if not isinstance(given, Sequence) or isinstance(given, str | bytes) or not given:
        raise ValueError(
            f"signals must be some of signal.SIGTERM, signal.SIGUSR1, ..., got {shown(signals)}"
        )
    found = []
    for one in given:
        try:
            found.append(signal.Signals(one))
        except ValueError:
            raise ValueError(f"signals: {shown(one)} is no signal") from None
        if found[-1] in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"signals: no process can catch {found[-1].name}")
    return tuple(dict.fromkeys(found))


class Notice(msgspec.Struct, frozen=True):
    """What the rank that got a signal tells the others."""

    rank: int
    signal: str
    host: str


class Grace:
    """The time from the first signal until the scheduler kills. Any thread."""

    def __init__(self, grace_s: float) -> None:
        """No signal yet. `grace_s`: from the signal to the kill, in seconds."""
        self.grace_s = grace_s
        self.margin_s = min(_MARGIN_S, _MARGIN_SHARE * grace_s)
        self._deadline = math.inf
        self._lock = threading.Lock()

    def begin(self, *, late_s: float = 0.0) -> bool:
        """The signal is here, or was heard `late_s` seconds ago; False if there was one already."""
        with self._lock:
            if self._deadline < math.inf:
                return False
            self._deadline = time.monotonic() + self.grace_s - late_s
            return True

    @property
    def has_begun(self) -> bool:
        """Whether a signal has come, to any rank."""
        return self._deadline < math.inf

    @property
    def is_over(self) -> bool:
        """Whether the time is up, and the process still there."""
        return self._deadline <= time.monotonic()

    @property
    def remaining_s(self) -> float:
        """Seconds until the kill: infinite before a signal, never below 0."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def usable_s(self) -> float:
        """Seconds that may be worked for, so that there is time to end in."""
        return max(0.0, self.remaining_s - self.margin_s)


class StopPoint:
    """The step from which on all ranks stop (P6)."""

    def __init__(self, coordinator: Coordinator, name: str, grace: Grace) -> None:
        """Nobody has asked yet. `name` is used once, equal on all ranks."""
        self._point = AgreedPoint(
            coordinator,
            f"{name}/stop",
            reached=None,
            patience=lambda: Patience(grace.usable_s, is_total=True),
            what="the step to stop at",
        )
        self._last = -1
        self._lap = 0

    def hear(self) -> None:
        """A signal has come to some rank."""
        self._point.signal()

    def leave(self) -> None:
        """This rank will not ask again."""
        self._point.freeze()

    def ask(self, step: int) -> bool:
        """Whether to stop at `step`, which all ranks ask for in the same order; earlier ones may come again."""
        if step < self._last:
            self._lap += 1
        self._last = step
        return self._point.reached(self._lap * _STEPS + step)


class PreemptionWatch:
    """Hears a signal that comes to any rank, and tells all of them."""

    def __init__(
        self,
        coordinator: Coordinator,
        name: str,
        grace: Grace,
        signals: Sequence[signal.Signals],
        heard: Callable[[Notice], None],
    ) -> None:
        """Listen to nothing yet.

        Args:
            coordinator: Of this rank.
            name: Used once; equal on all ranks.
            grace: Begins with the first signal.
            signals: To listen for.
            heard: Called once on each rank, on a background thread; it must not wait for anything.
        """
        self._coordinator = coordinator
        self._key = f"{name}/signal"
        self._grace = grace
        self._tell = heard
        self._catcher = SignalCatcher(signals, self._caught, is_past=lambda: grace.is_over)
        self._is_listening = False
        self._poll_s = _POLL_S + _POLL_S_PER_RANK * coordinator.world_size

    def start(self) -> None:
        """Listen.

        Raises:
            ValueError: Not on the main thread.
        """
        self._catcher.install()
        self._is_listening = True
        if self._coordinator.world_size > 1:
            watch = self._coordinator.watch([self._key], every_s=self._poll_s)
            watch.add_done_callback(self._heard_of)

    @property
    def has_caught(self) -> bool:
        """Whether a signal has come to this process, which `heard` may not have been told yet."""
        return self._catcher.has_caught

    def release(self) -> None:
        """Put back who listened to the signals before. What other ranks tell is still heard."""
        self._is_listening = False
        self._catcher.release()

    def listen_again(self) -> None:
        """After `release`, where this thread can and nobody else listens."""
        if not self._is_listening:
            catcher = SignalCatcher(
                self._catcher.signals, self._caught, is_past=lambda: self._grace.is_over
            )
            with suppress(ValueError):
                catcher.install()
                self._catcher, self._is_listening = catcher, True

    def _caught(self, signum: int) -> None:
        """A signal to this process."""
        if self._grace.begin():
            notice = Notice(
                self._coordinator.rank, signal.Signals(signum).name, self._coordinator.host
            )
            self._coordinator.propose_later(self._key, msgspec.json.encode(notice))
            self._tell(notice)

    def _heard_of(self, heard: Any) -> None:
        """A signal to some rank, on the thread of the key-value store's client."""
        if heard.cancelled() or heard.exception() is not None:
            return
        if self._grace.begin(late_s=min(self._poll_s, self._grace.grace_s / 2)):
            self._tell(msgspec.json.decode(heard.result()[0], type=Notice))
