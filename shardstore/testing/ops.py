"""System calls that number themselves, and break or end the process at a chosen one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence

from shardstore.tiers.fileops import FileOps

Before = Callable[[str, int], None]
"""Called with an operation's name and its number, from 1 on, before it happens."""


class CountingOps(FileOps):
    """Numbers every operation that changes storage while armed, and calls `before` before each.

    An operation is one system call that changes a file or folder, one write into mapped memory that a
    file's validity hangs on, or one named point of a protocol. Its name is the method's, with the last
    part of each path.

        ops = CountingOps(kill_at(12))
        with use_ops(ops):
            store = SnapshotStore(root)
        ops.arm()
        store.save(state, step=1).wait()      # the process ends before the 12th operation of this save
    """

    def __init__(self, before: Before | None = None, *, count_reads: bool = False) -> None:
        """Not armed yet: nothing is counted.

        Args:
            before: What it raises takes the place of the operation.
            count_reads: Number what only reads as well: opening, reading, listing.
        """
        self.names: list[str] = []
        """Names of what was numbered so far, in order."""
        self._before = before
        self._count_reads = count_reads
        self._armed = False
        self._lock = threading.Lock()

    def arm(self) -> None:
        """Count from now on."""
        self._armed = True

    def disarm(self) -> None:
        """Count no more."""
        self._armed = False

    def _hit(self, name: str, *subjects: str) -> None:
        if not self._armed:
            return
        with self._lock:
            self.names.append(" ".join([name, *map(os.path.basename, subjects)]))
            number = len(self.names)
        if self._before is not None:
            self._before(self.names[number - 1], number)

    def _hit_read(self, name: str, *subjects: str) -> None:
        if self._count_reads:
            self._hit(name, *subjects)

    def point(self, name: str) -> None:
        """See FileOps; numbered as `point:<name>`."""
        self._hit(f"point:{name}")

    def request(self, operation: str, key: str, *, changes: bool) -> None:
        """See FileOps; numbered as `request:<operation> <key>`, and again when it was answered."""
        (self._hit if changes else self._hit_read)(f"request:{operation}", key)

    def open_new(self, path: str, mode: int = 0o666) -> int:
        """See FileOps."""
        self._hit("open_new", path)
        return super().open_new(path, mode)

    def open_lock(self, path: str) -> int:
        """See FileOps."""
        self._hit("open_lock", path)
        return super().open_lock(path)

    def open_existing(self, path: str, *, writable: bool = False) -> int:
        """See FileOps."""
        self._hit_read("open_existing", path)
        return super().open_existing(path, writable=writable)

    def allocate(self, fd: int, nbytes: int, offset: int = 0) -> None:
        """See FileOps."""
        self._hit("allocate")
        super().allocate(fd, nbytes, offset)

    def set_size(self, fd: int, nbytes: int) -> None:
        """See FileOps."""
        self._hit("set_size")
        super().set_size(fd, nbytes)

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        """See FileOps."""
        self._hit("write_at")
        super().write_at(fd, data, offset)

    def read_at(self, fd: int, into: memoryview, offset: int) -> int:
        """See FileOps."""
        self._hit_read("read_at")
        return super().read_at(fd, into, offset)

    def fsync(self, fd: int) -> None:
        """See FileOps; the one of a folder as well."""
        self._hit("fsync")
        super().fsync(fd)

    def rename(self, source: str, target: str) -> None:
        """See FileOps."""
        self._hit("rename", source, target)
        super().rename(source, target)

    def link(self, source: str, target: str) -> None:
        """See FileOps."""
        self._hit("link", target)
        super().link(source, target)

    def unlink(self, path: str) -> None:
        """See FileOps."""
        self._hit("unlink", path)
        super().unlink(path)

    def make_folder(self, path: str, mode: int = 0o777) -> None:
        """See FileOps."""
        self._hit("make_folder", path)
        super().make_folder(path, mode)

    def remove_folder(self, path: str) -> None:
        """See FileOps."""
        self._hit("remove_folder", path)
        super().remove_folder(path)

    def list_folder(self, path: str) -> list[str]:
        """See FileOps."""
        self._hit_read("list_folder", path)
        return super().list_folder(path)

    def store(self, slot: memoryview, offset: int, data: bytes) -> None:
        """See FileOps."""
        self._hit("store", str(offset))
        super().store(slot, offset, data)


def kill_at(number: int, pids: Sequence[int] | None = None) -> Before:
    """End processes with SIGKILL before operation `number`: this one, or those given, this one last."""

    def before(_name: str, at: int) -> None:
        if at == number:
            _kill(pids)

    return before


def kill_at_point(point: str, pids: Sequence[int] | None = None) -> Before:
    """End processes with SIGKILL at a named point: this one, or those given, this one last."""

    def before(name: str, _at: int) -> None:
        if name == f"point:{point}":
            _kill(pids)

    return before


def _kill(pids: Sequence[int] | None) -> None:
    own = os.getpid()
    for pid in sorted((own,) if pids is None else pids, key=lambda pid: pid == own):
        os.kill(pid, signal.SIGKILL)


def raise_at(match: str, error: OSError, times: int = 1) -> Before:
    """Raise `error` in place of the first `times` operations whose name starts with `match`."""
    left = [times]

    def before(name: str, _at: int) -> None:
        if name.startswith(match) and left[0] > 0:
            left[0] -= 1
            raise error

    return before
