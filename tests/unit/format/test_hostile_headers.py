"""Headers with a right digest and wrong contents: an attacker can compute digests too."""

from __future__ import annotations

import io
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from typing import Any

import pytest

from shardstore.errors import CorruptSnapshotError, FormatError, FormatVersionError, ShardStoreError
from shardstore.format.findings import MAX_LISTED
from shardstore.format.shardfile import parse_safetensors
from tests.unit.format.builders import dump, forge, read, reseal, sharded_file

Json = dict[str, Any]
FILE = sharded_file()
W, TIED, STEPS, NONE, POLES, RNG = range(6)


def table(index: int, **facts: Any) -> Callable[[Json, Json], object]:
    return lambda _, record: record["table"][index].update(facts)


def piece(index: int, field: int, value: object) -> Callable[[Json, Json], object]:
    return lambda _, record: record["pieces"][index].__setitem__(field, value)


def top(**facts: Any) -> Callable[[Json, Json], object]:
    return lambda _, record: record.update(facts)


def mesh(**facts: Any) -> Callable[[Json, Json], object]:
    return lambda _, record: record["meshes"][0].update(facts)


def entry(key: str, **facts: Any) -> Callable[[Json, Json], object]:
    return lambda outer, _: outer[key].update(facts)


def metadata(**facts: Any) -> Callable[[Json, Json], object]:
    return lambda outer, _: outer["__metadata__"].update(facts)


