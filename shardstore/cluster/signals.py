"""Signals of the scheduler, heard whatever the main thread is doing (P7).

A Python handler runs on the main thread, between two byte codes: not while that is inside a native call or a
collective. The interpreter's *wakeup descriptor* is written to from the C handler at once, so a thread that
reads it hears the signal as soon as it gets the interpreter's lock.

Forked children inherit both, and must not take a signal of theirs for one of the trainer's: in every one the
descriptor and the handlers are put back to what they were before. Workers of `multiprocessing` hold the signals
back on top of that (`heldback.py`).
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.util import register_after_fork
from types import FrameType
from typing import Any, Final

from shardstore.cluster.heldback import hold_back

_WAKE: Final = b"\0"
"""Ends the listener; no signal has this number."""


class SignalCatcher:
    """Hears some signals in place of what they did before. At most one per process."""

    def __init__(
        self,
        signals: Sequence[signal.Signals],
        heard: Callable[[int], None],
        *,
        is_past: Callable[[], bool] = lambda: False,
    ) -> None:
        """Change nothing yet.

        Args:
            signals: What to listen for.
            heard: Called with a signal's number, on a thread of the catcher's own; perhaps more than once
                for one signal.
            is_past: Whether there is nothing left to do but to end: a signal then does what it did before.
        """
        self.signals = tuple(signals)
        self._heard = heard
        self._is_past = is_past
        self._pid = os.getpid()
        self._previous: dict[int, Any] = {}
        """Kept after the release: whoever came after us may still call our handler."""
        self.has_caught = False
        """Whether one has come to the main thread, which hears of it before our own thread may have."""
        self._is_installed = False
        self._is_over = False
        self._reader, self._writer = -1, -1
        self._outer = _Descriptor(-1)
        self._thread: threading.Thread | None = None
        self._watching = _shared_flag()
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether the process that made it listens; seen from forked children as well."""
        return self._watching[0] == 1

    def install(self) -> None:
        """Begin to listen.

        Raises:
            ValueError: Not on the main thread, the only one that may install handlers; or another catcher is on.
        """
        global _active  # noqa: PLW0603 - handlers belong to the process
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "signals can only be caught from the main thread: enter guard_preemption there"
            )
        if _active is not None and not _active.is_on:
            _active.release()  # it was left on another thread
        if _active is not None:
            raise ValueError(
                "signals are caught already in this process: leave the earlier guard_preemption first"
            )
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._outer = _Descriptor(signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False))
        try:
            for signum in self.signals:
                self._previous[signum] = signal.signal(signum, self._handle)
        except (OSError, ValueError):
            self._put_back()
            self._close_pipe()
            raise
        self._watching[0] = 1
        self._is_installed = True
        _active = self
        self._thread = threading.Thread(target=self._listen, name="shardstore-signals", daemon=True)
        self._thread.start()

    def release(self) -> bool:
        """Put everything back as it was, unless somebody has changed it since. Again is fine.

        Returns:
            False where this is not the main thread, which alone can: the signals then do what they did
            before all the same, by way of this catcher.
        """
        global _active  # noqa: PLW0603 - handlers belong to the process
        self._watching[0] = 0
        if os.getpid() != self._pid:
            return True
        is_main = threading.current_thread() is threading.main_thread()
        with self._lock:
            if is_main and self._is_installed:
                self._put_back()
            if _active is self and is_main:
                _active = None
            thread = self._thread if is_main else None
            if thread is not None:
                self._thread = None
        if thread is not None:
            self._is_over = True
            self._tell(_WAKE)
            thread.join(1.0)  # it closes the pipe: perhaps later, if it is held up
        return is_main

    def _put_back(self) -> None:
        for signum, previous in self._previous.items():
            if signal.getsignal(signum) == self._handle:
                # None: a handler that Python does not know, and cannot install again.
                signal.signal(signum, signal.SIG_DFL if previous is None else previous)
        self._is_installed = False
        current = signal.set_wakeup_fd(-1)
        if current == self._writer:
            current = self._outer.fd if self._outer.is_same() else -1
        with suppress(OSError, ValueError):  # somebody's after us, who closed it
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)

    def _close_pipe(self) -> None:
        for fd in (self._reader, self._writer):
            if fd >= 0:
                os.close(fd)
        self._reader = self._writer = -1

    def forget_in_child(self) -> None:
        """In a forked child: leave the parent's pipe, and the signals to whoever had them before."""
        self._put_back()
        self._close_pipe()
        self._thread = None

    # ----------------------------------------------------------------- hearing

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """The Python handler. Takes no lock: it may interrupt anything on the main thread."""
        previous = self._previous.get(signum)
        if self.is_on and not self._is_past():
            self.has_caught = True
            self._tell(bytes([signum]))  # somebody may have taken the wakeup descriptor since
            if callable(previous) and previous is not signal.default_int_handler:
                previous(signum, frame)
        elif callable(previous):
            previous(signum, frame)
        elif previous is not signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    def _tell(self, data: bytes) -> None:
        try:
            os.write(self._writer, data)
        except OSError:
            pass  # full: the listener has enough to read

    def _listen(self) -> None:
        reader = self._reader
        waiter = select.poll()  # unlike select, for descriptors of any number
        waiter.register(reader, select.POLLIN)
        while True:
            waiter.poll()
            try:
                data = os.read(reader, 512)
            except BlockingIOError:
                continue
            self._pass_on(data.replace(_WAKE, b""))
            for signum in data:
                if signum in self.signals:
                    self._heard(signum)
            if _WAKE in data or self._is_over:  # which a full pipe had no room for
                self._close_pipe()
                return

    def _pass_on(self, data: bytes) -> None:
        """To whoever had the wakeup descriptor before: an event loop, as a rule."""
        if data and self._outer.is_same():
            with suppress(OSError):
                os.write(self._outer.fd, data)


class _Descriptor:
    """Somebody else's, who may close it: its number may be that of a file of anybody then."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._identity = self._look()

    def is_same(self) -> bool:
        return self._identity is not None and self._look() == self._identity

    def _look(self) -> tuple[int, int] | None:
        try:
            found = os.fstat(self.fd)
        except OSError:
            return None
        return found.st_dev, found.st_ino


_flag: tuple[int, mmap.mmap] | None = None


def _shared_flag() -> mmap.mmap:
    """Of this process, shared with its forked children: a loader's workers may outlive one guard and serve the next."""
    global _flag  # noqa: PLW0603
    if _flag is None or _flag[0] != os.getpid():
        _flag = os.getpid(), mmap.mmap(-1, 1)
    return _flag[1]


_active: SignalCatcher | None = None
_inherited: SignalCatcher | None = None
"""In a forked child: the parent's."""


def _after_fork() -> None:
    global _active, _inherited
    if _active is not None:
        _active.forget_in_child()
        _active, _inherited = None, _active


class _Anchor:
    """What multiprocessing's hook is tied to, and lives as long as."""


_anchor: Final = _Anchor()


def _in_worker(_: _Anchor) -> None:
    """In a child that multiprocessing forked, before its own work begins."""
    catcher, parent = _inherited, multiprocessing.parent_process()
    if catcher is not None and catcher.is_on and parent is not None and parent.pid is not None:
        hold_back(catcher.signals, parent=parent.pid, is_on=lambda: catcher.is_on)


os.register_at_fork(after_in_child=_after_fork)
register_after_fork(_anchor, _in_worker)
