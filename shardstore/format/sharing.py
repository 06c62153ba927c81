"""Which replica's file holds a piece that several ranks have: a function of table and meshes alone.

Replicas are ranks whose coordinates in a tensor's mesh differ on nothing but axes that replicate it. Equal
names or bytes make no replicas: plain tensors are each rank's own. Every rank computes the same holders
without a word, since all that counts is equal on all members of a group; where it is not, their
`group_digests` differ, and each stores its own (docs/design/0012-replicas-once.md).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from shardstore.format.checks import Report
from shardstore.format.digests import is_digest
from shardstore.format.dtypes import DTYPES
from shardstore.format.findings import MAX_INT
from shardstore.format.records import (
    Mesh,
    NearCopy,
    Placement,
    ShardHeader,
    Sharing,
    TensorPiece,
    TensorRow,
)
from shardstore.format.strict_json import quote


class GroupDigest(msgspec.Struct, frozen=True, array_like=True):
    """What one rank says of the pieces that it has in common with the other ranks of a group."""

    group: str
    """Names the set of ranks."""
    size: int
    """How many there are."""
    digest: str
    """Of the tensors, their boxes, holders and bytes: equal on all of them, or they are no replicas."""


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Ranks that hold the same pieces of some tensors, as one of them computes it."""

    ranks: tuple[int, ...]
    rows: tuple[int, ...]
    holders: tuple[int, ...]
    """Rank whose file has the bytes, parallel to `rows`."""
    prefix: str
    """Digest of all that is known before the bytes are."""


def find_groups(
    table: Sequence[TensorRow],
    pieces: Sequence[TensorPiece],
    meshes: Sequence[Mesh],
    rank: int,
) -> tuple[ReplicaGroup, ...]:
    """The groups of replicas that `rank` is in, and who holds what.

    In each group the largest piece goes to the rank with the least so far, so that every file gets about
    as many bytes. Empty pieces, aliases and plain tensors are not shared.
    """
    known: dict[tuple[int, tuple[Placement, ...]], tuple[int, ...]] = {}
    rows_of: dict[tuple[int, ...], list[tuple[int, tuple[str, ...], int]]] = {}
    for index, (row, piece) in enumerate(zip(table, pieces, strict=True)):
        if row.alias_of is not None or row.mesh is None or row.placements is None:
            continue
        nbytes = math.prod(piece.sizes) * DTYPES[row.dtype].itemsize
        if not nbytes:
            continue
        key = row.mesh, row.placements
        ranks = known.get(key)
        if ranks is None:
            ranks = known[key] = replicas_of(meshes[row.mesh], row.placements, rank)
        if len(ranks) > 1:
            rows_of.setdefault(ranks, []).append((-nbytes, row.path, index))
    return tuple(
        _plan_group(ranks, sorted(rows), table, pieces, meshes) for ranks, rows in rows_of.items()
    )


def replicas_of(mesh: Mesh, placements: Sequence[Placement], rank: int) -> tuple[int, ...]:
    """Ranks that have the same piece of such a tensor as `rank`, itself included, ascending.

    Empty if the mesh does not have the rank.
    """
    if rank not in mesh.ranks:
        return ()
    position, coordinate = mesh.ranks.index(rank), []
    for size in reversed(mesh.shape):
        position, c = divmod(position, size)
        coordinate.append(c)
    coordinate.reverse()
    axes = [
        range(size) if placement.type == "Replicate" else (c,)
        for size, c, placement in zip(mesh.shape, coordinate, placements, strict=True)
    ]
    found = []
    for point in itertools.product(*axes):
        at = 0
        for c, size in zip(point, mesh.shape, strict=True):
            at = at * size + c
        found.append(mesh.ranks[at])
    return tuple(sorted(found))


def _plan_group(
    ranks: tuple[int, ...],
    rows: Sequence[tuple[int, tuple[str, ...], int]],
    table: Sequence[TensorRow],
    pieces: Sequence[TensorPiece],
    meshes: Sequence[Mesh],
) -> ReplicaGroup:
    loads = [(0, rank) for rank in ranks]
    holders = []
    facts: list[object] = [ranks]
    for minus_nbytes, path, index in rows:
        load, holder = loads[0]
        heapq.heapreplace(loads, (load - minus_nbytes, holder))
        holders.append(holder)
        row, piece = table[index], pieces[index]
        assert row.mesh is not None
        facts.append(
            (path, row.dtype, row.shape, row.placements, piece.offsets, piece.sizes, holder)
        )
    facts.append([meshes[mesh] for mesh in sorted({table[i].mesh or 0 for _, _, i in rows})])
    return ReplicaGroup(
        ranks,
        tuple(index for _, _, index in rows),
        tuple(holders),
        xxhash.xxh3_128_hexdigest(msgspec.json.encode(facts)),
    )


