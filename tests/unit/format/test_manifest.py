from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from shardstore.errors import CorruptSnapshotError, FormatError, FormatVersionError
from shardstore.format.manifest import (
    build_manifest,
    check_tables,
    decode_manifest,
    encode_manifest,
    shard_file_name,
)
from shardstore.format.records import Manifest, Mesh, Placement, SnapshotId
from shardstore.format.register import read_register
from shardstore.format.shardfile import table_digest
from tests.unit.format.builders import (
    MESH,
    SHARDED,
    dump,
    forge_manifest,
    make_header,
    manifest_of,
    reseal_manifest,
    row,
    sharded_file,
)

Json = dict[str, Any]
MANIFEST = manifest_of({0: sharded_file(0), 1: sharded_file(1)})
DATA = encode_manifest(MANIFEST)
TABLE = next(iter(MANIFEST.tables))
ABORTED = msgspec.structs.replace(
    MANIFEST, state="aborted", world_size=0, meshes=(), tables={}, shards=(), reason="rank 3 failed"
)


def decode(data: bytes, expect: SnapshotId | None = MANIFEST.id) -> Manifest:
    return decode_manifest(data, source="step-x/manifest.json", expect=expect)


def test_what_was_saved_to_stay_in_memory_says_so_and_nothing_else_does() -> None:
    kept = msgspec.structs.replace(MANIFEST, persist=False)
    data = encode_manifest(kept)
    assert b'"persist":false' in data
    assert b"persist" not in DATA
    assert decode(data) == kept
    for manifest, is_counted in ((data, False), (DATA, True)):
        register = read_register(manifest, expect=MANIFEST.id)
        assert register is not None
        assert register.is_counted is is_counted
    for wrong in (
        msgspec.structs.replace(MANIFEST, persist=True),
        msgspec.structs.replace(ABORTED, persist=False),
    ):
        with pytest.raises(FormatError, match="only a committed snapshot has persist"):
            decode(encode_manifest(wrong))
    assert (
        read_register(
            encode_manifest(msgspec.structs.replace(MANIFEST, persist=True)), expect=MANIFEST.id
        )
        is None
    )


def test_a_manifest_reads_back_as_it_was_written() -> None:
    assert decode(DATA) == MANIFEST
    assert decode(DATA, None) == MANIFEST
    assert DATA.startswith(b'{"digest":"')
    assert DATA.endswith(b"}\n")
    assert json.loads(DATA)["state"] == "committed"
    assert decode(encode_manifest(ABORTED)) == ABORTED


def test_equal_tables_and_meshes_are_stored_once() -> None:
    assert len(MANIFEST.tables) == 1
    assert MANIFEST.meshes == (MESH,)
    assert [shard.coordinates for shard in MANIFEST.shards] == [((0,),), ((1,),)]
    assert [shard.file for shard in MANIFEST.shards] == [
        shard_file_name(0),
        "rank-00001.safetensors",
    ]


def test_the_size_grows_with_ranks_plus_tensors() -> None:
    def size(num_ranks: int, num_tensors: int) -> int:
        mesh = Mesh((num_ranks,), ("dp",), "cuda", tuple(range(num_ranks)))
        table = [row(f"t{i}", placements=SHARDED, mesh=0) for i in range(num_tensors)]
        header = make_header(
            table, world_size=num_ranks, meshes=(mesh,), table_digest=table_digest(table)
        )
        headers = {
            rank: (
                msgspec.structs.replace(header, rank=rank, coordinates=((rank,),)),
                4096,
                "0" * 32,
            )
            for rank in range(num_ranks)
        }
        data = encode_manifest(build_manifest(headers, created=1, metadata=None, writer={}))
        decode(data, None)
        return len(data)

    one = size(2, 10)
    assert size(1000, 1000) < 1000 * (one + one)


