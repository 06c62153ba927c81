"""Checks of a root: room, rights, exclusive create, fsync, direct transfers, clock of its server.

Everything is tried in a folder of its own, which is removed again. A root that does not exist yet is
tried in its nearest parent that does, and not made.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from shardstore.cli.checks.check import Check
from shardstore.cli.output import size
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.pages import private_pages
from shardstore.tiers.places import doubts_about_root

_PREFIX: Final = ".shardstore-doctor-"
_LITTLE_BYTES: Final = 10 << 30
_NUM_RACERS: Final = 4
_NUM_RACES: Final = 50
_SKEW_S: Final = 5.0
_RACER: Final = """
import os, sys
folder, own = sys.argv[1], os.path.join(sys.argv[1], "own-" + sys.argv[2])
with open(own, "x") as file:
    file.write(sys.argv[2])
print("ready", flush=True)
sys.stdin.read()
won = []
for race in range(int(sys.argv[3])):
    try:
        os.link(own, os.path.join(folder, "won-%d" % race))
        won.append(race)
    except FileExistsError:
        pass
print(*won)
"""
"""Gives a file a name that others want as well, as a rank that publishes does."""


@contextmanager
def scratch_folder(folder: str) -> Iterator[str]:
    """A folder in `folder` that nobody else uses, gone afterwards.

    Raises:
        OSError: It cannot be made.
    """
    with tempfile.TemporaryDirectory(
        prefix=_PREFIX, dir=folder, ignore_cleanup_errors=True
    ) as path:
        yield path


def check_room(root: str, found: str, ops: FileOps) -> list[Check]:
    """Checks that write nothing: what the root is on, and its free space."""
    stats = os.statvfs(found)
    free, total = stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize
    kind = _file_system(found)
    facts = {"free_bytes": free, "size_bytes": total, "file_system": kind}
    text = f"{size(free)} free of {size(total)} ({kind})"
    checks = []
    if free < _LITTLE_BYTES or free < total // 20:
        remedy = "Delete old snapshots (shardstore prune, keep=), or give another root."
        checks.append(Check("root: space", "warn", text, remedy, facts))
    else:
        checks.append(Check("root: space", "ok", text, facts=facts))
    doubt = doubts_about_root(root, None, ops)
    if doubt is not None:
        checks.append(
            Check(
                "root: durable",
                "warn",
                "it is on a tmpfs: gone after a reboot or with the container",
                "Give a root on a disk or a network file system.",
            )
        )
    if stats.f_files and stats.f_favail < 10_000:
        checks.append(
            Check("root: inodes", "warn", f"{stats.f_favail:,} left", "Delete small files there.")
        )
    return checks


def _file_system(path: str) -> str:
    """Name of the file system that a folder is on."""
    best, kind = "", "unknown"
    real = os.path.realpath(path)
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                _, where, name, *_ = line.split()
                mount = where.replace("\\040", " ")
                if f"{real}/".startswith(f"{mount.rstrip('/')}/") and len(mount) >= len(best):
                    best, kind = mount, name
    except (OSError, ValueError):
        pass
    return kind


def check_writing(folder: str, ops: FileOps) -> list[Check]:
    """Everything that a save needs of the folder, tried in it."""
    try:
        with scratch_folder(folder) as scratch:
            done = Check("root: writable", "ok", f"{folder}; nothing was left there")
            return [
                done,
                _exclusive_create(scratch),
                _fsync(scratch, ops),
                _direct(scratch, ops),
                _server_clock(scratch),
            ]
    except OSError as error:
        return [
            Check(
                "root: writable",
                "fail",
                f"{folder}: {error.strerror}",
                "A restore needs to read only; a save needs to write: mount it writable, or give rights "
                f"to uid {os.getuid()}.",
            )
        ]


def _exclusive_create(scratch: str) -> Check:
    """Several processes race for each of many names: every name must have one winner."""
    name = "root: exclusive create"
    remedy = (
        "Two ranks or jobs could both believe that they committed. Use a file system with atomic hard "
        "links (ext4, xfs, NFSv4, Lustre), and a root for each job."
    )
    racers = [
        subprocess.Popen(  # noqa: S603 - this interpreter, with our own text
            [sys.executable, "-I", "-S", "-c", _RACER, scratch, str(racer), str(_NUM_RACES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for racer in range(_NUM_RACERS)
    ]
    problem = ""
    for process in racers:
        assert process.stdout is not None
        process.stdout.readline()  # all are ready
    for process in racers:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    winners: dict[int, list[int]] = {race: [] for race in range(_NUM_RACES)}
    for racer, process in enumerate(racers):
        out, err = process.communicate()
        if process.returncode != 0:
            problem = err.strip().splitlines()[-1] if err.strip() else "a process died"
        for won in out.split():
            winners[int(won)].append(racer)
    if problem:
        return Check(name, "fail", f"a hard link could not be made: {problem}", remedy)
    bad = [
        race
        for race, found in winners.items()
        if found != [_owner(os.path.join(scratch, f"won-{race}"))]
    ]
    facts = {"races": _NUM_RACES, "processes": _NUM_RACERS, "not_honoured": len(bad)}
    if bad:
        text = f"{len(bad)} of {_NUM_RACES} names did not have one winner"
        return Check(name, "fail", text, remedy, facts)
    text = f"one winner in each of {_NUM_RACES} races of {_NUM_RACERS} processes of this host"
    return Check(name, "ok", text, facts=facts)


def _owner(path: str) -> int:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return -1


def _fsync(scratch: str, ops: FileOps) -> Check:
    started = time.perf_counter()
    try:
        fd = ops.open_new(os.path.join(scratch, "synced"))
        try:
            ops.write_at(fd, memoryview(b"x" * 4096), 0)
            ops.fsync(fd)
        finally:
            os.close(fd)
        ops.rename(os.path.join(scratch, "synced"), os.path.join(scratch, "renamed"))
        ops.fsync_folder(scratch)
    except OSError as error:
        return Check(
            "root: fsync",
            "fail",
            f"{error.strerror}",
            "Nothing that is saved here would be durable: give another root.",
        )
    seconds = time.perf_counter() - started
    facts = {"seconds": seconds}
    found = f"a file and its folder in {1000 * seconds:.1f} ms"
    if seconds > 1.0:
        return Check("root: fsync", "warn", found, "The disk or its server is busy.", facts)
    return Check("root: fsync", "ok", found, facts=facts)


def _direct(scratch: str, ops: FileOps) -> Check:
    name = "root: direct transfers"
    page = private_pages(4096)
    try:
        fd = ops.open_new(os.path.join(scratch, "direct"))
        try:
            if ops.bypass_cache(fd, True):
                ops.write_at(fd, page, 0)
                return Check(name, "ok", "O_DIRECT works")
        finally:
            os.close(fd)
    except OSError:
        pass
    # Not a fault: writing goes through the page cache then, in a small window.
    return Check(name, "ok", "no O_DIRECT: writes go through the page cache, which is slower")


def _server_clock(scratch: str) -> Check:
    path = os.path.join(scratch, "now")
    before = time.time()
    with open(path, "x", encoding="ascii") as file:
        file.write("x")
    skew = os.stat(path).st_mtime - before
    facts = {"skew_s": skew}
    if abs(skew) > _SKEW_S:
        return Check(
            "root: clock",
            "warn",
            f"the root's clock differs from this host's by {skew:+.0f} s",
            "Synchronise both (NTP). Snapshots are never ordered by time, but people read it.",
            facts,
        )
    return Check("root: clock", "ok", f"differs by {max(0.0, skew):.1f} s", facts=facts)
