"""Whether the run that left something still works: proven by the kernel, never guessed by time."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import msgspec

from shardstore.cluster.boot import read_boot_id
from shardstore.format.records import FORMAT_VERSION
from shardstore.tiers.addresses import is_url

Liveness: TypeAlias = Literal["alive", "dead", "unknown"]


class RootClass(msgspec.Struct, frozen=True):
    """Ranks that see one root, where not all ranks do (P4, private roots)."""

    host: str
    """Name of the host of its first rank."""
    ranks: tuple[int, ...]
    """In order; the first of them keeps the registers of this root."""

    @property
    def first(self) -> int:
        """The rank that lists this root, and alone writes its registers."""
        return self.ranks[0]


class RunRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Content of `run-XXXXXXXX.json`: who claimed the number. Of rank 0, or of who commits on this root."""

    format: int
    nonce: str
    host: str
    boot_id: str
    started: float
    """Seconds since the epoch, for people."""
    pid: int = 0
    """0: written by a version that did not say, as with all that follow."""
    pid_namespace: str = ""
    process_started: int = -1
    """Clock ticks since boot: two processes of one number differ in it."""
    folder: tuple[int, int] = (0, 0)
    """Device and inode of the root: a copy of it is another folder."""
    memory: str = ""
    """Folder of its memory tier."""
    num_other_hosts_ranks: int = 0
    """Ranks on other hosts, whose memory cannot be seen from this one."""
    disk: str = ""
    """Folder of its disk tier."""
    location: str = ""
    """The root's URL, where it is on remote storage: a copy of it is another root."""
    is_exclusive: bool = True
    """Whether the store honours exclusive create."""
    roots: tuple[RootClass, ...] = ()
    """Where hosts share no root: the ranks of each, this record's first rank being that of one of them."""
    first_rank: int = 0
    """Where hosts share no root: the rank that keeps this one, and whose process this record is of."""

    @property
    def who(self) -> str:
        """Process and host, for messages."""
        return f"process {self.pid or '?'} on {self.host}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether a run's rank 0 is alive, and how that is known."""

    liveness: Liveness
    why: str
    """Also what would prove it, where it is unknown."""


_open_here: Final[set[str]] = set()
"""Nonces of the runs whose store is open in this process."""


def entered(nonce: str) -> None:
    """A store of this process has a run now."""
    _open_here.add(nonce)


def left(nonce: str) -> None:
    """That store was left: this process does nothing for the run any more."""
    _open_here.discard(nonce)


os.register_at_fork(after_in_child=_open_here.clear)


def record_of_this(
    *,
    nonce: str,
    host: str,
    boot_id: str,
    started: float,
    location: str,
    memory: str,
    others: int,
    disk: str = "",
    is_exclusive: bool = True,
    roots: tuple[RootClass, ...] = (),
    first_rank: int = 0,
) -> RunRecord:
    """The record of a run whose rank 0 is this process.

    Args:
        nonce: Of the run.
        host: Name of this host, for people.
        boot_id: Of its kernel.
        started: Seconds since the epoch.
        location: The root, which exists.
        memory: Folder of the memory tier; empty for none.
        others: How many ranks run on other hosts.
        disk: Folder of the disk tier; empty for none.
        is_exclusive: Whether the store honours exclusive create.
        roots: Of hosts that share none; empty where all ranks see one.
        first_rank: Which rank this is, where there are `roots`.
    """
    pid = os.getpid()
    return RunRecord(
        FORMAT_VERSION, nonce, host, boot_id, started, pid, pid_namespace(), process_started(pid),
        folder_identity(location), memory, others, disk, location if is_url(location) else "",
        is_exclusive, roots, first_rank,
    )  # fmt: skip


def decode_record(data: bytes | None) -> RunRecord | None:
    """Read a record, whatever other members it has; None if it is no record."""
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=RunRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def judge(record: RunRecord | None, location: str) -> Judgement:
    """Whether the run of a record, found in the root at `location`, is alive."""
    if record is None:
        return Judgement("unknown", "no record says which process it was")
    if not record.pid or record.process_started < 0:
        return Judgement(
            "unknown", f"the record of {record.who} does not say enough of the process"
        )
    if record.boot_id != read_boot_id() or not record.boot_id:
        return Judgement(
            "unknown",
            f"{record.who} cannot be seen from {platform.node()}, or that host was restarted since: "
            "look there, or make sure that the job has ended",
        )
    if record.pid_namespace != pid_namespace():
        return Judgement(
            "unknown",
            f"{record.who} ran in another container (pid namespace {record.pid_namespace}): look from "
            "inside it, or make sure that it has ended",
        )
    url = location if is_url(location) else ""
    if record.folder != folder_identity(location) or record.location != url:
        return Judgement(
            "unknown",
            f"the record of {record.who} is of another folder: this one was copied or moved, and "
            "copying may still go on",
        )
    return _judge_process(record)


def _judge_process(record: RunRecord) -> Judgement:
    who = record.who
    if record.pid == os.getpid() and process_started(record.pid) == record.process_started:
        if record.nonce in _open_here:
            return Judgement("alive", f"{who} is this one")
        return Judgement("dead", f"{who} is this one, and its store was left")
    try:
        os.kill(record.pid, 0)
    except ProcessLookupError:
        return Judgement("dead", f"{who} has ended")
    except OSError:
        pass  # it is there, and not ours
    started = process_started(record.pid)
    if started < 0:
        return Judgement("unknown", f"{who} may be running, and /proc does not show since when")
    if started != record.process_started:
        return Judgement("dead", f"{who} has ended: its number is another process's now")
    if _is_defunct(record.pid):
        return Judgement("dead", f"{who} has ended, and its parent has not looked yet")
    return Judgement("alive", f"{who} is running")


def folder_identity(path: str) -> tuple[int, int]:
    """Device and inode of a folder; (-1, -1) where there is none to be seen, (0, 0) of a URL."""
    if is_url(path):
        return (0, 0)
    try:
        found = os.stat(path)
    except OSError:
        return (-1, -1)
    return (found.st_dev, found.st_ino)


def pid_namespace() -> str:
    """Where process numbers are counted, as `pid:[4026531836]`; empty where /proc does not say."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def process_started(pid: int) -> int:
    """When a process started, in clock ticks since boot; -1 if it is gone or cannot be seen."""
    fields = _fields(pid)
    return int(fields[19]) if len(fields) > 19 and fields[19].isdigit() else -1


def _is_defunct(pid: int) -> bool:
    """Whether nothing of a process runs any more, and only its number is left."""
    fields = _fields(pid)
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        threads = []
    return bool(fields) and fields[0] in ("Z", "X") and len(threads) <= 1


def _fields(pid: int) -> list[str]:
    """Of /proc/<pid>/stat, from the third on: the second is a name that may hold anything."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
