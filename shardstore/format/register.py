"""What a listing needs of a manifest, read without its tables, which may be large."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import msgspec

from shardstore.format.canonical import MANIFEST_OPENING
from shardstore.format.digests import BLANK, digest_around
from shardstore.format.records import FORMAT_VERSION, SnapshotId


class _Listed(msgspec.Struct, frozen=True):
    nbytes: int
    host: str
    twin: int | msgspec.UnsetType = msgspec.UNSET


class Register(msgspec.Struct, frozen=True):
    """What a listing needs of a manifest: all but topology, tables and files."""

    format: int
    state: Literal["committed", "aborted"]
    step: int
    run: int
    count: int
    nonce: str
    created: float
    world_size: int
    shards: tuple[_Listed, ...]
    metadata: object
    persist: bool | msgspec.UnsetType = msgspec.UNSET
    reason: str = ""
    """Why it was aborted."""

    @property
    def needed_ranks(self) -> set[int]:
        """Ranks without whose file there is no snapshot: not those that have a twin."""
        return {rank for rank, shard in enumerate(self.shards) if shard.twin is msgspec.UNSET}

    here: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def ranks_here(self) -> tuple[int, ...]:
        """Ranks whose files belong in this folder."""
        return tuple(range(self.world_size)) if self.here is msgspec.UNSET else self.here

    @property
    def is_counted(self) -> bool:
        """Whether retention counts it: not if it was saved to stay in memory."""
        return self.persist is msgspec.UNSET

    @property
    def id(self) -> SnapshotId:
        """Identity of the snapshot."""
        return SnapshotId(self.step, self.run, self.count, self.nonce)

    @property
    def nbytes(self) -> int:
        """Bytes of all shard files."""
        return sum(shard.nbytes for shard in self.shards)


def read_register(data: bytes, *, expect: SnapshotId) -> Register | None:
    """Read an undamaged manifest of this version without its tables, which may be large.

    Returns:
        None if `decode_manifest` has to judge: the digest, the version or the id are not as they should.
    """
    at = len(MANIFEST_OPENING)
    if not data.startswith(MANIFEST_OPENING):
        return None
    if data[at : at + len(BLANK)] != digest_around(data, at).encode():
        return None
    try:
        register = msgspec.json.decode(data, type=Register)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return register if is_sound(register) and register.id == expect else None


def is_sound(register: Register) -> bool:
    """Whether a register says what one of this version can say, wherever it was read."""
    whole = len(register.shards) == register.world_size or register.state == "aborted"
    if register.here is not msgspec.UNSET and not is_part(register.here, register.world_size):
        return False
    return whole and register.format == FORMAT_VERSION and register.persist is not True


def is_part(ranks: tuple[int, ...], world_size: int) -> bool:
    """Whether these are some ranks of all, not all of them, each once and in order."""
    is_ordered = all(a < b for a, b in pairwise(ranks))
    return 0 < len(ranks) < world_size and is_ordered and ranks[0] >= 0 and ranks[-1] < world_size
