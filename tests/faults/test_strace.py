"""Real system calls fail, end the process, or lie: strace injects that into a life, then comes the next one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache

import pytest

from tests.faults.drivers import Drivers
from tests.faults.straced import Injected, inject

_CALLS = ("pwrite64", "fsync", "rename", "link", "fallocate", "mkdir", "unlink")
_FURTHER_CALLS = ("fdatasync", "rmdir", "ftruncate", "getdents64", "preadv")
_CODES = ("EIO", "ENOSPC", "EDQUOT")
_LIVES = ("save, retention", "save, streamed", "save, by way of a disk", "delete", "publish late")
_MOST = 40


@cache
def _why_not() -> str:
    """Why strace cannot be used here; empty if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(
        ["strace", "-f", "-e", "trace=none", sys.executable, "-c", ""],
        capture_output=True,
        check=False,
    )
    return "" if tried.returncode == 0 else f"strace may not trace here: {tried.stderr[-200:]!r}"


@pytest.fixture(autouse=True)
def _strace_works() -> None:
    if _why_not():
        pytest.skip(_why_not())


@pytest.mark.slow
def test_calls_that_fail_or_kill_leave_the_old_or_the_new(warm: Drivers) -> None:
    tasks = [
        (("save, retention", "save, streamed")[number % 2], f"{call}:error={code}:when={when}")
        for number, (call, code, when) in enumerate(
            (call, _CODES[(i + when) % 3], when) for i, call in enumerate(_CALLS) for when in (1, 2)
        )
    ]
    tasks += [
        (name, f"{call}:signal=KILL:when={1 + number % 2}")
        for number, call in enumerate(_CALLS)
        for name in ("save, streamed", "delete")
    ]
    tasks += [
        ("save, retention", "pwrite64:retval=0:when=1"),
        ("save, streamed", "fsync:error=EIO"),
    ]
    done: list[Injected] = warm.map(inject, tasks)
    assert sum(one.num_injected > 0 for one in done) > 10, done
    assert sum(one.was_killed for one in done) > 8, done
    assert {one.restored for one in done} == {1, 2}


def test_writes_that_are_lost_are_found_out(warm: Drivers) -> None:
    tasks = [
        (name, f"pwrite64:retval={nbytes}:when={when}")
        for name in ("save, retention", "save, streamed")
        for nbytes, when in ((4096, 1), (4096, 2), (1, 2))
    ]
    assert any(one.num_injected for one in warm.map(inject, tasks))


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("call", [*_CALLS, *_FURTHER_CALLS])
@pytest.mark.parametrize("kind", [*(f"error={code}" for code in _CODES), "signal=KILL"])
def test_every_call_of_every_kind(warm: Drivers, call: str, kind: str) -> None:
    for name in _LIVES:
        for first in range(1, _MOST, 3):
            tasks = [(name, f"{call}:{kind}:when={first + n}") for n in range(3)]
            done: list[Injected] = warm.map(inject, tasks)
            if not any(one.num_injected or one.was_killed for one in done):
                break
        else:
            pytest.fail(
                f"{name}: a thread makes more than {_MOST} calls of {call}: try further ones"
            )
