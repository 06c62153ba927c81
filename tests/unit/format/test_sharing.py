"""Who holds what replicas have in common, and headers that lie about it."""

from __future__ import annotations

import itertools
import json
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from shardstore.errors import FormatError
from shardstore.format.manifest import build_manifest, decode_manifest, encode_manifest
from shardstore.format.records import (
    Mesh,
    NearCopy,
    Placement,
    ShardHeader,
    Sharing,
    TensorPiece,
    TensorRow,
)
from shardstore.format.sharing import (
    GroupDigest,
    ReplicaGroup,
    find_diverged,
    find_groups,
    group_digests,
    holders_for,
    replicas_of,
)
from tests.unit.format.builders import ShardFile, forge_manifest, make_header, read, row, seal

REPLICATE = Placement("Replicate")
SHARD = Placement("Shard", 0)
NEAR = NearCopy(8192, "0" * 32)


def _mesh(*shape: int, ranks: Sequence[int] = ()) -> Mesh:
    num = 1
    for size in shape:
        num *= size
    return Mesh(shape, None, "cpu", tuple(ranks) or tuple(range(num)))


def _tensor(name: str, numel: int, *placements: Placement, mesh: int = 0) -> tuple[Any, Any]:
    """A row, and the piece of a rank: only its size counts here."""
    return (
        TensorRow((name,), "float32", (numel,), placements, mesh),
        TensorPiece(name, (0,), (numel,), "cpu", f"{zlib.crc32(name.encode()):032x}"),
    )


def _groups(mesh: Mesh, tensors: Sequence[tuple[Any, Any]], rank: int) -> tuple[ReplicaGroup, ...]:
    rows, pieces = zip(*tensors, strict=True)
    return find_groups(rows, pieces, (mesh,), rank)


