"""How much host memory this rank may use: tmpfs, control group and machine limits, measured."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

from shardstore.errors import TierFullError, shown
from shardstore.format.numbers import whole_number
from shardstore.tiers.cgroups import group_rooms
from shardstore.tiers.fileops import FileOps

SPARE_BYTES: Final = 128 << 20
"""Left alone under every limit: the buffers that states stream through."""

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
                 "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}  # fmt: skip
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)
_MAX_BYTES: Final = 1 << 60

TMPFS_REMEDY: Final = (
    "In a container give it more shared memory (--shm-size, --ipc=host, or an emptyDir volume with "
    "{medium: Memory})."
)
_GROUP_REMEDY: Final = "Raise the limit (docker --memory, resources.limits.memory, MemoryMax=), or give a smaller memory=."
_MACHINE_REMEDY: Final = "Give a smaller memory=, or a root to write to."


def parse_bytes(value: object, *, what: str) -> int:
    """Read a size: bytes, or text as "24GiB", "500 MB".

    Raises:
        ValueError: Not a size, negative, a part of a byte, or more than any machine has.
    """
    given = f"{what}={shown(value)}"
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is not None:
        try:
            nbytes = int(float(match[1]) * _UNITS[(match[2] or "").lower()])
        except OverflowError:
            nbytes = _MAX_BYTES
        if nbytes == 0 and float(match[1]) > 0:
            raise ValueError(f"{given} is less than a byte: write the unit, as in 0.5GiB")
    else:
        number = whole_number(value)
        if number is None:
            raise ValueError(f'{given} is not a size: write bytes or text like "24GiB"')
        nbytes = number
        if nbytes < 0:
            raise ValueError(f"{given} must not be negative")
    if nbytes >= _MAX_BYTES:
        raise ValueError(f"{given} is more than any machine has: is it the right unit?")
    return nbytes


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that may still be taken under one limit."""

    nbytes: int
    where: str
    """The limit and its figures, for messages."""
    remedy: str


def tightest_room(memory_dir: str | None, ops: FileOps, *, with_swap: bool = False) -> Room:
    """The limit that leaves least to this process: of the tmpfs, its control groups, or the machine.

    Args:
        memory_dir: tmpfs that will hold the memory; None for anonymous memory.
        ops: System calls.
        with_swap: Count free swap: using it is slow, but ends no process.
    """
    rooms = []
    if memory_dir is not None:
        rooms.append(_tmpfs_room(memory_dir))
    for group in group_rooms(ops.read_text):
        where = f"the control group's limit of {group.limit:,} bytes ({group.file})"
        rooms.append(Room(group.nbytes, where, _GROUP_REMEDY))
    machine = _machine_room(ops, with_swap=with_swap)
    if machine is not None:
        rooms.append(machine)
    return min(rooms, key=lambda room: room.nbytes, default=Room(0, "no known limit", ""))


def _tmpfs_room(memory_dir: str) -> Room:
    try:
        stats = os.statvfs(memory_dir)
    except OSError:
        return Room(0, memory_dir, TMPFS_REMEDY)
    size, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    return Room(free, f"the tmpfs of {size:,} bytes at {memory_dir}", TMPFS_REMEDY)


def _machine_room(ops: FileOps, *, with_swap: bool) -> Room | None:
    found: dict[str, int] = {}
    try:
        for line in ops.read_text("/proc/meminfo").splitlines():
            name, _, value = line.partition(":")
            if name in ("MemTotal", "MemAvailable", "SwapFree"):
                found[name] = int(value.split()[0]) * 1024
    except (OSError, ValueError):
        return None
    if "MemAvailable" not in found:
        return None
    room = found["MemAvailable"] + (found.get("SwapFree", 0) if with_swap else 0)
    where = f"the machine's {found.get('MemTotal', 0):,} bytes of memory"
    return Room(room, where, _MACHINE_REMEDY)


def measured_budget(room: Room, *, num_local_ranks: int) -> int:
    """Half of what is free, shared among the host's ranks."""
    return max(0, room.nbytes) // 2 // max(1, num_local_ranks)


def check_room(nbytes: int, where: str, ops: FileOps, *, spare_bytes: int = SPARE_BYTES) -> None:
    """Refuse memory that would end the process: what arithmetic can foresee must not be left to the kernel.

    Args:
        nbytes: More memory that is wanted.
        where: For what.
        ops: System calls.
        spare_bytes: Left alone for what this rank and others under the same limits may take meanwhile.

    Raises:
        TierFullError: It would leave less than `spare_bytes` under some limit.
    """
    room = tightest_room(None, ops, with_swap=True)
    if room.where and room.remedy and nbytes + spare_bytes > room.nbytes:
        raise TierFullError(
            f"memory: {nbytes:,} bytes more for {where} could end the process: {room.nbytes:,} bytes are "
            f"left under {room.where}, of which {spare_bytes:,} are spared. {room.remedy}",
            tier="memory", key=where, operation="reserve",
            needed_bytes=nbytes, free_bytes=max(0, room.nbytes - spare_bytes),
        )  # fmt: skip


def buffer_bytes(most: int, ops: FileOps, *, num_local_ranks: int) -> int:
    """Size of a transfer buffer: `most`, or an eighth of a rank's part of what the limits leave, in MiB."""
    room = tightest_room(None, ops, with_swap=True)
    eighth = room.nbytes // (8 * num_local_ranks) >> 20 << 20 if room.remedy else most
    return max(1 << 20, min(most, eighth))