HOSTILE: list[tuple[Callable[[Json], object], str]] = [
    (lambda m: m["shards"][0].update(file="/etc/passwd"), "file '/etc/passwd' is not rank-00000"),
    (lambda m: m["shards"][0].update(file="../other/rank-00000.safetensors"), "the only name"),
    (lambda m: m["shards"][0].update(file="rank-00001.safetensors"), "appears twice"),
    (lambda m: m["shards"][0].update(file=""), "the only name"),
    (lambda m: m["shards"].append(m["shards"][1]), "rank 1 appears twice"),
    (lambda m: m["shards"].pop(), "no shards for ranks [1] of 2"),
    (lambda m: m["shards"].clear(), "no shards for ranks [0, 1] of 2"),
    (lambda m: m["shards"].reverse(), "not in rank order"),
    (lambda m: m["shards"][0].update(rank=-1), "rank -1 of 2"),
    (lambda m: m["shards"][1].update(rank=2), "rank 2 of 2"),
    (lambda m: m["shards"][0].update(nbytes=-1), "no shard file has -1 bytes"),
    (lambda m: m["shards"][0].update(nbytes=10**30), "no shard file has"),
    (lambda m: m["shards"][0].update(header_digest="x"), "is no digest"),
    (lambda m: m["shards"][0].update(table="f" * 32), "there is no table"),
    (lambda m: m["shards"][0].update(meshes=[1]), "meshes [1] of 1"),
    (lambda m: m["shards"][0].update(meshes=[-1]), "meshes [-1] of 1"),
    (lambda m: m["shards"][0].update(meshes=[]), "1 coordinates for 0 meshes"),
    (lambda m: m["shards"][0].update(coordinates=[[1]]), "is rank 1, not 0"),
    (lambda m: m["shards"][0].update(coordinates=[None]), "but rank 0 is in the mesh"),
    (lambda m: m["shards"][0].update(link="/etc"), "shards[0] has the unknown field 'link'"),
    (lambda m: m["tables"][TABLE][0].update(shape=[10**12] * 2), "no tensor can have the shape"),
    (lambda m: m["tables"][TABLE][0].update(shape=[-5, 3]), "negative number"),
    (lambda m: m["tables"][TABLE][0].update(mesh=3), "mesh 3 of 1 meshes"),
    (
        lambda m: m["tables"][TABLE][0].update(placements=[{"type": "Ragged", "dim": 0}]),
        "unknown placement kind 'Ragged'",
    ),
    (lambda m: m["tables"][TABLE][0].update(dtype="int4"), "not stored under its own digest"),
    (lambda m: m["tables"].update({"../x": []}), "tables['../x'] is not stored under"),
    (lambda m: m["tables"].update({table_digest(()): []}), "no shard uses the table"),
    (lambda m: m["tables"].update({"x": 3}), "tables['x']"),
    (lambda m: m["meshes"][0].update(shape=[4]), "does not hold 2 ranks"),
    (lambda m: m["meshes"].append(m["meshes"][0]), "a mesh is stored twice"),
    (
        lambda m: m["meshes"].append({**m["meshes"][0], "device_type": "cuda"}),
        "a mesh is used by no shard",
    ),
    (lambda m: m.update(state="done"), "unknown state 'done'"),
    (lambda m: m.update(state="aborted"), "an aborted snapshot has shards"),
    (lambda m: m.update(reason="x"), "a committed snapshot has a reason"),
    (lambda m: m.update(persist=True), "has persist, and only as false"),
    (lambda m: m.update(persist=0), "persist"),
    (lambda m: m.update(world_size=10**15), "world_size is"),
    (lambda m: m.update(world_size=2**31), "no shards for ranks [2, 3, 4, 5, 6, 7, 8, 9]"),
    (lambda m: m.update(world_size=0), "world_size is 0"),
    (lambda m: m.update(step=101), "its folder is step-000000000100.0000002a-000007-9f3c1d20"),
    (lambda m: m.update(nonce="00000000"), "its folder is"),
    (lambda m: m.pop("format"), "format is missing"),
    (lambda m: m.update(format=True), "format: Expected `int`, got `bool`"),
    (lambda m: m.pop("metadata"), "metadata is missing"),
    (lambda m: m.update(extra=1), "unknown field 'extra'"),
    (lambda m: m.update(writer={"a": 1}), "writer['a']: Expected `str`, got `int`"),
]


@pytest.mark.parametrize(("edit", "message"), HOSTILE, ids=[f"{i}" for i in range(len(HOSTILE))])
def test_a_forged_manifest_is_refused_and_says_why(
    edit: Callable[[Json], object], message: str
) -> None:
    forged = forge_manifest(DATA, edit)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError) as caught:
            decode(forged)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith("step-x/manifest.json: ")
    assert message in str(caught.value)


