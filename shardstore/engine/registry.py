"""Stores open in this process: a second one of the same name takes over, and exit leaves none behind."""

from __future__ import annotations

import os
from multiprocessing.util import Finalize
from typing import Final, Protocol


class Leavable(Protocol):
    """What the registry needs of a store."""

    def take_leave(self, why: str) -> None:
        """Stop taking calls, finish own spills, wait for no rank, keep memory."""
        ...

    def leave_at_exit(self) -> None:
        """The interpreter ends."""
        ...


_open: Final[dict[tuple[str, str, int], Leavable]] = {}
"""By memory folder, name, and rank: ranks may be threads of one process."""
_exits: Final[dict[int, object]] = {}
_all: Final[set[Leavable]] = set()
"""Strong references: a store that nobody else refers to any more still has snapshots to write."""


def register(store: Leavable, memory_dir: str, name: str | None, rank: int = 0) -> None:
    """Remember an open store."""
    _all.add(store)
    if os.getpid() not in _exits:
        # Unlike atexit, this also runs in children of multiprocessing, which end by os._exit.
        _exits[os.getpid()] = Finalize(None, _leave_all, exitpriority=100)
    if name is not None:
        _open[(memory_dir, name, rank)] = store


def unregister(store: Leavable) -> None:
    """Forget a store that was left."""
    _all.discard(store)
    for key in [key for key, other in _open.items() if other is store]:
        del _open[key]


def take_over(memory_dir: str, name: str | None, rank: int = 0) -> None:
    """Make an earlier store of the same name in this process leave, so that its files can be adopted."""
    if name is None:
        return
    earlier = _open.pop((memory_dir, name, rank), None)
    if earlier is not None:
        earlier.take_leave("another store of the same name took over in this process")


def _leave_all() -> None:
    for store in list(_all):
        store.leave_at_exit()


def _forget_after_fork() -> None:
    """A forked child owns no store of its parent."""
    _open.clear()
    _all.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
