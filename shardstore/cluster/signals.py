"""Signals of the scheduler, heard whatever the main thread is doing (P7).

A Python handler runs on the main thread, between two byte codes: not while that is inside a native call or a
collective. The interpreter's *wakeup descriptor* is written to from the C handler at once, so a thread that
reads it hears the signal as soon as it gets the interpreter's lock.

Forked children inherit both, and must not take a signal of theirs for one of the trainer's:

- In every forked child the descriptor and the handlers are put back to what they were before.
- Workers of `multiprocessing`, as data loaders fork them, get the scheduler's signal together with the trainer
  wherever a whole process group is signalled. If they died of it, the trainer's next batch would raise before
  its last snapshot. So they hold such a signal back, and act on it only if their parent sent it
  (`Process.terminate`), is gone, or watches no more. Blocking, not a handler: torch's data loader installs a
  C handler of its own in each worker, which ends the worker.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.util import register_after_fork
from types import FrameType
from typing import Any, Final

_WAKE: Final = b"\0"
"""Ends the listener; no signal has this number."""


class SignalCatcher:
    """Hears some signals in place of what they did before. At most one per process."""

    def __init__(self, signals: Sequence[signal.Signals], heard: Callable[[int], None]) -> None:
        """Change nothing yet.

        Args:
            signals: What to listen for.
            heard: Called with a signal's number, on a thread of the catcher's own; perhaps more than once
                for one signal.
        """
        self.signals = tuple(signals)
        self._heard = heard
        self._pid = os.getpid()
        self._previous: dict[int, Any] = {}
        """Kept after the release: whoever came after us may still call our handler."""
        self._is_installed = False
        self._reader, self._writer, self._outer_wakeup = -1, -1, -1
        self._thread: threading.Thread | None = None
        self._watching = mmap.mmap(-1, 1)  # shared with forked children
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
        self._outer_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
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
            thread, self._thread = self._thread, None
        if thread is not None and is_main:
            self._tell(_WAKE)
            thread.join(1.0)
            self._close_pipe()
        elif thread is not None:
            self._thread = thread
        return is_main

    def _put_back(self) -> None:
        for signum, previous in self._previous.items():
            if signal.getsignal(signum) == self._handle:
                # None: a handler that Python does not know, and cannot install again.
                signal.signal(signum, signal.SIG_DFL if previous is None else previous)
        self._is_installed = False
        current = signal.set_wakeup_fd(self._outer_wakeup, warn_on_full_buffer=False)
        if current != self._writer:
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)  # somebody's after us

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
        if self.is_on:
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
            if self._outer_wakeup >= 0:
                self._pass_on(data)
            for signum in data:
                if signum in self.signals:
                    self._heard(signum)
            if _WAKE in data:
                return

    def _pass_on(self, data: bytes) -> None:
        """To whoever had the wakeup descriptor before: an event loop, as a rule."""
        try:
            os.write(self._outer_wakeup, data.replace(_WAKE, b""))
        except OSError:
            pass


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
    catcher = _inherited
    if catcher is None or not catcher.is_on:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, catcher.signals)
    threading.Thread(
        target=_hold_back, args=(catcher, os.getppid()), name="shardstore-signals", daemon=True
    ).start()


def _hold_back(catcher: SignalCatcher, parent: int) -> None:
    while True:
        info = signal.sigwaitinfo(catcher.signals)
        is_ours = info.si_pid == parent or os.getppid() != parent or not catcher.is_on
        if not is_ours:
            continue
        data = sys.modules.get("torch.utils.data")
        if info.si_pid == parent and data is not None and data.get_worker_info() is not None:
            os._exit(0)  # as torch's own handler does when the loader ends its worker
        signal.pthread_sigmask(signal.SIG_UNBLOCK, catcher.signals)
        os.kill(os.getpid(), info.si_signo)
        signal.pthread_sigmask(signal.SIG_BLOCK, catcher.signals)


os.register_at_fork(after_in_child=_after_fork)
register_after_fork(_anchor, _in_worker)
