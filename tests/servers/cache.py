"""Server programs that pip has not: kept between runs, outside the repository and the system's folders."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.servers.process import ServerUnavailableError

INSTALL_WITHIN_S = 80.0
"""Below the test's own timeout, so that a slow mirror is a reason to skip and not a hang."""


def cached(name: str, install: Callable[[Path], None]) -> Path:
    """The folder of an installed program: installed now, unless it is there.

    Args:
        name: Of the folder, with the version.
        install: Installs into an empty folder; the folder is moved afterwards.

    Raises:
        ServerUnavailableError: It could not be installed.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardstore-tests"
    found = base / name
    if found.is_dir():
        return found
    try:
        base.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=base))
    except OSError as error:
        raise ServerUnavailableError(f"{name} would be installed below {base}: {error}") from error
    try:
        install(fresh)
        try:
            fresh.rename(found)
        except OSError:  # another test run was faster
            if not found.is_dir():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return found


def run(*command: str, cwd: Path) -> None:
    """Run one step of an installation.

    Raises:
        ServerUnavailableError: It is not there, failed, or took too long.
    """
    try:
        subprocess.run(
            command, cwd=cwd, check=True, timeout=INSTALL_WITHIN_S, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise ServerUnavailableError(f"{command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise ServerUnavailableError(
            f"{' '.join(command)} took over {INSTALL_WITHIN_S:.0f} s"
        ) from error
    except subprocess.CalledProcessError as error:
        raise ServerUnavailableError(
            f"{' '.join(command)} failed: {error.stdout[-1000:]}"
        ) from error
