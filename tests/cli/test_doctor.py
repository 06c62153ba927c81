"""`shardstore doctor`: what is wrong with a host or a root, and that nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardstore.tiers.fileops import FileOps, use_ops
from tests.cli.conftest import Roots, run, run_json

Copy = Callable[[Path], Path]


def by_name(document: Any) -> dict[str, Any]:
    return {check["name"]: check for check in document["checks"]}


def test_good_host_and_root_pass_every_check_and_nothing_is_left(
    folder: str, disk_folder: Path
) -> None:
    document = run_json("doctor", disk_folder, "--memory-dir", folder)
    assert set(document) == {"command", "root", "ok", "checks"}
    assert document["ok"] is True
    checks = by_name(document)
    assert set(document["checks"][0]) == {"name", "status", "found", "remedy", "facts"}
    for name in (
        "host memory (tmpfs)", "memory of ended runs", "control group's memory",
        "locked memory (memlock)", "open files (nofile)", "clock", "root: space", "root: jobs",
        "root: writable", "root: exclusive create", "root: fsync", "root: direct transfers",
        "root: clock", "speed: write + fsync", "speed: read", "speed: memory copy",
    ):  # fmt: skip
        assert checks[name]["status"] != "fail", name
    assert checks["root: exclusive create"]["facts"]["not_honoured"] == 0
    assert (
        checks["speed: read"]["facts"]["nbytes"]
        == checks["speed: write + fsync"]["facts"]["nbytes"]
    )
    assert list(disk_folder.iterdir()) == []


def test_root_that_does_not_exist_is_tried_in_its_parent_and_not_made(
    folder: str, disk_folder: Path
) -> None:
    root = disk_folder / "a" / "b"
    document = run_json("doctor", root, "--memory-dir", folder, "--no-speed")
    assert document["ok"] is True
    assert "does not exist yet" in by_name(document)["root"]["found"]
    assert list(disk_folder.iterdir()) == []


def test_memory_folder_that_is_no_tmpfs_fails_without_a_root_and_warns_with_one(
    disk_folder: Path,
) -> None:
    options = ("--memory-dir", disk_folder, "--no-speed")
    check = by_name(run_json("doctor", *options, code=1))["host memory (tmpfs)"]
    assert check["status"] == "fail"
    assert "is not on a tmpfs" in check["found"]
    assert "--shm-size" in check["remedy"]
    check = by_name(run_json("doctor", disk_folder, *options))["host memory (tmpfs)"]
    assert check["status"] == "warn"


def test_root_below_a_file_fails(folder: str, disk_folder: Path) -> None:
    (disk_folder / "file").touch()
    options = ("--memory-dir", folder, "--no-speed")
    result = run("doctor", disk_folder / "file" / "root", *options, code=1)
    assert "cannot be a folder" in result.stdout
    assert "Give another root" in result.stdout


def test_root_on_a_tmpfs_is_a_warning(roots: Roots) -> None:
    document = run_json("doctor", roots.one, "--memory-dir", roots.memory, "--no-speed")
    assert by_name(document)["root: durable"]["status"] == "warn"


def test_memory_of_ended_runs_is_told_with_the_command_that_frees_it(roots: Roots) -> None:
    document = run_json("doctor", "--memory-dir", roots.memory, "--no-speed")
    check = by_name(document)["memory of ended runs"]
    assert check["status"] == "warn"
    assert f"shardstore memory clear --memory-dir {roots.memory}" in check["remedy"]


class _Limited(FileOps):
    """A container with little memory, and a file system that cannot sync or link directly."""

    def read_text(self, path: str) -> str:
        texts = {
            "/proc/self/cgroup": "0::/\n",
            "/proc/self/mountinfo": "1 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "/sys/fs/cgroup/memory.max": str(512 << 20),
            "/sys/fs/cgroup/memory.current": str(500 << 20),
        }
        if path in texts:
            return texts[path]
        raise FileNotFoundError(path)

    def bypass_cache(self, fd: int, on: bool) -> bool:
        return False

    def fsync(self, fd: int) -> None:
        raise OSError(5, "Input/output error")


def test_limits_and_broken_calls_are_found(folder: str, disk_folder: Path) -> None:
    with use_ops(_Limited()):
        document = run_json("doctor", disk_folder, "--memory-dir", folder, code=1)
    checks = by_name(document)
    assert checks["control group's memory"]["status"] == "warn"
    assert checks["control group's memory"]["facts"]["free_bytes"] == 12 << 20
    assert checks["root: fsync"]["status"] == "fail"
    assert "page cache" in checks["root: direct transfers"]["found"]
    assert "speed: write + fsync" not in checks, "not measured where saving does not work"
    assert list(disk_folder.iterdir()) == []


_WITHOUT_RIGHTS = """
import os, tempfile
from shardstore.cli import main
import shardstore.cli.app, shardstore.cli.checks.folder, shardstore.cli.checks.host
import shardstore.cli.checks.jobs, shardstore.cli.checks.remote, shardstore.cli.checks.speed
os.setgroups([]); os.setgid(65534); os.setuid(65534)  # such a user may not even read the package
main()
"""


@pytest.mark.skipif(
    os.getuid() != 0, reason="a user without rights is needed: only root can become one"
)
def test_root_without_the_right_to_write_fails_with_a_remedy(
    folder: str, disk_folder: Path
) -> None:
    root = disk_folder / "root"
    root.mkdir(mode=0o755)
    disk_folder.chmod(0o755)
    arguments = ["doctor", str(root), "--memory-dir", folder, "--no-speed"]
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_RIGHTS, *arguments],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "Permission denied" in done.stdout
    assert "give rights to uid 65534" in done.stdout
    assert list(root.iterdir()) == []


def test_url_is_read_from_and_written_to(folder: str) -> None:
    result = run("doctor", "memory://doctor/run", "--memory-dir", folder)
    assert "an object is created only once" in result.stdout
    assert "/s up and" in result.stdout
