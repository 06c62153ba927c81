"""Checks of this host and process: tmpfs, control groups, limits, clock."""

from __future__ import annotations

import glob
import os
import resource
import time
from typing import Final

from shardstore.cli.checks.check import Check
from shardstore.cli.output import size
from shardstore.errors import TierError
from shardstore.tiers.cgroups import group_rooms
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.leftovers import find_namespaces
from shardstore.tiers.limits import TMPFS_REMEDY
from shardstore.tiers.places import check_memory_dir

_LITTLE_BYTES: Final = 1 << 30
_FEW_FILES: Final = 4096
_FEW_LOCKED_BYTES: Final = 8 << 30
_EARLIEST: Final = 1735689600.0
"""2025-01-01: nothing of this format is older."""
_LATEST: Final = 4102444800.0
"""2100-01-01."""


def check_host(memory_dir: str, ops: FileOps, *, has_root: bool) -> list[Check]:
    """All checks that need no root; with one a store can do without memory that outlives its process."""
    return [
        _tmpfs(memory_dir, ops, has_root=has_root),
        _leftovers(memory_dir, ops),
        _control_group(ops),
        _locked_memory(),
        _open_files(),
        _clock(),
    ]


def _tmpfs(memory_dir: str, ops: FileOps, *, has_root: bool) -> Check:
    name = "host memory (tmpfs)"
    try:
        check_memory_dir(memory_dir, ops)
    except TierError as error:
        text = str(error).split(": give the folder")[0].removeprefix("memory: ")
        return Check(
            name,
            "warn" if has_root else "fail",
            text,
            f"Without it snapshots do not outlive the process. Give the folder of a tmpfs. {TMPFS_REMEDY}",
            {"memory_dir": memory_dir},
        )
    stats = os.statvfs(memory_dir)
    total, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    facts = {"memory_dir": memory_dir, "size_bytes": total, "free_bytes": free}
    found = f"{memory_dir}: {size(free)} free of {size(total)}"
    if free < _LITTLE_BYTES:
        return Check(name, "warn", found, f"Few states fit in that. {TMPFS_REMEDY}", facts)
    return Check(name, "ok", found, facts=facts)


def _leftovers(memory_dir: str, ops: FileOps) -> Check:
    name = "memory of ended runs"
    try:
        namespaces = find_namespaces(memory_dir, ops)
    except TierError as error:
        return Check(name, "warn", str(error), "Remove the folder, or give it back to this user.")
    dead = [n for n in namespaces if not any(owner.is_alive for owner in n.owners)]
    nbytes = sum(namespace.nbytes for namespace in dead)
    facts = {"nbytes": nbytes, "namespaces": [namespace.name for namespace in dead]}
    if not nbytes:
        return Check(name, "ok", "none", facts=facts)
    where = "" if memory_dir == "/dev/shm" else f" --memory-dir {memory_dir}"  # noqa: S108
    return Check(
        name,
        "warn",
        f"{size(nbytes)} in {memory_dir}: {', '.join(n.name for n in dead)}",
        f"If no restart will use it: shardstore memory clear{where}",
        facts,
    )


def _control_group(ops: FileOps) -> Check:
    name = "control group's memory"
    rooms = group_rooms(ops.read_text)
    if not rooms:
        return Check(name, "ok", "no limit", facts={"limit_bytes": None})
    room = min(rooms, key=lambda r: r.nbytes)
    facts = {"limit_bytes": room.limit, "free_bytes": room.nbytes, "file": room.file}
    found = f"{size(room.nbytes)} free of {size(room.limit)} ({room.file})"
    if room.nbytes < _LITTLE_BYTES:
        return Check(
            name,
            "warn",
            found,
            "Raise the limit (docker --memory, resources.limits.memory, MemoryMax=): memory of snapshots "
            "counts against it.",
            facts,
        )
    return Check(name, "ok", found, facts=facts)


def _locked_memory() -> Check:
    name = "locked memory (memlock)"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_gpu = bool(glob.glob("/dev/nvidia[0-9]*"))
    is_unlimited = soft == resource.RLIM_INFINITY
    facts = {"soft_bytes": None if is_unlimited else soft, "has_gpu": has_gpu}
    found = "no limit" if is_unlimited else f"at most {size(soft)}"
    if has_gpu and not is_unlimited and soft < _FEW_LOCKED_BYTES:
        return Check(
            name,
            "warn",
            f"{found}, and there is a GPU",
            "Page-locked slots make copies from the GPU faster. Raise it (ulimit -l unlimited, docker "
            "--ulimit memlock=-1, LimitMEMLOCK=infinity).",
            facts,
        )
    return Check(name, "ok", found if has_gpu else f"{found}; matters only with a GPU", facts=facts)


def _open_files() -> Check:
    name = "open files (nofile)"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    facts = {"soft": soft, "hard": hard}
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        return Check(
            name,
            "warn",
            f"at most {soft:,} per process (hard limit {hard:,})",
            "Many ranks and loaders need more: ulimit -n 65536, docker --ulimit nofile=65536.",
            facts,
        )
    return Check(name, "ok", f"at most {soft:,} per process", facts=facts)


def _clock() -> Check:
    now = time.time()
    if _EARLIEST <= now <= _LATEST:
        return Check("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)))
    return Check(
        "clock",
        "warn",
        f"it says {time.strftime('%Y-%m-%d', time.gmtime(now))}",
        "Set it (timedatectl set-ntp true). Snapshots are never ordered by time, but people read it.",
        {"seconds": now},
    )
