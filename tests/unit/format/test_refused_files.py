"""Damaged, foreign and oversized shard files: which error, how many problems, how much memory."""

from __future__ import annotations

import io
import pickle
import struct
import tracemalloc
import zipfile
from typing import Any

import pytest

from shardstore.errors import CorruptSnapshotError, FormatError, FormatVersionError, ShardStoreError
from shardstore.format.findings import MAX_LISTED
from shardstore.format.shardfile import parse_safetensors
from tests.unit.format.builders import dump, forge, read, reseal, sharded_file

Json = dict[str, Any]
FILE = sharded_file()


def test_all_problems_are_in_one_error() -> None:
    def edit(outer: Json, record: Json) -> None:
        record["step"] = -1
        record["created"] = "now"
        record["table"][0]["shape"] = [-5, 3]
        record["table"][2]["dtype"] = "int128"
        record["meshes"][0]["ranks"] = [0, 5]
        record["pieces"][5][4] = "?"
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
    def refuse(data: bytes) -> None:
        tracemalloc.start()
        try:
            with pytest.raises(FormatError):
                read(data)
            assert tracemalloc.get_traced_memory()[1] < 2 << 20
        finally:
            tracemalloc.stop()

    refuse(forge(FILE.data, lambda _, r: r["table"][0].update(shape=[2**62, 1])))
    refuse(forge(FILE.data, lambda _, r: r["table"][0].update(shape=[10**3900])))
    refuse(forge(FILE.data, lambda _, r: r["table"][0].update(shape=[2] * 20_000)))
    refuse(forge(FILE.data, lambda _, r: r["pieces"][0].__setitem__(2, [2**40, 3])))
    refuse(forge(FILE.data, lambda _, r: r.update(world_size=2**31 + 1, rank=2**31)))
    refuse(forge(FILE.data, lambda _, r: r["meshes"][0].update(shape=[2**31])))
    refuse(forge(FILE.data, lambda o, _: o["rng@1"].update(data_offsets=[0, 2**62])))


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
