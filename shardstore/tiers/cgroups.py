"""What the memory limits of this process's control groups leave: v2, v1 and both, nested ones too.

Every group from the process's own up to the mount counts, because the tightest ancestor is the one that
ends the process. Paths come from /proc/self/cgroup, relative to the root of the mount as
/proc/self/mountinfo shows it: inside a container that is the container's own group, whatever the host
calls it. Groups above a namespace's border cannot be seen, nor their limits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

ReadText = Callable[[str], str]
"""Reads a small file of the kernel; OSError where there is none."""

_NO_LIMIT: Final = 1 << 60
"""v1 writes "no limit" as the largest multiple of a page."""


@dataclass(frozen=True, slots=True)
class GroupRoom:
    """What one limit of one group leaves."""

    nbytes: int
    limit: int
    file: str
    """Where the limit is written, for messages."""


@dataclass(frozen=True, slots=True)
class _Version:
    kind: str
    folder: str
    """Where it is mounted as a rule."""
    limits: tuple[str, ...]
    use: str
    cache: tuple[str, str]
    """Names in memory.stat of the page cache by age, of the group and all below it."""


_V2: Final = _Version(
    "cgroup2", "/sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current",
    ("inactive_file", "active_file"),
)  # fmt: skip
_V1: Final = _Version(
    "cgroup", "/sys/fs/cgroup/memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)  # fmt: skip


def group_rooms(read: ReadText) -> list[GroupRoom]:
    """Room under every memory limit above this process; empty where nothing limits it."""
    found: list[GroupRoom] = []
    seen: set[str] = set()
    for version, path in _own_groups(read):
        root, folder = _mount_of(version, read)
        for group in _upwards(folder, _inside(path, root)):
            if group not in seen:
                seen.add(group)
                found += _rooms_of(group, version, read)
    return found


def _own_groups(read: ReadText) -> Iterator[tuple[_Version, str]]:
    try:
        lines = read("/proc/self/cgroup").splitlines()
    except OSError:
        lines = ["0::/", "1:memory:/"]
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, is_group, path = rest.partition(":")
        if not is_group:
            continue
        if not controllers:
            yield _V2, path
        elif "memory" in controllers.split(","):
            yield _V1, path


def _mount_of(version: _Version, read: ReadText) -> tuple[str, str]:
    """Root of the mounted part of the hierarchy, and where it is mounted."""
    try:
        lines = read("/proc/self/mountinfo").splitlines()
    except OSError:
        lines = []
    for line in lines:
        left, _, right = line.partition(" - ")
        mounted, file_system = left.split(), right.split()
        if len(mounted) < 5 or len(file_system) < 3 or file_system[0] != version.kind:
            continue
        if version is _V2 or "memory" in file_system[2].split(","):
            return mounted[3], mounted[4]
    return "/", version.folder


def _inside(path: str, root: str) -> str:
    """A group's path below the mount; its top where the path is of another namespace."""
    if root != "/":
        path = path[len(root) :] if f"{path}/".startswith(f"{root}/") else "/"
    return "/" if ".." in path.split("/") else path


def _upwards(folder: str, path: str) -> Iterator[str]:
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), -1, -1):
        yield os.path.join(folder, *parts[:depth])


def _rooms_of(group: str, version: _Version, read: ReadText) -> Iterator[GroupRoom]:
    used = _number(os.path.join(group, version.use), read)
    if used is None:
        return
    cache: int | None = None
    for name in version.limits:
        limit = _number(os.path.join(group, name), read)
        if limit is None or limit >= _NO_LIMIT:
            continue
        if cache is None:
            cache = _reclaimable(os.path.join(group, "memory.stat"), version, read)
        left = max(0, limit - max(0, used - cache))
        yield GroupRoom(left, limit, os.path.join(group, name))


def _reclaimable(path: str, version: _Version, read: ReadText) -> int:
    """Page cache that the kernel takes back before it ends a process; tmpfs pages are not in it.

    A training that reads its data fills the group with cache up to the limit: counted as used, it would
    leave nothing to anybody. Half of the active part stays, because it would be read again.
    """
    old, active = version.cache
    found = dict.fromkeys(version.cache, 0)
    try:
        for line in read(path).splitlines():
            name, _, value = line.partition(" ")
            if name in found:
                found[name] = int(value)
    except (OSError, ValueError):
        return 0
    return found[old] + found[active] // 2


def _number(path: str, read: ReadText) -> int | None:
    try:
        return int(read(path))
    except (OSError, ValueError):  # "max" as well
        return None
