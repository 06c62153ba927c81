"""Headers with a right digest and wrong contents: an attacker can compute digests too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardstore.errors import FormatError
from tests.unit.format.builders import forge, read, sharded_file

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
    (
        table(W, placements=[{"type": "Shard", "dim": 0, "x": 1}]),
        "table[0].placements[0] has the unknown field 'x'",
    ),
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
