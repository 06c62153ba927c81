"""Signals that a worker of `multiprocessing` holds back while its parent listens for them (P7).

Where a whole process group is signalled, a data loader's workers get the scheduler's signal together with the trainer.
If they died of it, the trainer's next batch would raise before its last snapshot. So they act on it only if their
parent sent it (`Process.terminate`), listens no more, or is gone, if only later.

Blocking, not a handler: torch's data loader installs a C handler of its own in each worker, which ends it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final

_NUDGE: Final = signal.SIGURG
"""Ends a system call of the main thread. Ignored by default, and used by hardly anybody."""
_NUDGES: Final = 20
_LOOK_S: Final = 0.1

_held: frozenset[int] = frozenset()
"""What this process blocks, and did not before."""


def hold_back(signals: Sequence[signal.Signals], *, parent: int, is_on: Callable[[], bool]) -> None:
    """Begin to. On the main thread of a worker, before its own work begins.

    Args:
        signals: Which ones.
        parent: Process that made this one; what it sends is acted on.
        is_on: Whether it listens for them.
    """
    global _held  # noqa: PLW0603 - the mask belongs to the process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    _held = frozenset(signals) - before
    if signal.getsignal(_NUDGE) is signal.SIG_DFL:
        signal.signal(_NUDGE, _do_nothing)
    threading.Thread(
        target=_judge, args=(signals, parent, is_on), name="shardstore-signals", daemon=True
    ).start()


def _do_nothing(_signum: int, _frame: FrameType | None) -> None:
    """But end a system call."""


def _judge(signals: Sequence[signal.Signals], parent: int, is_on: Callable[[], bool]) -> None:
    waits: int | None = None
    info: signal.struct_siginfo | None
    while True:
        if waits is None:
            info = signal.sigwaitinfo(signals)
        else:
            info = signal.sigtimedwait(signals, _LOOK_S)
        is_from_parent = info is not None and info.si_pid == parent
        signum = waits if info is None else info.si_signo
        assert signum is not None
        if is_from_parent or os.getppid() != parent or (info is not None and not is_on()):
            waits = None
            _act_on(signum, is_from_parent=is_from_parent)
        else:
            waits = signum  # until the parent is gone


def _act_on(signum: int, *, is_from_parent: bool) -> None:
    """Let it do what it would have done at once."""
    data = sys.modules.get("torch.utils.data")
    is_loaders = data is not None and data.get_worker_info() is not None
    if is_loaders and is_from_parent and signum == signal.SIGTERM:
        os._exit(0)  # as torch's own handler does when the loader ends its worker
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signum])
    os.kill(os.getpid(), signum)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signum])
    main = threading.main_thread().ident
    if callable(signal.getsignal(signum)) and main is not None:
        # It runs on the main thread, which may be in a system call, or about to enter one.
        for _ in range(_NUDGES):
            signal.pthread_kill(main, _NUDGE)
            time.sleep(_LOOK_S)


def _let_through() -> None:
    """In a child of a worker: it has no thread that would act on them, and may be about to become another program."""
    global _held  # noqa: PLW0603
    if _held:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _held)
        _held = frozenset()


os.register_at_fork(after_in_child=_let_through)