HOSTILE: list[tuple[Callable[[Json, Json], object], str]] = [
    (table(W, shape=[10**12, 10**12]), "no tensor can have the shape"),
    (table(W, shape=[2**63]), "no tensor can have the shape"),
    (table(W, shape=[0, 2**62, 2**62]), "no tensor can have the shape"),
    (table(W, shape=[-5, -3]), "negative number in shape"),
    (table(W, shape=[5.0, 3]), "Expected `int`, got `float`"),
    (table(W, shape=[True, 3]), "Expected `int`, got `bool`"),
    (table(W, dtype="quint8"), "unknown dtype 'quint8'"),
    (table(W, dtype="float32"), "the entry is BF16"),
    (table(W, placements=[{"type": "Ragged", "dim": 0}]), "unknown placement kind 'Ragged'"),
    (table(W, placements=[{"type": "Partial"}]), "unknown placement kind 'Partial'"),
    (table(W, placements=[{"type": "Shard", "dim": 2}]), "cannot place a tensor of 2 dims"),
    (table(W, placements=[{"type": "Shard", "dim": -1}]), "cannot place"),
    (table(W, placements=[{"type": "Shard"}]), "cannot place"),
    (table(W, placements=[{"type": "Replicate", "dim": 0}]), "cannot place"),
    (table(W, placements=[{"type": "_StridedShard", "dim": 0, "split_factor": 0}]), "cannot place"),
    (table(W, placements=[{"type": "_StridedShard", "dim": 0}]), "cannot place"),
    (table(W, placements=[{"type": "Shard", "dim": 0, "x": 1}]), "unknown field `x`"),
    (table(W, placements=[{"type": "Replicate"}] * 2), "2 placements on 1 mesh axes"),
    (table(W, placements=None), "placements and mesh go together"),
    (table(W, mesh=1), "mesh 1 of 1 meshes"),
    (table(W, mesh=-1), "mesh -1 of 1 meshes"),
    (table(W, path=[]), "the path is empty"),
    (table(W, path=["model", "steps"]), "the path appears twice"),
    (table(W, private=True), "a private tensor has no placements"),
    (table(W, alias_of=0), "which is no earlier row"),
    (table(TIED, alias_of=1), "which is no earlier row"),
    (table(TIED, alias_of=-1), "which is no earlier row"),
    (table(TIED, alias_of=10**20), "which is no earlier row"),
    (table(TIED, shape=[5, 4]), "another kind of tensor"),
    (table(STEPS, alias_of=1, dtype="bfloat16", shape=[5, 3]), "which is an alias itself"),
    (table(TIED, alias_of=None), "the key '' is reserved"),
    (top(table_digest="0" * 32), "table_digest is not the digest of the table"),
    (lambda _, r: r["table"].pop(), "6 pieces for 5 tensors"),
    (lambda _, r: r["pieces"].pop(), "5 pieces for 6 tensors"),
    (lambda _, r: r["table"].append(7), "table[6]: Expected `object`, got `int`"),
    (lambda _, r: r["pieces"].append([1]), "pieces[6]"),
    (piece(W, 1, [-1, 0]), "are not inside shape"),
    (piece(W, 1, [4, 0]), "are not inside shape"),
    (piece(W, 2, [-2, 3]), "are not inside shape"),
    (piece(W, 2, [2]), "differ in length"),
    (piece(STEPS, 1, [0]), "differ in length"),
    (piece(RNG, 2, [8]), "a plain tensor is stored whole"),
    (piece(W, 0, "__metadata__"), "the key '__metadata__' is reserved"),
    (piece(W, 0, "model.steps"), "the key appears twice"),
    (piece(W, 0, "model.other"), "tensor 'model.other' has no safetensors entry"),
    (piece(W, 0, "model.other"), "tensor 'model.weight' is not in the table"),
    (piece(W, 3, ""), "device is empty"),
    (piece(W, 4, "F" * 32), "is no digest"),
    (piece(W, 4, ""), "is no digest"),
    (piece(TIED, 0, "model.tied"), "an alias has neither key nor digest"),
    (top(step=-1), "no snapshot has the id"),
    (top(step=2**64), "no snapshot has the id"),
    (top(run=2**32), "no snapshot has the id"),
    (top(count=-7), "no snapshot has the id"),
    (top(nonce="../../x"), "no snapshot has the id"),
    (top(rank=2), "rank 2 of 2"),
    (top(rank=-1), "rank -1 of 2"),
    (top(world_size=0), "world_size is 0"),
    (top(world_size=10**15), "world_size is 1000000000000000"),
    (top(created="now"), "created: Expected `float`, got `str`"),
    (top(extra=1), "unknown field 'extra'"),
    (lambda _, r: r.pop("leaves"), "leaves is missing"),
    (lambda _, r: r.pop("format"), "format is missing"),
    (top(format=0), "format version 0 does not exist"),
    (top(format="1"), "format: Expected `int`, got `str`"),
    (mesh(shape=[3]), "does not hold 2 ranks"),
    (mesh(shape=[10**9, 10**9, 10**9]), "does not hold 2 ranks"),
    (mesh(shape=[0]), "no mesh has the shape"),
    (mesh(shape=[]), "no mesh has the shape"),
    (mesh(ranks=[1, 1]), "a rank appears twice"),
    (mesh(ranks=[1, 9]), "ranks [9] outside a world of 2"),
    (mesh(ranks=[1, 0]), "is rank 0, not 1"),
    (mesh(axis_names=["a", "b"]), "2 axis names for 1 axes"),
    (mesh(device_type=""), "device_type is empty"),
    (top(coordinates=[]), "0 coordinates for 1 meshes"),
    (top(coordinates=[[2]]), "is outside the mesh"),
    (top(coordinates=[[0, 1]]), "is outside the mesh"),
    (top(coordinates=[[-1]]), "is outside the mesh"),
    (top(coordinates=[None]), "but rank 1 is in the mesh"),
    (entry("model.weight", data_offsets=[32, 43]), "does not fill the span"),
    (entry("model.weight", data_offsets=[44, 32]), "are no span"),
    (entry("model.weight", data_offsets=[-12, 0]), "are no span"),
    (entry("model.weight", data_offsets=[0]), "are no span"),
    (entry("model.weight", data_offsets=[32, 44, 56]), "are no span"),
    (entry("model.weight", data_offsets=[33, 45]), "a hole before byte"),
    (entry("model.weight", data_offsets=[31, 43]), "an overlap before byte"),
    (entry("model.weight", data_offsets=[10**12, 10**12 + 12]), "a hole before byte"),
    (entry("model.weight", shape=[10**12, 10**12]), "no tensor can have the shape"),
    (entry("model.weight", shape=[-2, -3]), "no tensor can have the shape"),
    (entry("model.weight", shape=[3, 2]), "the entry is BF16 (3, 2)"),
    (entry("model.weight", dtype="F16"), "the entry is F16"),
    (entry("model.weight", dtype=["BF16"]), "unknown dtype ['BF16']"),
    (entry("model.weight", digest="x"), "the entry is not {dtype, shape, data_offsets}"),
    (lambda o, _: o.__setitem__("model.weight", 3), "the entry is not"),
    (lambda o, _: o.pop("model.weight"), "a hole before byte"),
    (lambda o, _: o.pop("model.none"), "'model.none' has no safetensors entry"),
    (metadata(DCP_SHARDING_INFO="{}"), "DCP_SHARDING_INFO differs"),
    (metadata(DCP_SHARDING_INFO="{"), "DCP_SHARDING_INFO: not JSON"),
    (metadata(DCP_VERSION="2.0"), "DCP_VERSION `1.0`"),
    (metadata(format="tf"), "format `pt`"),
    (metadata(other="x"), "unknown metadata 'other'"),
    (metadata(other=1), "__metadata__['other'] is not a string"),
    (lambda o, _: o["__metadata__"].pop("shardstore"), "it has no `shardstore` metadata"),
]


