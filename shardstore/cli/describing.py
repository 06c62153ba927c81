"""Tensors and meshes in words, from the tables of a manifest or of headers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardstore.engine.attempts import Examination
from shardstore.engine.difference import describe_mesh
from shardstore.format.dtypes import DTYPES
from shardstore.format.records import Mesh, Placement, TensorRow


@dataclass(slots=True)
class DescribedTensor:
    """One tensor, and the ranks whose tables say the same of it."""

    name: str
    row: TensorRow
    mesh: Mesh | None
    alias_of: str | None
    ranks: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor; none of an alias."""
        if self.row.alias_of is not None:
            return 0
        return math.prod(self.row.shape) * DTYPES[self.row.dtype].itemsize

    @property
    def placements(self) -> str:
        """`Shard(0), Replicate on dp 2 x tp 4 (cuda)`, or how ranks hold a plain tensor."""
        if self.alias_of is not None:
            return f"same as {self.alias_of}"
        if self.row.placements is None or self.mesh is None:
            return "each rank its own" if self.row.private else "whole on each rank"
        texts = ", ".join(describe_placement(p) for p in self.row.placements)
        return f"{texts} on {describe_mesh(self.mesh)}"


def describe_placement(placement: Placement) -> str:
    """`Shard(0)`."""
    facts = (placement.dim, placement.split_factor)
    inner = ", ".join(str(fact) for fact in facts if fact is not None)
    return f"{placement.type}({inner})" if inner else placement.type


def describe_tensors(found: Examination) -> list[DescribedTensor]:
    """Every tensor of an attempt, in the order of the tables, equal ones of several ranks once."""
    tensors: dict[tuple[object, ...], DescribedTensor] = {}
    for table, meshes, ranks in _tables(found):
        for row in table:
            mesh = None if row.mesh is None else meshes[row.mesh]
            name = ".".join(row.path)
            alias = None if row.alias_of is None else ".".join(table[row.alias_of].path)
            key = (name, row.dtype, row.shape, row.placements, mesh, alias, row.private)
            tensor = tensors.setdefault(key, DescribedTensor(name, row, mesh, alias))
            tensor.ranks += ranks
    return list(tensors.values())


def _tables(
    found: Examination,
) -> Iterable[tuple[Sequence[TensorRow], Sequence[Mesh], list[int]]]:
    """Each distinct table with the meshes that its rows mean, and its ranks."""
    groups: dict[tuple[object, ...], tuple[Sequence[TensorRow], Sequence[Mesh], list[int]]] = {}
    manifest = found.manifest
    if manifest is not None:
        for shard in manifest.shards:
            meshes = tuple(manifest.meshes[index] for index in shard.meshes)
            group = groups.setdefault(
                (shard.table, meshes), (manifest.tables[shard.table], meshes, [])
            )
            group[2].append(shard.rank)
    for rank, sealed in found.shards.items():
        header = sealed.header
        key = (header.table_digest, header.meshes)
        groups.setdefault(key, (header.table, header.meshes, []))[2].append(rank)
    return groups.values()


def meshes_of(found: Examination) -> list[Mesh]:
    """Distinct meshes of an attempt."""
    if found.manifest is not None:
        return list(found.manifest.meshes)
    meshes = (mesh for sealed in found.shards.values() for mesh in sealed.header.meshes)
    return list(dict.fromkeys(meshes))
