"""How much host memory this rank may use: tmpfs, cgroup and machine limits, measured."""

from __future__ import annotations

import os
import re
from typing import Final

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
                 "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}  # fmt: skip
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


def parse_bytes(value: int | str, *, what: str) -> int:
    """Read a size: bytes, or text as "24GiB", "500 MB".

    Raises:
        ValueError: Not a size, or negative.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f'{what} must be bytes or text like "24GiB", got {value!r}')
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{what} must not be negative, got {value}")
        return value
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ValueError(f'{what}={value!r} is not a size; write bytes or text like "24GiB"')
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def measured_budget(memory_dir: str | None, *, num_local_ranks: int) -> int:
    """Half of what is free in the tmpfs and under the memory limits, shared among the host's ranks.

    Args:
        memory_dir: tmpfs that will hold the slots; None for anonymous memory.
        num_local_ranks: Ranks on this host.
    """
    free = [available_memory_bytes()]
    if memory_dir is not None:
        try:
            stats = os.statvfs(memory_dir)
        except OSError:
            return 0
        free.append(stats.f_bavail * stats.f_frsize)
    return max(0, min(free)) // 2 // max(1, num_local_ranks)


def available_memory_bytes() -> int:
    """Memory that can still be used without swapping or hitting the container's limit."""
    free = [room for room in (_meminfo_available(), *_cgroup_headroom()) if room is not None]
    return min(free, default=0)


def _meminfo_available() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _cgroup_headroom() -> list[int]:
    """Limit minus use, of each cgroup that limits this process (v2, else v1)."""
    headroom = []
    for limit_file, use_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        limit, use = _read_number(limit_file), _read_number(use_file)
        if limit is not None and use is not None and limit < 1 << 60:
            headroom.append(max(0, limit - use))
    return headroom


def _read_number(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