@pytest.mark.parametrize(("edit", "message"), HOSTILE, ids=[f"{i}" for i in range(len(HOSTILE))])
def test_a_forged_header_is_refused_and_says_why(
    edit: Callable[[Json, Json], object], message: str
) -> None:
    with pytest.raises(FormatError) as caught:
        read(forge(FILE.data, edit))
    assert str(caught.value).startswith("file: ")
    assert message in str(caught.value)
    assert caught.value.problems


def test_forging_without_an_edit_is_accepted() -> None:
    assert read(forge(FILE.data, lambda *_: None)).header == FILE.header


def test_all_problems_are_in_one_error() -> None:
    def edit(outer: Json, record: Json) -> None:
        record["step"] = -1
        record["created"] = "now"
        record["table"][W]["shape"] = [-5, 3]
        record["table"][STEPS]["dtype"] = "int128"
        record["meshes"][0]["ranks"] = [0, 5]
        record["pieces"][RNG][4] = "?"
        outer["rng@1"]["dtype"] = "U9"

    with pytest.raises(FormatError) as caught:
        read(forge(FILE.data, edit, fix_digest=False))
    text = str(caught.value)
    for part in (
        "header digest",
        "no snapshot",
        "created",
        "negative",
        "int128",
        "[5]",
        "'?'",
        "U9",
    ):
        assert part in text, part


def test_duplicate_keys_are_refused_at_every_level() -> None:
    length = struct.unpack("<Q", FILE.data[:8])[0]
    text = FILE.data[8 : 8 + length].rstrip()
    offsets = b'"data_offsets":['
    for old, new, name in (
        (b"}" + text[-1:], b"}," + text[text.index(b'"rng@1":{"dtype"') :], "rng@1"),
        (b'"format":"pt"', b'"format":"pt","format":"pt"', "format"),
        (offsets, offsets + b"0,0]," + offsets, "data_offsets"),
        (rb"{\"format\":1", rb"{\"format\":1,\"format\":1", "format"),
        (rb"{\"saved_offsets\":", rb"{\"saved_offsets\":[],\"saved_offsets\":", "saved_offsets"),
        (rb"{\"epoch\":3", rb"{\"epoch\":3,\"epoch\":3", "epoch"),
    ):
        forged = text[: -len(old)] + new if old == b"}}" else text.replace(old, new, 1)
        assert forged != text
        with pytest.raises(FormatError, match=f"key '{name}' appears twice"):
            read(reseal(FILE.data, forged))


def test_a_newer_version_asks_for_an_upgrade_only_if_it_is_undamaged() -> None:
    newer = forge(FILE.data, lambda _, r: r.update(format=2, unheard_of=[1]))
    with pytest.raises(FormatVersionError, match="upgrade shardstore"):
        read(newer)
    damaged = forge(FILE.data, lambda _, r: r.update(format=2), fix_digest=False)
    with pytest.raises(FormatError, match="header digest") as caught:
        read(damaged)
    assert not isinstance(caught.value, FormatVersionError)


