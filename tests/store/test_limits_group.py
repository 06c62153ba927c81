"""A real control group below the size of the tmpfs: said with figures, then disk only, and no process is killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.store.tmpfs_cases import MIB

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="making a control group needs root")
_ROOT = Path(__file__).parents[2]
_LIMITS = ("memory.limit_in_bytes", "memory.max")
"""File of the limit: v1, v2."""


def _parents() -> Iterator[tuple[Path, str]]:
    """Groups with a memory controller under which one may be made, and the file of a limit."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    own = Path("/proc/self/cgroup").read_text().splitlines()
    for line in mounts:
        at, kind, options = line.split()[4], *line.split(" - ")[1].split()[::2]
        if kind == "cgroup" and "memory" in options.split(","):
            inside = next(x.split(":")[2] for x in own if "memory" in x.split(":")[1].split(","))
            yield Path(at), _LIMITS[0]
            yield Path(at) / inside[1:], _LIMITS[0]
        elif kind == "cgroup2":
            with suppress(OSError):
                (Path(at) / "cgroup.subtree_control").write_text("+memory")
                yield Path(at), _LIMITS[1]


@contextmanager
def _group(limit: int) -> Iterator[tuple[Path, str]]:
    """A control group of `limit` bytes, without swap where that can be said; skips where none can be made."""
    for parent, file in _parents():
        group = parent / f"shardstore-test-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            try:
                (group / file).write_text(str(limit))
            except OSError:
                group.rmdir()
                continue
            with suppress(OSError):
                (group / "memory.swap.max").write_text("0")
            try:
                yield group, file
            finally:
                group.rmdir()
            return
    pytest.skip("no memory control group can be made here")


def _num_killed(group: Path, file: str) -> int:
    events = group / ("memory.oom_control" if file == _LIMITS[0] else "memory.events")
    found = re.search(r"^oom_kill (\d+)$", events.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def _run(
    group: Path, folder: Path, num_ranks: int, *cases: tuple[str, Any, int]
) -> list[list[dict[str, Any]]]:
    """Cases of tmpfs_cases in the group, with a tmpfs of 8 GiB."""
    join = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    run = subprocess.run(
        ["unshare", "-m", "sh", "-c", join, "sh", sys.executable, "-m", "tests.store.tmpfs_cases",
         str(folder), "size=8g", str(num_ranks), *map(json.dumps, cases)],
        capture_output=True, text=True, timeout=150, check=False, cwd=_ROOT,
    )  # fmt: skip
    assert run.returncode == 0, f"{run.returncode} (a signal if negative): {run.stderr}"
    found: list[list[dict[str, Any]]] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "limit_mib", "state_mib"), [(1, 700, 250), (2, 1600, 250)])
def test_a_group_smaller_than_the_tmpfs(
    disk_folder: Path, num_ranks: int, limit_mib: int, state_mib: int
) -> None:
    limit, nbytes = limit_mib * MIB, state_mib * MIB
    with _group(limit) as (group, file):
        auto, explicit, alone = _run(
            group, disk_folder, num_ranks,
            ("save_and_restore", "auto", nbytes), ("save_and_restore", "4GiB", nbytes),
            ("save_without_root", "4GiB", nbytes),
        )  # fmt: skip
        assert _num_killed(group, file) == 0
    for ranks in (auto, explicit):
        for found in ranks:
            assert found["step"] == 3
            assert found["num_streamed"] > 0, "disk only, for what memory has no room"
        said = "".join(found["said"] for found in ranks)
        for named in (f"{limit:,}", file, "resources.limits.memory"):
            assert named in said, said
    refused = [found for found in alone if found["refused"][0] == "TierFullError"]
    assert refused, alone
    for found in alone:  # a rank that found room hears of the one that did not
        assert found["refused"][0] in ("TierFullError", "SaveFailedError"), found
        assert found["listed"] == 0
    for found in refused:
        assert f"{limit:,}" in found["refused"][1], found
        needed, free = found["numbers"]
        assert needed > nbytes > free >= 0
