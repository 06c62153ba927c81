"""Run something in a forked child, which may be killed at any moment: what it leaves is what the dead leave."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

_SHOWN: Final = 10_000


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended."""

    was_killed: bool
    """By SIGKILL."""
    value: Any = None
    """What the function returned, through JSON; None if it did not return."""
    error: str = ""
    """Traceback of what it raised, or how else it ended; empty if it returned or was killed."""


class Forked:
    """A child that runs."""

    def __init__(self, pid: int, read_end: int) -> None:
        """Of `start_forked`."""
        self.pid = pid
        self._read_end = read_end

    def wait(self, timeout_s: float = 60.0) -> Ended:
        """Wait for its end, once; after `timeout_s` it is killed, and that is an error."""
        try:
            data, in_time = _read_all(self._read_end, time.monotonic() + timeout_s)
        finally:
            os.close(self._read_end)
        if not in_time:
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        if not in_time:
            return Ended(False, error=f"it was still running after {timeout_s:g} s")
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            was_killed = number == signal.SIGKILL
            return Ended(was_killed, error="" if was_killed else f"it ended by signal {number}")
        answer = json.loads(data) if data else {"error": f"exit status {os.WEXITSTATUS(status)}"}
        return Ended(False, answer.get("value"), answer.get("error", ""))


def start_forked(function: Callable[[], object]) -> Forked:
    """Begin to call `function` in a forked child of this process; see `run_forked`.

    The caller waits for every child that it starts.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _end_child(function, write_end)
    os.close(write_end)
    return Forked(pid, read_end)


def run_forked(function: Callable[[], object], *, timeout_s: float = 60.0) -> Ended:
    """Call `function` in a forked child of this process, and wait for its end.

    The child begins with everything imported: it costs milliseconds where a new process that imports
    torch takes seconds. Its memory files, locks and threads end as with any process. Fork from a process
    with one thread; the child runs no exit handlers, and torch on one thread, as its pool does not outlive a fork.

        ended = run_forked(lambda: save_and_die_at(operation=12))
        assert ended.was_killed

    Args:
        function: What it returns must be JSON.
        timeout_s: After so many seconds the child is killed, and that is an error.
    """
    return start_forked(function).wait(timeout_s)


def _end_child(function: Callable[[], object], write_end: int) -> None:
    try:
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        answer = json.dumps({"value": function()})
    except BaseException:  # noqa: BLE001 - the parent gets it
        answer = json.dumps({"error": traceback.format_exc()[-_SHOWN:]})
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        data = memoryview(answer.encode())
        while data:
            data = data[os.write(write_end, data) :]
    finally:
        os._exit(0)


def _read_all(fd: int, deadline: float) -> tuple[bytes, bool]:
    """Everything up to the end of the pipe, and whether that came before the deadline."""
    found = bytearray()
    while True:
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return bytes(found), False
        part = os.read(fd, 1 << 16)
        if not part:
            return bytes(found), True
        found += part
