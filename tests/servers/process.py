"""A server process of the tests: its own process group, logs in a file, ready when its port answers."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

READY_WITHIN_S: Final = 60.0
_POLL_S: Final = 0.02
_STARTS: Final = 3


class ServerUnavailableError(Exception):
    """The server cannot be run here; the text says why."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class ServerProcess:
    """One running server; `stop` ends it with all that it started, and so does the interpreter's end."""

    def __init__(
        self, name: str, command: Callable[[int, Path], Sequence[str]], **env: str
    ) -> None:
        """Start it and wait until it accepts connections.

        Args:
            name: For messages and the folder.
            command: Makes the command line from the port and the server's own folder.
            env: Added to this process's environment.

        Raises:
            ServerUnavailableError: It ended at once, or did not listen within a minute.
        """
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix=f"shardstore-{name}-"))
        self.log = self.folder / "server.log"
        atexit.register(self.stop)
        for start in range(_STARTS):  # somebody else may take the port before the server does
            self.port = free_port()
            self._process = _spawn(command(self.port, self.folder), self.log, self.folder, env)
            if self._is_ready():
                return
            if self._process.poll() is None or start == _STARTS - 1:
                break
        told = self.log.read_text(errors="replace")[-2000:]
        self.stop()
        raise ServerUnavailableError(
            f"{name} does not listen on port {self.port}; its log ends:\n{told}"
        )

    def stop(self) -> None:
        """Kill the process group and remove the folder. Again is fine."""
        atexit.unregister(self.stop)
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _is_ready(self) -> bool:
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return False
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), timeout=1.0),
            ):
                return True
            time.sleep(_POLL_S)
        return False


def _spawn(
    command: Sequence[str], log: Path, folder: Path, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    # Should the tests be killed outright, nobody is left to stop the server: the kernel does it then.
    guard = shutil.which("setpriv")
    guarded = [guard, "--pdeathsig", "KILL", *command] if guard else list(command)
    with log.open("ab") as output:
        return subprocess.Popen(
            guarded,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **env},
            start_new_session=True,
        )