def group_digests(
    groups: Sequence[ReplicaGroup], pieces: Sequence[TensorPiece]
) -> tuple[GroupDigest, ...]:
    """What this rank says of each of its groups; `pieces` have their digests."""
    return tuple(
        GroupDigest(
            xxhash.xxh3_128_hexdigest(msgspec.json.encode(group.ranks)),
            len(group.ranks),
            xxhash.xxh3_128_hexdigest(
                "".join((group.prefix, *(pieces[row].digest for row in group.rows))).encode()
            ),
        )
        for group in groups
    )


def find_diverged(said: Mapping[int, Sequence[GroupDigest]]) -> dict[str, list[list[int]]]:
    """Groups whose members are no replicas of each other, by name: ranks that say the same, together.

    A group of which some member says nothing is among them. `said` is by rank.
    """
    members: dict[str, dict[str, list[int]]] = {}
    sizes: dict[str, int] = {}
    for rank, groups in said.items():
        for group in groups:
            members.setdefault(group.group, {}).setdefault(group.digest, []).append(rank)
            sizes[group.group] = group.size
    return {
        name: sorted(by_digest.values(), key=lambda ranks: (-len(ranks), ranks))
        for name, by_digest in members.items()
        if len(by_digest) > 1 or sum(map(len, by_digest.values())) < sizes[name]
    }


def holders_for(groups: Sequence[ReplicaGroup], rank: int) -> tuple[tuple[int, int], ...]:
    """Rows of `rank` that are in other ranks' files, ascending, with those ranks."""
    return tuple(
        sorted(
            (row, holder)
            for group in groups
            for row, holder in zip(group.rows, group.holders, strict=True)
            if holder != rank
        )
    )


def without_bytes_of(
    pieces: Sequence[TensorPiece], held_by: Sequence[tuple[int, int]]
) -> tuple[TensorPiece, ...]:
    """The pieces as the file on the root has them: those that are elsewhere have no key."""
    found = list(pieces)
    for row, _ in held_by:
        piece = pieces[row]
        found[row] = TensorPiece("", piece.offsets, piece.sizes, piece.device, piece.digest)
    return tuple(found)


def content_digest(header: ShardHeader) -> str:
    """Digest of all that a header says of tensors and leaves, but not whose file it is."""
    pieces = [(p.offsets, p.sizes, p.device, p.digest) for p in header.pieces]
    facts = header.table_digest, header.meshes, pieces, header.leaves
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(facts))


def rows_elsewhere(sharing: Sharing | msgspec.UnsetType) -> Collection[int]:
    """Rows whose bytes are in other ranks' files."""
    return {row for row, _ in sharing.held_by} if isinstance(sharing, Sharing) else ()


def check_sharing(fields: Mapping[str, Any], report: Report) -> None:
    """Check that only replicas hold what a header says is elsewhere."""
    sharing, table, meshes = fields["sharing"], fields["table"], fields["meshes"]
    if not isinstance(sharing, Sharing):
        return
    if not sharing.held_by:
        report("sharing: nothing is held by another rank")
    last = -1
    places: dict[int, dict[int, int]] = {}
    for row, holder in sharing.held_by:
        name = f"sharing: row {quote(row)}"
        if not last < row < len(table):
            report(f"{name} is none of {len(table)}, or not in order")
            continue
        last = row
        tensor, rank = table[row], fields["rank"]
        is_sound = tensor.alias_of is None and holder != rank and tensor.placements is not None
        if is_sound and tensor.mesh is not None and 0 <= tensor.mesh < len(meshes):
            mesh = meshes[tensor.mesh]
            at = places.setdefault(tensor.mesh, {r: i for i, r in enumerate(mesh.ranks)})
            is_sound = _are_replicas(mesh.shape, tensor.placements, at.get(rank), at.get(holder))
        else:
            is_sound = False
        if not is_sound:
            report(f"{name}: rank {quote(holder)} is no replica of rank {quote(rank)}")
    check_near(sharing.near, "sharing", report)


def _are_replicas(
    shape: Sequence[int], placements: Sequence[Placement], a: int | None, b: int | None
) -> bool:
    """Whether two positions in a mesh differ only on axes that replicate. The mesh may be unsound."""
    if a is None or b is None or len(shape) != len(placements) or min(shape, default=0) < 1:
        return False
    for size, placement in zip(reversed(shape), reversed(placements), strict=True):
        (a, mine), (b, theirs) = divmod(a, size), divmod(b, size)
        if mine != theirs and placement.type != "Replicate":
            return False
    return a == b == 0


def check_near(near: NearCopy, where: str, report: Report) -> None:
    """Check what is said of a whole file."""
    if not 8 < near.nbytes <= MAX_INT:
        report(f"{where}: no shard file has {quote(near.nbytes)} bytes")
    if not is_digest(near.header_digest):
        report(f"{where}: near header digest {quote(near.header_digest)} is no digest")
