"""Records that the shard header and the manifest share: identity, placements, meshes, tensor rows."""

from __future__ import annotations

import re
from typing import Final

import msgspec

FORMAT_VERSION: Final = 1

_ID = re.compile(r"step-(\d{12,})\.([0-9a-f]{8})-(\d{6,})-([0-9a-f]{8})")


class SnapshotId(msgspec.Struct, frozen=True, eq=True):
    """Identity of one save attempt (protocol P1).

    The folder name holds all four parts and is compared whole. Order is (run, count, nonce): never
    the step, a time or text.
    """

    step: int
    """Step that the trainer named."""
    run: int
    """Number of the run (one start of all ranks) that saved it."""
    count: int
    """How many saves the run had entered, this one included."""
    nonce: str
    """Eight hex digits drawn by rank 0 at the start of the run."""

    @property
    def name(self) -> str:
        """Folder name, as `step-000000000100.0000002a-000007-9f3c1d20`."""
        return f"step-{self.step:012d}.{self.run:08x}-{self.count:06d}-{self.nonce}"

    @property
    def order(self) -> tuple[int, int, str]:
        """Sort key: the newest snapshot has the highest."""
        return (self.run, self.count, self.nonce)

    @classmethod
    def parse(cls, name: str) -> SnapshotId | None:
        """Read a folder name; None if it is not one of ours."""
        match = _ID.fullmatch(name)
        if match is None:
            return None
        step, run, count, nonce = match.groups()
        parsed = cls(int(step), int(run, 16), int(count), nonce)
        return parsed if parsed.name == name else None

    def __str__(self) -> str:
        return self.name


class Placement(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False
):
    """How one mesh axis holds a tensor. For people and validation: offsets are the ground truth."""

    type: str
    """`Replicate`, `Shard` or `_StridedShard`."""
    dim: int | None = None
    """Tensor dim that is split; None for Replicate."""
    split_factor: int | None = None
    """Of `_StridedShard`."""


class Mesh(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device mesh, as one rank sees it."""

    shape: tuple[int, ...]
    axis_names: tuple[str, ...] | None
    device_type: str
    ranks: tuple[int, ...]
    """Global ranks, row-major."""


class TensorRow(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False
):
    """What a tensor is on every rank: one row of a tensor table.

    Equal on all ranks of an FSDP job, so a manifest stores each distinct table once.
    """

    path: tuple[str, ...]
    """Where it sits in the state."""
    dtype: str
    """Torch's name, as `bfloat16`."""
    shape: tuple[int, ...]
    """Global shape."""
    placements: tuple[Placement, ...] | None = None
    """One per mesh axis; None for a plain tensor, which each rank stores whole."""
    mesh: int | None = None
    """Index into the meshes of the header; set exactly when `placements` is."""
    private: bool = False
    """Plain tensor outside modules and optimizers: its key is made unique per rank."""
    alias_of: int | None = None
    """Index of an earlier row that is the same tensor (tied parameters): no bytes of its own."""


class TensorPiece(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """This rank's piece of the row with the same index: a half-open box in global coordinates."""

    key: str
    """Name in the safetensors header; empty for an alias, and for what is in a replica's file."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    device: str
    """Device type that it was copied from, as `cpu`."""
    digest: str
    """xxh3-128 of the bytes, 32 hex digits; empty for an alias."""


class NearCopy(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A rank's whole file, which memory and disk hold where the root has only a part of it."""

    nbytes: int
    header_digest: str


class Sharing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file on the root leaves to the files of replicas, which hold the very same pieces."""

    held_by: tuple[tuple[int, int], ...]
    """Rows whose bytes are in another rank's file, ascending, each with that rank."""
    near: NearCopy
    """This rank's whole file."""


class ShardEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's file in the manifest."""

    rank: int
    file: str
    """Name inside the snapshot folder, never a path."""
    nbytes: int
    table: str
    """Digest of its tensor table."""
    header_digest: str
    host: str
    meshes: tuple[int, ...]
    """For each mesh of its header: index into the meshes of the manifest."""
    coordinates: tuple[tuple[int, ...] | None, ...]
    """Of this rank in those meshes; None where it is not part of one."""
    near: NearCopy | msgspec.UnsetType = msgspec.UNSET
    """The rank's whole file, where the one listed here leaves pieces to replicas."""
    twin: int | msgspec.UnsetType = msgspec.UNSET
    """A rank whose header says the same but for the rank, where this file holds no bytes of tensors."""


class ShardHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `shardstore` record in a shard file: enough to judge the file without its manifest."""

    format: int
    step: int
    run: int
    count: int
    nonce: str
    rank: int
    world_size: int
    created: float
    """Seconds since the epoch. Shown to people, never compared."""
    host: str
    persist: bool
    meshes: tuple[Mesh, ...]
    coordinates: tuple[tuple[int, ...] | None, ...]
    table: tuple[TensorRow, ...]
    table_digest: str
    pieces: tuple[TensorPiece, ...]
    """Parallel to `table`."""
    leaves: object
    """Non-tensor values with exact types: see the leaf codec in docs/format.md."""
    metadata: object
    """The user's JSON, as this rank gave it."""
    writer: dict[str, str]
    """Library versions."""
    sharing: Sharing | msgspec.UnsetType = msgspec.UNSET
    """Set where some pieces are in the files of replicas; only on the root."""

    @property
    def id(self) -> SnapshotId:
        """Identity of the snapshot that this file belongs to."""
        return SnapshotId(self.step, self.run, self.count, self.nonce)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The commit register of a snapshot folder (protocol P4): written once, last."""

    format: int
    state: str
    """`committed` or `aborted`."""
    step: int
    run: int
    count: int
    nonce: str
    created: float
    world_size: int
    meshes: tuple[Mesh, ...]
    tables: dict[str, tuple[TensorRow, ...]]
    """By digest; each distinct table once."""
    shards: tuple[ShardEntry, ...]
    """One per rank, in rank order; empty when aborted."""
    metadata: object
    writer: dict[str, str]
    reason: str = ""
    """Why it was aborted."""
    persist: bool | msgspec.UnsetType = msgspec.UNSET
    """False: saved to stay in memory, and here because its memory was needed. Never true."""
    exclusive: bool | msgspec.UnsetType = msgspec.UNSET
    """False: the store ignores exclusive create, and nothing but its owner kept others from writing this."""
    replicas: str | msgspec.UnsetType = msgspec.UNSET
    """`once`: some shards leave pieces to the files of replicas."""
    here: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    """Where hosts share no root: ranks whose files are in this folder, some of all. The others' are on
    their hosts, in folders of the same name."""

    @property
    def ranks_here(self) -> tuple[int, ...]:
        """Ranks whose files belong in this folder."""
        return tuple(range(self.world_size)) if self.here is msgspec.UNSET else self.here

    @property
    def id(self) -> SnapshotId:
        """Identity of the snapshot."""
        return SnapshotId(self.step, self.run, self.count, self.nonce)

    @property
    def nbytes(self) -> int:
        """Bytes of all shard files."""
        return sum(shard.nbytes for shard in self.shards)
