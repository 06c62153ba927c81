"""Ranks of the job and ranks of the store's group: files name the latter, live meshes the former."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from shardstore.errors import UnsupportedStateError
from shardstore.format.records import Mesh, ShardHeader


def meshes_in_group(meshes: Sequence[Mesh], group_ranks: Sequence[int]) -> tuple[Mesh, ...]:
    """Meshes with the group's ranks in place of the job's.

    Args:
        meshes: As live tensors have them.
        group_ranks: The job's rank of each rank of the group; empty: they are the same.

    Raises:
        UnsupportedStateError: A mesh has ranks outside the group.
    """
    return _translate(meshes, {rank: number for number, rank in enumerate(group_ranks)})


def header_in_job(header: ShardHeader, group_ranks: Sequence[int]) -> ShardHeader:
    """A stored header with the job's ranks in its meshes, to compare with live ones."""
    back = dict(enumerate(group_ranks))
    return msgspec.structs.replace(header, meshes=_translate(header.meshes, back))


def _translate(meshes: Sequence[Mesh], table: Mapping[int, int]) -> tuple[Mesh, ...]:
    if all(old == new for old, new in table.items()):
        return tuple(meshes)
    for mesh in meshes:
        outside = sorted(set(mesh.ranks) - table.keys())
        if outside:
            raise UnsupportedStateError(
                f"a device mesh of ranks {list(mesh.ranks)} is not inside the store's process group, which "
                f"lacks ranks {outside}: open the store with a group that holds all ranks of its tensors",
                type="DeviceMesh",
            )
    return tuple(
        msgspec.structs.replace(mesh, ranks=tuple(table[rank] for rank in mesh.ranks))
        for mesh in meshes
    )
