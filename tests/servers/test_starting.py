"""Servers that cannot run, and servers whose test run ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.fixtures import served
from tests.servers.process import ServerProcess, ServerUnavailableError

STARTS_ONE = """
import sys
from tests.servers.proxy import Proxy
proxy = Proxy(1)
print(proxy.pid, proxy.folder, flush=True)
sys.stdin.read()
"""


class _Never:
    def __init__(self) -> None:
        raise ServerUnavailableError("no such program")

    def stop(self) -> None: ...


def test_what_cannot_run_skips_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDSTORE_REQUIRE_SERVERS", "s3")
    with pytest.raises(pytest.skip.Exception, match="no such program"):
        next(served("azure", _Never))


def test_what_cannot_run_and_is_required_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDSTORE_REQUIRE_SERVERS", "s3,sftp")
    with pytest.raises(ServerUnavailableError, match="no such program"):
        next(served("sftp", _Never))


def test_a_server_that_ends_at_once_tells_its_last_words() -> None:
    with pytest.raises(ServerUnavailableError, match="last words"):
        ServerProcess("brief", lambda port, folder: ["sh", "-c", "echo last words; exit 3"])


@pytest.fixture
def starter() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS_ONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    with process:
        yield process
        process.kill()


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="the kernel is told by setpriv")
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_server_ends_with_its_test_run(starter: subprocess.Popen[str], is_killed: bool) -> None:
    assert starter.stdout is not None
    assert starter.stdin is not None
    told, folder = starter.stdout.readline().split()
    pid = int(told)
    os.kill(pid, 0)
    if is_killed:
        starter.send_signal(signal.SIGKILL)
    else:
        starter.stdin.close()
    starter.wait()
    deadline = time.monotonic() + 30
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(pid)
    assert is_killed or not Path(folder).exists()
    shutil.rmtree(folder, ignore_errors=True)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
