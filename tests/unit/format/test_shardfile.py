from __future__ import annotations

import math
import struct
from pathlib import Path

import msgspec
import pytest
import safetensors
import torch
import xxhash
from safetensors.torch import save

from shardstore.errors import CorruptSnapshotError, FormatError
from shardstore.format.records import TensorPiece
from shardstore.format.shardfile import (
    DTYPES,
    digest_of,
    encode_header,
    header_digest,
    header_length,
    header_nbytes,
    parse_header,
    parse_safetensors,
    plan_layout,
    table_digest,
)
from tests.unit.format.builders import make_header, read, row, seal, sharded_file, whole_piece

LONG_KEY = "layer." + "x" * 300
ODD_KEYS = ["a/b/../c", "ключ.😀", '"quoted"\\\n\x00', " ", "__metadata__.x", LONG_KEY]


def test_the_first_bytes_are_as_specified() -> None:
    header = make_header(
        [row("w", "int16", (2,))], meshes=(), coordinates=(), leaves=None, metadata=None, writer={}
    )
    file = seal(header, lambda _: b"\x01\x00\x02\x00")
    record = (
        r"{\"format\":1,\"step\":100,\"run\":42,\"count\":7,\"nonce\":\"9f3c1d20\",\"rank\":1,"
        r"\"world_size\":2,\"created\":1.5,\"host\":\"node-1\",\"persist\":true,\"meshes\":[],"
        r"\"coordinates\":[],\"table\":[{\"path\":[\"w\"],\"dtype\":\"int16\",\"shape\":[2]}],"
        r"\"table_digest\":\"TABLE\","
        r"\"pieces\":[[\"w\",[0],[2],\"cpu\",\"TENSOR\"]],"
        r"\"leaves\":null,\"metadata\":null,\"writer\":{}}"
    )
    text = (
        '{"__metadata__":{"shardstore_digest":"DIGEST","format":"pt","DCP_VERSION":"1.0",'
        r'"DCP_SHARDING_INFO":"{\"w\":{\"saved_offsets\":[0]}}","shardstore":"' + record + '"},'
        '"w":{"dtype":"I16","shape":[2],"data_offsets":[0,4]}}'
    )
    table = xxhash.xxh3_128_hexdigest(b'[{"path":["w"],"dtype":"int16","shape":[2]}]')
    tensor = xxhash.xxh3_128_hexdigest(b"\x01\x00\x02\x00")
    text = text.replace("TABLE", table)
    text = text.replace("TENSOR", tensor)

    def first_page(digest: str) -> bytes:
        padded = text.replace("DIGEST", digest).encode().ljust(4088)
        return struct.pack("<Q", 4088) + padded

    own = xxhash.xxh3_128_hexdigest(first_page("0" * 32))
    assert file.data == first_page(own) + b"\x01\x00\x02\x00"


def test_a_file_reads_back_as_it_was_written() -> None:
    file = sharded_file()
    parsed = read(file.data)
    assert parsed.header == file.header
    assert parsed.layout == file.layout
    assert parsed.digest == header_digest(file.data)
    assert parsed.header.id.name == "step-000000000100.0000002a-000007-9f3c1d20"


def test_data_starts_on_a_page_and_wider_tensors_come_first() -> None:
    table = [row("a", "uint8", (3,)), row("b", "float64", (1,)), row("c", "complex128", (1,))]
    table += [row("d", "bfloat16", (3,)), row("e", "float64", (2,))]
    layout = plan_layout(table, [whole_piece(r) for r in table], 1000)
    assert layout.data_start == 4096
    starts = [start - 4096 for start, _ in layout.spans]
    assert starts == [46, 16, 0, 40, 24]
    assert layout.nbytes == 4096 + 49


def test_leaves_may_nest_as_deep_as_their_codec_allows() -> None:
    leaves: object = 1
    for _ in range(120):
        leaves = ["dict", [["key", leaves]]]
    file = seal(make_header([], leaves=leaves))
    assert read(file.data).header.leaves == leaves