def test_only_a_wrong_digest_is_damage() -> None:
    with pytest.raises(CorruptSnapshotError, match="header digest"):
        read(forge(FILE.data, lambda _, r: r.update(created=9.5), fix_digest=False))


def test_broken_json_with_a_wrong_digest_is_damage() -> None:
    data = bytearray(FILE.data)
    data[FILE.data.index(b'"rng@1":{')] = ord("!")
    with pytest.raises(CorruptSnapshotError, match="header digest"):
        read(bytes(data))


def test_broken_json_with_a_right_digest_is_bad_format() -> None:
    text = FILE.data[8 : FILE.layout.data_start].rstrip()
    with pytest.raises(FormatError, match="not JSON"):
        read(reseal(FILE.data, text[:-1]))


@pytest.mark.parametrize("text", [b"[]", b"1", b"", b"null", b'"x"'])
def test_json_that_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(FormatError, match="not a JSON object"):
        read(reseal(FILE.data, text, fix_digest=False))


def test_a_header_that_begins_otherwise_is_refused() -> None:
    text = FILE.data[8 : FILE.layout.data_start].rstrip()
    with pytest.raises(FormatError, match="does not begin"):
        read(reseal(FILE.data, b" " + text, fix_digest=False))


def test_data_off_a_page_is_refused() -> None:
    length = FILE.layout.data_start - 8 - 8
    data = (
        struct.pack("<Q", length) + FILE.data[8 : 8 + length] + FILE.data[FILE.layout.data_start :]
    )
    with pytest.raises(FormatError, match="not on a page"):
        read(reseal(data, data[8 : 8 + length]))


def test_bytes_after_the_data_are_damage() -> None:
    with pytest.raises(CorruptSnapshotError, match="its header says"):
        read(FILE.data + b"\x00")


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("code from storage was run",)


def test_pickles_are_refused_and_not_run() -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("data.pkl", pickle.dumps(Bomb()))
    for data in (pickle.dumps(Bomb()), archive.getvalue()):
        with pytest.raises(ShardStoreError):
            read(data)


def test_metadata_of_stock_files_must_be_text() -> None:
    for metadata_text in ('{"a":1}', "[]", '"x"', '{"a":"1","a":"1"}'):
        text = f'{{"__metadata__":{metadata_text}}}'.encode()
        data = struct.pack("<Q", len(text)) + text
        with pytest.raises(FormatError):
            parse_safetensors(data, len(data), source="file")
    text = b'{"__metadata__":null}'
    data = struct.pack("<Q", len(text)) + text
    assert parse_safetensors(data, len(data), source="file") == {}


def test_no_memory_is_taken_by_numbers_in_the_file() -> None:
    edits = [
        table(W, shape=[2**62, 1]),
        table(W, shape=[10**4000]),
        piece(W, 2, [2**40, 3]),
        top(world_size=2**31),
        top(world_size=2**31 + 1, rank=2**31),
        mesh(shape=[2**31]),
        entry("model.weight", data_offsets=[0, 2**62]),
    ]
    for edit in edits:
        data = forge(FILE.data, edit)
        tracemalloc.start()
        try:
            if edit is not edits[3]:
                with pytest.raises(FormatError):
                    read(data)
            else:
                read(data)
            assert tracemalloc.get_traced_memory()[1] < 2 << 20
        finally:
            tracemalloc.stop()


def test_a_file_cannot_grow_its_own_error() -> None:
    text = dump(
        {"__metadata__": {"shardstore": ""}, "k" * 10_000: 1} | {f"{i}": 0 for i in range(5000)}
    )
    data = struct.pack("<Q", len(text)) + text.encode()
    with pytest.raises(FormatError) as caught:
        parse_safetensors(data, len(data), source="file")
    assert len(caught.value.problems) == MAX_LISTED + 1
    assert caught.value.problems[-1] == f"and {5001 - MAX_LISTED} more"
    assert len(str(caught.value)) < 200 * MAX_LISTED
