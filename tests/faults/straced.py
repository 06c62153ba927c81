"""A life whose system calls fail or kill it, by strace, which attaches to the child before it begins."""

from __future__ import annotations

import socket
import subprocess
import threading
from pathlib import Path
from typing import NamedTuple

from shardstore.testing import CountingOps, run_forked, start_forked
from tests.faults.crash_at import Places, live_before, look, look_for_values, places
from tests.faults.lives import SCENARIOS, Life, Scenario, Told, state_of

_ATTACH_S = 20.0


class Injected(NamedTuple):
    """What was tried, and what came of it."""

    name: str
    injection: str
    num_injected: int
    was_killed: bool
    restored: int | None


def inject(name: str, injection: str) -> Injected:
    """One life under `strace -e inject=<injection>`, and the next life without.

    strace counts the system calls of each thread by itself. What comes before the armed part of the life
    goes through as it is. With `retval=` above 0 the kernel is not asked at all: what is said to be written
    is lost, and no protocol can help; then it must be found out.
    """
    state_of(1)
    scenario = SCENARIOS[name]
    what = f"{name} under {injection}"
    with places() as where:
        live_before(where, scenario, name)
        told = Told()
        log = Path(where.folder) / "strace.log"
        ours, theirs = socket.socketpair()
        child = start_forked(lambda: _live(where, scenario, told, theirs))
        theirs.close()
        with ours:
            ours.settimeout(_ATTACH_S)
            assert ours.recv(1), f"{what}: {child.wait()}"  # it has come to the armed part
            tracer = _attach(child.pid, injection, log)
            ours.send(b"g")
        ended = child.wait(60)
        tracer.wait(20)
        assert tracer.stderr is not None
        tracer.stderr.close()
        assert not ended.error or "\nshardstore.errors." in ended.error, f"{what}: {ended.error}"
        num = sum("INJECTED" in line for line in log.read_text(errors="replace").splitlines())
        log.unlink()
        is_lost = "retval=" in injection and "retval=0" not in injection
        see = look_for_values if is_lost else look
        after = run_forked(lambda: see(where, scenario))
        assert not after.error, f"{what}, in phase {told.phase}: {after.error}"
        allowed = scenario.found[0] | {None} if is_lost else scenario.found[told.phase]
        assert after.value in allowed, f"{what}: restored {after.value}, not one of {allowed}"
        return Injected(name, injection, num, ended.was_killed, after.value)


def _attach(pid: int, injection: str, log: Path) -> subprocess.Popen[bytes]:
    call = injection.partition(":")[0]
    tracer = subprocess.Popen(
        ["strace", "-f", "-p", str(pid), "-e", f"trace={call}", "-e", f"inject={injection}", "-o", log],
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert tracer.stderr is not None
    line = tracer.stderr.readline().decode()
    if "attached" not in line:
        tracer.kill()
        raise PermissionError(f"strace cannot attach here: {line}")
    return tracer


class _Gate(CountingOps):
    """Lets the tracer in when operations are armed."""

    def __init__(self, tracer: socket.socket) -> None:
        super().__init__()
        self._tracer = tracer

    def arm(self) -> None:
        self._tracer.send(b"r")
        self._tracer.recv(1)
        super().arm()


def _live(where: Places, scenario: Scenario, told: Told, tracer: socket.socket) -> None:
    scenario.act(Life(*where, _Gate(tracer), told, scenario.options, None, threading.Barrier(1)))
