"""One look at a root: what is in all its folders, and what their registers say; and an index that saves reading them.

On remote storage each register is a request. What was read is kept under the tag that the store gave the
object, and rank 0 keeps it in `index-XXXXXXXX.json` beside the run records as well. An entry counts only
while the listing shows that tag: a stale, damaged or missing index costs requests, never an answer.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import msgspec

from shardstore.errors import TierError
from shardstore.format.manifest import MANIFEST_NAME, shard_file_name
from shardstore.format.marks import Mark
from shardstore.format.records import SnapshotId
from shardstore.format.register import Register, is_sound, read_register
from shardstore.tiers.base import Found, RootTier, Survey
from shardstore.tiers.marks import marks_among

State: TypeAlias = Literal["committed", "aborted", "torn", "damaged"]

_INDEX: Final = re.compile(r"index-([0-9a-f]{8})\.json")
_SHARD: Final = re.compile(r"rank-([0-9]{5}|[1-9][0-9]{5,})\.safetensors")
_MAX_INDEX_NBYTES: Final = 4 << 20
_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Overview:
    """A root at one moment."""

    names: Mapping[SnapshotId, Mapping[str, Found]]
    """Files in the folder of every attempt."""
    registers: Mapping[SnapshotId, Register]
    """Of those that are committed or aborted, and undamaged."""
    problems: Mapping[SnapshotId, str]
    """Why the others, which have a register, cannot be read."""
    unread: Mapping[SnapshotId, TierError] = field(default_factory=dict)
    """Those of `problems` of which nothing is known: another look may tell."""
    root_names: tuple[str, ...] = ()
    """Files in the root itself."""
    spans_hosts: bool = False
    """It is of the roots of all hosts, where each has its own."""

    @property
    def ids(self) -> list[SnapshotId]:
        """Every attempt, oldest first."""
        return sorted(self.names, key=lambda i: i.order)

    def state(self, snapshot_id: SnapshotId) -> State:
        """State of an attempt."""
        if snapshot_id in self.registers:
            return self.registers[snapshot_id].state
        return "damaged" if snapshot_id in self.problems else "torn"

    def ranks(self, snapshot_id: SnapshotId) -> list[int]:
        """Ranks whose shard is there, sorted."""
        return ranks_among(self.names.get(snapshot_id, {}))

    def marks(self, snapshot_id: SnapshotId) -> frozenset[Mark]:
        """Marks beside an attempt."""
        return marks_among(self.names.get(snapshot_id, {}))

    def needed(self, register: Register) -> set[int]:
        """Ranks without whose file a snapshot is not whole here."""
        return needed_ranks(register, spans_hosts=self.spans_hosts)

    def committed(self) -> list[Register]:
        """Of all that are committed and have every file that belongs here, oldest first."""
        found = (self.registers[i] for i in self.ids if i in self.registers)
        return [
            r for r in found if r.state == "committed" and self.needed(r) <= {*self.ranks(r.id)}
        ]

    def sizes(self, snapshot_id: SnapshotId) -> dict[str, int] | None:
        """Sizes of the files of an attempt, by name; None if the look did not tell."""
        names = self.names.get(snapshot_id, {})
        if any(found.nbytes < 0 for found in names.values()):
            return None
        return {name: found.nbytes for name, found in names.items()}


def ranks_among(names: Iterable[str]) -> list[int]:
    """Ranks whose shard is among the files of an attempt, sorted."""
    return sorted(int(match[1]) for name in names if (match := _SHARD.fullmatch(name)))


def needed_ranks(register: Register, *, spans_hosts: bool) -> set[int]:
    """Ranks without whose file a snapshot is not whole: all without a twin, unless other hosts keep theirs.

    Args:
        register: Of the snapshot.
        spans_hosts: Of the roots of all hosts, where each has its own; else of one root.
    """
    here = {*range(register.world_size)} if spans_hosts else {*register.ranks_here}
    return register.needed_ranks & here


def is_cut(register: Register, sizes: Mapping[str, int], *, spans_hosts: bool) -> bool:
    """Whether a file has not the size that the register says, as in a copy that did not end."""
    return any(
        sizes.get(shard_file_name(rank)) != register.shards[rank].nbytes
        for rank in needed_ranks(register, spans_hosts=spans_hosts)
    )


class _Entry(msgspec.Struct, frozen=True):
    tag: str
    register: Register


class _Index(msgspec.Struct, frozen=True):
    format: int
    entries: tuple[_Entry, ...]


class KnownRegisters:
    """Registers by id and tag. Any thread."""

    def __init__(self) -> None:
        """Nothing is known."""
        self._lock = threading.Lock()
        self._entries: dict[SnapshotId, _Entry] = {}
        self._has_loaded = False

    def get(self, snapshot_id: SnapshotId, tag: str) -> Register | None:
        """What is known of the object with this tag."""
        with self._lock:
            entry = self._entries.get(snapshot_id)
        return entry.register if entry is not None and tag and entry.tag == tag else None

    def lacks(self, snapshot_id: SnapshotId) -> bool:
        """Whether nothing is known of it."""
        with self._lock:
            return snapshot_id not in self._entries

    def put(self, register: Register, tag: str) -> None:
        """Keep one; without a tag nothing can be kept."""
        if tag:
            with self._lock:
                self._entries[register.id] = _Entry(tag, register)

    def read(
        self, tier: RootTier, survey: Survey
    ) -> tuple[dict[SnapshotId, Register], dict[SnapshotId, bytes], dict[SnapshotId, TierError]]:
        """All registers that a survey has shown: what is known by its tag, and the others from the root.

        Returns:
            The good ones; what the bad ones hold; and why others could not be read.
        """
        tags = tags_of(survey.attempts)
        good: dict[SnapshotId, Register] = {}
        bad: dict[SnapshotId, bytes] = {}
        unread: dict[SnapshotId, TierError] = {}
        if tier.keeps_index and any(self.get(i, tag) is None for i, tag in tags.items()):
            self.load(tier, survey.names)
        for snapshot_id, tag in tags.items():
            known = self.get(snapshot_id, tag)
            if known is not None:
                good[snapshot_id] = known

        def take(ids: Collection[SnapshotId]) -> None:
            for snapshot_id, data in tier.read_manifests(ids).items():
                if isinstance(data, TierError):
                    if snapshot_id not in bad:
                        unread[snapshot_id] = data
                elif data is not None:
                    register = read_register(data, expect=snapshot_id)
                    if register is None:
                        bad[snapshot_id] = data
                    else:
                        good[snapshot_id] = register
                        bad.pop(snapshot_id, None)
                        self.put(register, tags[snapshot_id])

        take([i for i in tags if i not in good])
        if tier.keeps_index:
            take([*bad])  # once more: bytes may have become wrong on the way
        return good, bad, unread

    def load(self, tier: RootTier, names: Iterable[str]) -> None:
        """Read the newest index among the names in a root, once. Whatever it is, nothing depends on it."""
        with self._lock:
            if self._has_loaded:
                return
            self._has_loaded = True
        found = max((name for name in names if _INDEX.fullmatch(name)), default=None)
        if found is None:
            return
        try:
            index = msgspec.json.decode(tier.read_small(found) or b"", type=_Index)
        except (TierError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        if index.format == _FORMAT:
            with self._lock:
                for entry in filter(lambda entry: is_sound(entry.register), index.entries):
                    self._entries.setdefault(entry.register.id, entry)

    def drop(self, ids: Iterable[SnapshotId]) -> None:
        """Forget what was deleted."""
        with self._lock:
            for snapshot_id in ids:
                self._entries.pop(snapshot_id, None)

    def save(self, tier: RootTier, run: int) -> None:
        """Write an index of what is known, the newest as far as there is room.

        Args:
            tier: Of the root.
            run: Number of this run, whose index it is.

        Raises:
            TierError: It cannot be written.
        """
        with self._lock:
            known = list(self._entries.values())
        entries: list[msgspec.Raw] = []
        room = _MAX_INDEX_NBYTES
        for entry in sorted(known, key=lambda e: e.register.id.order, reverse=True):
            data = msgspec.json.encode(entry)
            room -= len(data)
            if room < 0:
                break
            entries.append(msgspec.Raw(data))
        text = msgspec.json.encode({"format": _FORMAT, "entries": entries})
        tier.put_small(index_name(run), text)


def index_name(run: int) -> str:
    """Name of the index that a run keeps."""
    return f"index-{run:08x}.json"


def older_indexes(names: Iterable[str], run: int) -> list[str]:
    """Names of the indexes of earlier runs."""
    return [n for n in names if (match := _INDEX.fullmatch(n)) and int(match[1], 16) < run]


def tags_of(names: Mapping[SnapshotId, Mapping[str, Found]]) -> dict[SnapshotId, str]:
    """Tags of the registers that a look has shown."""
    return {i: found[MANIFEST_NAME].tag for i, found in names.items() if MANIFEST_NAME in found}