def test_a_file_without_tensors_is_only_a_header() -> None:
    file = seal(make_header([]))
    assert len(file.data) == file.layout.data_start == file.layout.nbytes
    assert read(file.data).header == file.header


def test_the_room_of_the_last_file_is_kept_while_the_header_fits() -> None:
    table = [row("w")]
    pieces = [whole_piece(table[0])]
    assert plan_layout(table, pieces, 4088, room=4096).data_start == 4096
    assert plan_layout(table, pieces, 100, room=40960).data_start == 40960
    assert plan_layout(table, pieces, 4089, room=4096).data_start == 8192
    assert plan_layout(table, pieces, 3000, room=0).data_start == 4096
    assert plan_layout(table, pieces, 3600, room=0).data_start == 8192


def test_a_header_can_be_measured_before_its_digests_are_known() -> None:
    file = sharded_file()
    blank = tuple(msgspec.structs.replace(p, digest="") for p in file.header.pieces)
    unsealed = msgspec.structs.replace(file.header, pieces=blank, table_digest="")
    assert header_nbytes(unsealed) == header_nbytes(file.header)
    assert file.data[8 : file.layout.data_start].rstrip(b" ")[-1:] == b"}"
    assert len(file.data[8 : file.layout.data_start].rstrip(b" ")) == header_nbytes(unsealed)


@pytest.mark.parametrize("name", DTYPES)
def test_stock_safetensors_reads_every_dtype_bit_for_bit(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name)
    of = row("t", name, (2, 3))
    payload = bytes(i % 2 if name == "bool" else i for i in range(6 * DTYPES[name].itemsize))
    path = tmp_path / "rank-00001.safetensors"
    path.write_bytes(seal(make_header([of]), lambda _: payload).data)
    with safetensors.safe_open(path, "pt") as opened:
        tensor = opened.get_tensor("t")
    if DTYPES[name].opaque:
        assert tensor.shape == (2, 3, DTYPES[name].itemsize)
        tensor = tensor.reshape(-1).view(dtype).reshape(2, 3)
    assert tensor.dtype == dtype
    assert dtype.itemsize == DTYPES[name].itemsize
    assert bytes(tensor.reshape(-1).view(torch.uint8).numpy()) == payload


def test_stock_safetensors_reads_odd_keys_and_shapes(tmp_path: Path) -> None:
    table = [row(f"t{i}", shape=(i,)) for i in range(len(ODD_KEYS))]
    pieces = [whole_piece(of, key) for of, key in zip(table, ODD_KEYS, strict=True)]
    table += [
        row("scalar", "int64", ()),
        row("empty", "float16", (2, 0, 3)),
        row("nan", "complex32", ()),
    ]
    pieces += [whole_piece(of) for of in table[len(ODD_KEYS) :]]
    path = tmp_path / "rank-00001.safetensors"
    file = seal(make_header(table, pieces))
    path.write_bytes(file.data)
    with safetensors.safe_open(path, "pt") as opened:
        assert sorted(opened.keys()) == sorted(piece.key for piece in pieces)
        for of, piece in zip(table, pieces, strict=True):
            extra = (4,) if of.dtype == "complex32" else ()
            assert opened.get_tensor(piece.key).shape == (*of.shape, *extra)
        assert opened.metadata()["format"] == "pt"
    assert read(file.data).header == file.header


def test_stock_safetensors_reads_a_file_without_tensors(tmp_path: Path) -> None:
    path = tmp_path / "rank-00001.safetensors"
    path.write_bytes(seal(make_header([])).data)
    with safetensors.safe_open(path, "pt") as opened:
        assert list(opened.keys()) == []


def test_files_of_the_stock_library_are_read() -> None:
    tensors = {"a/b": torch.arange(6, dtype=torch.int16).reshape(2, 3), "s": torch.tensor(1.5)}
    tensors |= {"e": torch.zeros(0, 4), "f8": torch.zeros(3).to(torch.float8_e5m2fnuz)}
    for metadata in (None, {"format": "pt"}):
        data = save(tensors, metadata)
        found = parse_safetensors(data, len(data), source="theirs")
        assert found.keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert found[key].shape == tuple(tensor.shape)
            flat = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert data[found[key].start : found[key].end] == flat
        assert found["a/b"].dtype == "I16"