def test_replicas_differ_on_replicating_axes_only() -> None:
    mesh = _mesh(2, 3, 2, ranks=[11, *range(11)])
    for rank in range(12):
        found = replicas_of(mesh, (REPLICATE, SHARD, REPLICATE), rank)
        at = {r: i for i, r in enumerate(mesh.ranks)}
        assert [at[r] // 2 % 3 for r in found] == [at[rank] // 2 % 3] * 4
    assert replicas_of(mesh, (SHARD, SHARD, SHARD), 5) == (5,)
    assert replicas_of(mesh, (REPLICATE,) * 3, 5) == tuple(range(12))
    assert replicas_of(mesh, (REPLICATE,) * 3, 12) == ()


@pytest.mark.parametrize("seed", range(20))
def test_every_rank_computes_the_same_holders_and_loads_are_even(seed: int) -> None:
    random_ = random.Random(seed)
    shape = [random_.randint(1, 4) for _ in range(random_.randint(1, 3))]
    mesh = _mesh(*shape)
    ranks = list(mesh.ranks)
    kinds = list(itertools.product((REPLICATE, SHARD), repeat=len(shape)))
    tensors = [
        _tensor(f"t{i}", random_.randint(1, 1000), *random_.choice(kinds)) for i in range(60)
    ]
    by_rank = {}
    for rank in ranks:
        shuffled = random_.sample(range(60), 60)
        groups = _groups(mesh, [tensors[i] for i in shuffled], rank)
        by_rank[rank] = {
            group.ranks: {
                tensors[shuffled[r]][0].path: holder
                for r, holder in zip(group.rows, group.holders, strict=True)
            }
            for group in groups
        }
    for rank, groups_of in by_rank.items():
        for members, holders in groups_of.items():
            assert rank in members
            assert all(by_rank[other][members] == holders for other in members)
            loads = dict.fromkeys(members, 0)
            for path, holder in holders.items():
                loads[holder] += next(t[0].shape[0] for t in tensors if t[0].path == path)
            assert max(loads.values()) - min(loads.values()) <= 1000


def test_plain_empty_and_tied_tensors_and_those_of_other_meshes_are_not_shared() -> None:
    mesh = _mesh(2)
    tensors = [
        (TensorRow(("plain",), "float32", (4,)), TensorPiece("plain", (0,), (4,), "cpu", "")),
        _tensor("w", 4, REPLICATE),
        (
            TensorRow(("tied",), "float32", (4,), (REPLICATE,), 0, alias_of=1),
            TensorPiece("", (0,), (4,), "cpu", ""),
        ),
        _tensor("none", 0, REPLICATE),
    ]
    (group,) = _groups(mesh, tensors, 0)
    assert group.rows == (1,)
    assert holders_for([group], 1) == ((1, 0),)
    assert holders_for([group], 0) == ()
    assert _groups(mesh, tensors, 2) == ()


def test_groups_that_differ_in_bytes_or_tensors_or_members_are_found() -> None:
    mesh = _mesh(3)
    tensors = [_tensor("a", 4, REPLICATE), _tensor("b", 4, REPLICATE)]
    pieces = [piece for _, piece in tensors]

    def said(rank: int, bytes_of_b: str = "", count: int = 2) -> tuple[GroupDigest, ...]:
        groups = _groups(mesh, tensors[:count], rank)
        other = msgspec.structs.replace(pieces[1], digest=bytes_of_b or pieces[1].digest)
        return group_digests(groups, [pieces[0], other])

    equal = {rank: said(rank) for rank in range(3)}
    assert find_diverged(equal) == {}
    assert list(find_diverged(equal | {1: said(1, "f" * 32)}).values()) == [[[0, 2], [1]]]
    assert list(find_diverged(equal | {2: said(2, count=1)}).values()) == [[[0, 1], [2]]]
    assert list(find_diverged({0: said(0), 1: said(1)}).values()) == [[[0, 1]]]


# ------------------------------------------------------------------- hostile headers

TABLE = (
    row("w", "float32", (4,), placements=(REPLICATE, SHARD), mesh=0),
    row("v", "float32", (4,), placements=(REPLICATE, SHARD), mesh=0),
    row("tied", "float32", (4,), placements=(REPLICATE, SHARD), mesh=0, alias_of=0),
    row("plain", "float32", (2,)),
)
HYBRID = Mesh((2, 2), ("rep", "shard"), "cpu", (0, 1, 2, 3))


def _shared(
    held_by: tuple[tuple[int, int], ...] = ((0, 0),),
    *,
    near: NearCopy = NEAR,
    elsewhere: Sequence[int] | None = None,
) -> ShardFile:
    """A file of rank 2, which leaves rows to others, and has no key for the rows `elsewhere`."""
    without = {index for index, _ in held_by} if elsewhere is None else {*elsewhere}
    pieces = [
        TensorPiece("" if i in {*without, 2} else name, (0,), (2,), "cpu", "")
        for i, name in enumerate(("w", "v", "tied", "plain"))
    ]
    header = make_header(
        TABLE, pieces, rank=2, world_size=4, meshes=(HYBRID,), coordinates=((1, 0),),
        sharing=Sharing(held_by, near),
    )  # fmt: skip
    return seal(header)


def test_a_file_that_leaves_pieces_to_replicas_is_read_as_it_was_written() -> None:
    file = _shared(((0, 0), (1, 0)))
    parsed = read(file.data)
    assert parsed.header == file.header
    assert parsed.layout.spans == file.layout.spans
    assert len(file.data) == parsed.layout.data_start + 8
    outer = json.loads(file.data[8 : parsed.layout.data_start])
    assert outer.keys() == {"__metadata__", "plain"}
    assert list(json.loads(outer["__metadata__"]["DCP_SHARDING_INFO"])) == ["plain"]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: _shared(((0, 1),)), "rank 1 is no replica of rank 2"),
        (lambda: _shared(((0, 2),)), "rank 2 is no replica of rank 2"),
        (lambda: _shared(((0, 7),)), "rank 7 is no replica of rank 2"),
        (lambda: _shared(((0, -1),)), "rank -1 is no replica of rank 2"),
        (lambda: _shared(((3, 0),)), "rank 0 is no replica of rank 2"),
        (lambda: _shared(((2, 0),)), "rank 0 is no replica of rank 2"),
        (lambda: _shared(((4, 0),)), "row 4 is none of 4, or not in order"),
        (lambda: _shared(((-1, 0),)), "row -1 is none of 4, or not in order"),
        (lambda: _shared(((1, 0), (0, 0))), "row 0 is none of 4, or not in order"),
        (lambda: _shared(((0, 0), (0, 0))), "row 0 is none of 4, or not in order"),
        (lambda: _shared(()), "nothing is held by another rank"),
        (lambda: _shared(near=NearCopy(3, "0" * 32)), "no shard file has 3 bytes"),
        (lambda: _shared(near=NearCopy(8192, "x")), "is no digest"),
    ],
)
def test_headers_that_name_no_replica_are_refused(make: Callable[[], ShardFile], told: str) -> None:
    try:
        file = make()
    except FormatError as error:
        problems = error.problems
    else:
        with pytest.raises(FormatError) as refused:
            read(file.data)
        problems = refused.value.problems
    assert told in "\n".join(problems)