def test_all_problems_are_in_one_error() -> None:
    def edit(manifest: Json) -> None:
        manifest["created"] = None
        manifest["state"] = "done"
        manifest["shards"][0].update(file="../other", nbytes=-1, header_digest="x")
        manifest["shards"].pop()
        manifest["tables"][TABLE][0]["shape"] = [10**12, 10**12]

    with pytest.raises(FormatError) as caught:
        decode(forge_manifest(DATA, edit))
    text = str(caught.value)
    for part in ("created", "../other", "ranks [1]", "-1 bytes", "no digest", "shape", "state"):
        assert part in text, part


def test_a_newer_version_asks_for_an_upgrade() -> None:
    newer = forge_manifest(DATA, lambda m: m.update(format=9, unheard_of=1))
    with pytest.raises(FormatVersionError, match="format version 9 is newer than 1"):
        decode(newer)
    with pytest.raises(CorruptSnapshotError):
        decode(DATA.replace(b'"host":"node-1"', b'"host":"node-2"'))


def test_duplicate_keys_are_refused() -> None:
    text = DATA.replace(b'"state":"committed"', b'"state":"aborted","state":"committed"')
    with pytest.raises(FormatError, match="key 'state' appears twice"):
        decode(reseal_manifest(text))


@pytest.mark.parametrize("data", [b"", b"[]", b"\x80\x04pickle", dump({"format": 1}).encode()])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="does not begin as a manifest"):
        decode(data)


def test_a_broken_manifest_is_damage() -> None:
    with pytest.raises(CorruptSnapshotError, match="manifest digest"):
        decode(DATA[:-3])


def test_metadata_that_json_would_change_is_refused() -> None:
    with pytest.raises(FormatError, match="nan"):
        encode_manifest(msgspec.structs.replace(MANIFEST, metadata={"loss": math.nan}))
    with pytest.raises(FormatError, match="cannot encode"):
        encode_manifest(msgspec.structs.replace(MANIFEST, reason="\ud800"))


def test_shards_of_different_saves_make_no_manifest() -> None:
    headers = {
        0: (make_header([], rank=0), 4096, "0" * 32),
        1: (make_header([], rank=1, step=101), 4096, "0" * 32),
    }
    with pytest.raises(FormatError, match="rank 1: header of rank 1 of 2 in step-000000000101"):
        build_manifest(headers, created=1, metadata=None, writer={})
    del headers[1]
    with pytest.raises(FormatError, match="1 shards for a world of 2"):
        build_manifest(headers, created=1, metadata=None, writer={})
    with pytest.raises(FormatError, match="at least one"):
        build_manifest({}, created=1, metadata=None, writer={})


def test_ranks_that_disagree_on_a_tensor_are_named_with_both_values() -> None:
    headers = []
    for rank, shape in ((0, (6,)), (1, (4,))):
        table = [row("model.w", shape=shape, placements=SHARDED, mesh=0), row("step", shape=shape)]
        headers.append(make_header(table, rank=rank, table_digest=table_digest(table)))
    assert check_tables(headers) == [
        "model.w: shape is (6,) on rank 0 but (4,) on rank 1, on the same mesh"
    ]
    manifest = build_manifest(
        {h.rank: (h, 4096, "0" * 32) for h in headers}, created=1, metadata=None, writer={}
    )
    with pytest.raises(FormatError, match=r"shape is \(6,\) on rank 0"):
        decode(encode_manifest(manifest))


def test_every_differing_fact_is_told() -> None:
    strided = (Placement("_StridedShard", 0, 2),)
    one = [row("w", "float32", (4, 2), placements=SHARDED, mesh=0)]
    two = [row("w", "bfloat16", (4, 2), placements=strided, mesh=0)]
    headers = [
        make_header(table, rank=rank, table_digest=table_digest(table))
        for rank, table in enumerate([one] * 6 + [two])
    ]
    found = check_tables(headers)
    assert len(found) == 2
    assert "float32 on ranks 0, 1, 2, 3 and 2 more but bfloat16 on rank 6" in found[0]
    assert "(Shard(0)) on" in found[1]
    assert "(_StridedShard(0, 2)) on rank 6" in found[1]


def test_one_path_on_different_meshes_is_two_tensors() -> None:
    other = msgspec.structs.replace(MESH, ranks=(2, 3))
    headers = []
    for rank, mesh, shape in ((0, MESH, (6,)), (2, other, (4,))):
        table = [row("w", shape=shape, placements=SHARDED, mesh=0)]
        headers.append(
            make_header(table, rank=rank, meshes=(mesh,), table_digest=table_digest(table))
        )
    assert check_tables(headers) == []
