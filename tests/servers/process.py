"""A server process of the tests: its own process group, logs in a file, ready when its port answers."""

from __future__ import annotations

import atexit
import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
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
        self,
        name: str,
        command: Callable[[int, Path], Sequence[str]],
        *,
        user: pwd.struct_passwd | None = None,
        listens_on: str | None = None,
        **env: str,
    ) -> None:
        """Start it and wait until it accepts connections.

        Args:
            name: For messages and the folder.
            command: Makes the command line from the port and the server's own folder.
            user: Runs it, instead of this process's user.
            listens_on: A Unix socket in its folder that is the last to listen, instead of its port.
            env: Added to this process's environment.

        Raises:
            ServerUnavailableError: It ended at once, or did not listen within a minute.
        """
        self.folder = Path(tempfile.mkdtemp(prefix=f"shardstore-{name}-"))
        self.log = self.folder / "server.log"
        self.port = 0
        self._listens_on = listens_on
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.stop)
        try:
            for _ in range(_STARTS):  # somebody else may take the port before the server does
                self.port = free_port()
                self._process = self._spawn(command(self.port, self.folder), user, env)
                if self._is_ready(self._process):
                    return
                if self._process.poll() is None:
                    break
            told = self.log.read_text(errors="replace")[-2000:]
            raise ServerUnavailableError(f"{name} does not listen; its log ends:\n{told}")
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """The server's."""
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """Kill it with all its children, and remove the folder. Again is fine."""
        atexit.unregister(self.stop)
        if self._process is not None and self._process.poll() is None:
            # sshd gives each connection a session, and so a process group, of its own.
            children = _descendants(self._process.pid)
            os.killpg(self._process.pid, signal.SIGKILL)
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _spawn(
        self, command: Sequence[str], user: pwd.struct_passwd | None, env: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        # Should the tests be killed outright, nobody is left to stop the server: the kernel does it then.
        guard = shutil.which("setpriv")
        guarded = [guard, "--pdeathsig", "KILL", *command] if guard else list(command)
        with self.log.open("ab") as output:
            return subprocess.Popen(
                guarded,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**_own_environment(), **env},
                start_new_session=True,
                user=user.pw_uid if user else None,
                group=user.pw_gid if user else None,
                extra_groups=[] if user else None,
            )

    def _is_ready(self, process: subprocess.Popen[bytes]) -> bool:
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError):
                self._connect()
                return True
            time.sleep(_POLL_S)
        return False

    def _connect(self) -> None:
        if self._listens_on is None:
            socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
        else:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(self.folder / self._listens_on))


def _descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [found for child in map(int, children) for found in (child, *_descendants(child))]


def _own_environment() -> dict[str, str]:
    # Measuring the tests' coverage in a server would slow it down for nothing.
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
