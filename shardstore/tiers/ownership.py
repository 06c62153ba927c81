"""Who owns the memory files of a run: one lock file per run and rank, held while the process lives.

`fcntl.lockf`, not `flock`: a forked loader worker inherits a flock and would keep the files of a dead
trainer looking alive. POSIX locks have a trap of their own: closing *any* descriptor of the file drops
the lock, so a process opens each lock file once and keeps it in a registry.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from dataclasses import dataclass
from typing import Final

from shardstore.tiers.fileops import FileOps

_PLAIN: Final = FileOps()
_POLL_S: Final = 0.05

_held: Final[dict[str, int]] = {}
_registry: Final = threading.Lock()


def _forget_after_fork() -> None:
    """A child owns nothing: the locks stayed with its parent."""
    _held.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


@dataclass(frozen=True, slots=True)
class Holder:
    """Another process that holds a lock."""

    pid: int
    """0 where the kernel does not say (another pid namespace)."""


def acquire(path: str, *, wait_s: float = 0.0, ops: FileOps = _PLAIN) -> Holder | None:
    """Take the lock file at `path`, waiting up to `wait_s` for another process to let go.

    Returns:
        None when this process holds it now (also if it did before), else who does.
    """
    deadline = time.monotonic() + wait_s
    while True:
        with _registry:
            if path in _held:
                return None
            fd = ops.open_lock(path)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                # Safe to close: this process holds no lock on it.
                pid = _read_pid(fd, ops)
                os.close(fd)
            else:
                _held[path] = fd
                try:
                    ops.set_size(fd, 0)
                    ops.write_at(fd, memoryview(str(os.getpid()).encode()), 0)
                except OSError:
                    pass  # a full tmpfs: the pid is only for messages
                return None
        if time.monotonic() >= deadline:
            return Holder(pid)
        time.sleep(_POLL_S)


def _read_pid(fd: int, ops: FileOps) -> int:
    text = bytearray(20)
    found = bytes(text[: ops.read_at(fd, memoryview(text), 0)])
    return int(found) if found.isdigit() else 0


def release(path: str, *, remove: bool, ops: FileOps = _PLAIN) -> None:
    """Let go of a lock that this process holds; with `remove` its file goes first."""
    with _registry:
        fd = _held.pop(path, None)
        if fd is None:
            return
        if remove:
            try:
                ops.unlink(path)
            except FileNotFoundError:
                pass
        os.close(fd)


def release_all(folder: str, rank: int, *, remove: bool, ops: FileOps = _PLAIN) -> None:
    """Let go of every lock of `rank` in `folder`, its own and those adopted from dead runs."""
    suffix = f"-{rank:05d}.lock"
    for path in [p for p in _held if os.path.dirname(p) == folder and p.endswith(suffix)]:
        release(path, remove=remove, ops=ops)