def test_a_piece_without_a_key_must_be_held_by_another_rank() -> None:
    good = _shared(((0, 0), (1, 0)))
    header = msgspec.structs.replace(good.header, sharing=Sharing(((0, 0),), NEAR))
    with pytest.raises(FormatError) as refused:
        _seal_unchecked(header)
    assert "reserved" in "\n".join(refused.value.problems)


def _seal_unchecked(header: ShardHeader) -> None:
    seal(header)


# ------------------------------------------------------------------------- manifests


def _manifest() -> bytes:
    found = {}
    for rank in (0, 1, 2, 3):
        sharing = Sharing(((0, rank - 2), (1, rank - 2)), NEAR) if rank > 1 else msgspec.UNSET
        header = make_header(
            TABLE[:2], [TensorPiece("", (0,), (2,), "cpu", "0" * 32)] * 2, rank=rank, world_size=4,
            meshes=(HYBRID,), coordinates=((rank // 2, rank % 2),), sharing=sharing,
        )  # fmt: skip
        file = seal(make_header(TABLE[:2], None, rank=rank, world_size=4))
        header = msgspec.structs.replace(header, table_digest=file.header.table_digest)
        found[rank] = (header, 4096 + rank, "1" * 32)
    manifest = build_manifest(found, created=1.0, metadata=None, writer={}, twins={2: 0, 3: 1})
    return encode_manifest(manifest)


def test_a_manifest_tells_of_whole_files_near_the_ranks_and_of_twins() -> None:
    manifest = decode_manifest(_manifest(), source="manifest", expect=None)
    assert manifest.replicas == "once"
    assert [shard.twin for shard in manifest.shards] == [msgspec.UNSET, msgspec.UNSET, 0, 1]
    assert [shard.near for shard in manifest.shards[2:]] == [NEAR, NEAR]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: m.pop("replicas"), "`once` exactly if"),
        (lambda m: m.update(replicas="all"), "`once` exactly if"),
        (lambda m: m["shards"][2].update(twin=2), "cannot have the twin 2"),
        (lambda m: m["shards"][2].update(twin=3), "its twin 3 is no rank, or has a twin itself"),
        (lambda m: m["shards"][2].update(twin=9), "its twin 9 is no rank"),
        (lambda m: m["shards"][0].update(twin=1), "cannot have the twin 1"),
        (lambda m: m["shards"][2].update(near=[1, "0" * 32]), "no shard file has 1 bytes"),
        (lambda m: m["shards"][2].update(near=[4096, "g"]), "is no digest"),
        (lambda m: m["shards"][2].update(near=[4096]), "near"),
    ],
)
def test_manifests_that_lie_of_replicas_are_refused(
    change: Callable[[dict[str, Any]], object], told: str
) -> None:
    forged = forge_manifest(_manifest(), change)
    with pytest.raises(FormatError) as refused:
        decode_manifest(forged, source="manifest", expect=None)
    assert told in "\n".join(refused.value.problems)