def test_stock_files_and_empty_ones_are_not_taken_for_ours() -> None:
    for tensors in ({"a": torch.zeros(2)}, {}):
        data = save(tensors)
        with pytest.raises(FormatError, match=r"theirs: not a shardstore file"):
            parse_header(data, len(data), source="theirs")


def test_an_unsealed_file_says_so() -> None:
    with pytest.raises(FormatError, match="slot: not sealed"):
        header_length(bytes(8), 4096, source="slot")


def test_a_short_file_is_damage_not_bad_format() -> None:
    data = sharded_file().data
    for nbytes in (0, 7, 8, 4096, len(data) - 1):
        with pytest.raises(CorruptSnapshotError) as caught:
            read(data[:nbytes])
        assert caught.value.file == "file"
    with pytest.raises(CorruptSnapshotError, match="bytes read of a header"):
        parse_header(data[:100], len(data), source="file")


def test_no_header_longer_than_the_limit_is_read() -> None:
    with pytest.raises(FormatError, match="not a safetensors file"):
        header_length(struct.pack("<Q", 100_000_001), 2**60, source="file")
    assert header_length(struct.pack("<Q", 100_000_000), 2**60, source="file") == 100_000_000


def test_digests_of_large_buffers_equal_those_of_one_pass() -> None:
    data = bytes(range(256)) * (1 << 17) + b"tail"
    assert digest_of(data) == xxhash.xxh3_128_hexdigest(data)
    assert digest_of(memoryview(data)[:10]) == digest_of(bytearray(data[:10]))
    assert digest_of(b"") == "99aa06d3014798d86001c324468d497f"


def test_tables_with_equal_rows_have_equal_digests() -> None:
    assert table_digest([row("a")]) == table_digest((row("a", private=False),))
    assert table_digest([row("a")]) != table_digest([row("a", private=True)])


def test_what_cannot_be_a_shard_file_is_refused_before_writing() -> None:
    table = [row("a"), row("b"), row("c"), row("d")]
    good = seal(make_header(table))
    keys = ["a", "a", "__metadata__", ""]
    pieces = tuple(
        TensorPiece(key, (0,), (4,), "cpu", "0" * 32 if index else "")
        for index, key in enumerate(keys)
    )
    bad = msgspec.structs.replace(
        good.header, pieces=pieces, table_digest="", metadata={"loss": math.nan}
    )
    with pytest.raises(FormatError) as caught:
        encode_header(bad, good.layout)
    text = str(caught.value)
    for part in (
        "nan",
        "table digest",
        "'a' has no digest",
        "two tensors",
        "'__metadata__'",
        "key ''",
    ):
        assert part in text


def test_a_header_that_outgrew_its_room_is_refused() -> None:
    file = sharded_file()
    grown = msgspec.structs.replace(file.header, leaves="x" * 10_000)
    with pytest.raises(FormatError, match="leaves grew too much"):
        encode_header(grown, file.layout)


def test_a_layout_of_other_tensors_is_refused() -> None:
    file = sharded_file()
    other = plan_layout([row("w")] * 6, [whole_piece(row("w"))] * 6, 100, file.layout.data_start)
    with pytest.raises(FormatError, match="planned for other tensors"):
        encode_header(file.header, other)


def test_headers_over_the_limit_and_unknown_dtypes_are_refused_when_planned() -> None:
    with pytest.raises(FormatError, match="does not fit"):
        plan_layout([], [], 100_000_000)
    assert plan_layout([], [], 99_990_000).data_start <= 100_000_008
    with pytest.raises(FormatError, match="quint8"):
        plan_layout([row("q", "quint8")], [whole_piece(row("q"))], 10)


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(FormatError, match="cannot encode"):
        seal(make_header([row("w")], host="\ud800"))


def test_only_a_shard_header_has_a_digest() -> None:
    with pytest.raises(FormatError, match="not the header"):
        header_digest(b"\x10" + bytes(200))
