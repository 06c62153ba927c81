"""System calls that count themselves, and break or end processes at a chosen one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

from shardstore.tiers.fileops import FileOps

Action = Callable[[str, int], None]
"""Called with the operation's name and its number, before it happens."""


class WatchedOps(FileOps):
    """Numbers every operation while armed and calls `action` before each."""

    def __init__(self, action: Action | None = None) -> None:
        self.names: list[str] = []
        self._action = action
        self._armed = False
        self._lock = threading.Lock()

    def arm(self) -> None:
        self._armed = True

    def disarm(self) -> None:
        self._armed = False

    def _hit(self, name: str, *subject: object) -> None:
        if not self._armed:
            return
        with self._lock:
            self.names.append(" ".join([name, *(os.path.basename(str(s)) for s in subject)]))
            number = len(self.names)
        if self._action is not None:
            self._action(self.names[number - 1], number)

    def point(self, name: str) -> None:
        self._hit(f"point:{name}")

    def open_new(self, path: str, mode: int = 0o666) -> int:
        self._hit("open_new", path)
        return super().open_new(path, mode)

    def allocate(self, fd: int, nbytes: int, offset: int = 0) -> None:
        self._hit("allocate")
        super().allocate(fd, nbytes, offset)

    def set_size(self, fd: int, nbytes: int) -> None:
        self._hit("set_size")
        super().set_size(fd, nbytes)

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        self._hit("write_at")
        super().write_at(fd, data, offset)

    def fsync(self, fd: int) -> None:
        self._hit("fsync")
        super().fsync(fd)

    def rename(self, source: str, target: str) -> None:
        self._hit("rename", source, target)
        super().rename(source, target)

    def link(self, source: str, target: str) -> None:
        self._hit("link", target)
        super().link(source, target)

    def unlink(self, path: str) -> None:
        self._hit("unlink", path)
        super().unlink(path)

    def make_folder(self, path: str, mode: int = 0o777) -> None:
        self._hit("make_folder", path)
        super().make_folder(path, mode)

    def remove_folder(self, path: str) -> None:
        self._hit("remove_folder", path)
        super().remove_folder(path)

    def store(self, slot: memoryview, offset: int, data: bytes) -> None:
        self._hit("store", str(offset))
        super().store(slot, offset, data)


def kill_at(number: int, pids: Sequence[int]) -> Action:
    """End processes with SIGKILL before operation `number`; this one last."""

    def act(_name: str, at: int) -> None:
        if at == number:
            _kill(pids)

    return act


def kill_at_point(point: str, pids: Sequence[int]) -> Action:
    """End processes with SIGKILL at a named point; this one last."""

    def act(name: str, _at: int) -> None:
        if name == f"point:{point}":
            _kill(pids)

    return act


def _kill(pids: Sequence[int]) -> None:
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
        os.kill(pid, signal.SIGKILL)


def raise_at(match: str, error: OSError, times: int = 1) -> Action:
    """Raise `error` at the first `times` operations whose name starts with `match`."""
    left = [times]

    def act(name: str, _at: int) -> None:
        if name.startswith(match) and left[0] > 0:
            left[0] -= 1
            raise error

    return act


def hold_at(match: str, reached: Any, go: Any) -> Action:
    """Set the event `reached` and wait for the event `go` at operations that start with `match`."""

    def act(name: str, _at: int) -> None:
        if name.startswith(match):
            reached.set()
            assert go.wait(60.0), "the test never let the writer go on"

    return act
