"""What holds for every shard file and manifest, whatever is in it."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardstore.errors import CorruptSnapshotError, FormatError
from shardstore.format.manifest import decode_manifest, encode_manifest
from shardstore.format.records import TensorPiece, TensorRow
from shardstore.format.shardfile import (
    DTYPES,
    encode_header,
    header_digest,
    parse_safetensors,
    plan_layout,
)
from shardstore.format.slices import TensorSlice, contains, overlap
from shardstore.format.strict_json import StrictJSONError, find_unencodable, parse
from tests.unit.format.builders import (
    SHARDED,
    ShardFile,
    make_header,
    manifest_of,
    read,
    seal,
    sharded_file,
)

KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
SIZES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
FILE = sharded_file()
MANIFEST = encode_manifest(manifest_of({0: sharded_file(0), 1: FILE}))


@st.composite
def shard_files(draw: st.DrawFn) -> ShardFile:
    """Files with sharded, plain and tied tensors of any dtype and shape, and any leaves."""
    table: list[TensorRow] = []
    pieces: list[TensorPiece] = []
    keys = draw(st.lists(KEYS.filter(lambda k: k != "__metadata__"), max_size=8, unique=True))
    for index, key in enumerate(keys):
        path = (key, str(index))
        sizes = draw(SIZES)
        offsets, shape = (0,) * len(sizes), sizes
        facts: dict[str, Any] = {}
        is_sharded = draw(st.booleans())
        if sizes and is_sharded:
            offsets = tuple(draw(st.integers(0, 3)) for _ in sizes)
            margin = draw(st.integers(0, 3))
            shape = tuple(o + s + margin for o, s in zip(offsets, sizes, strict=True))
            facts = {"placements": SHARDED, "mesh": 0}
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        table.append(TensorRow(path, dtype, shape, **facts))
        pieces.append(TensorPiece(key, offsets, sizes, "cpu", ""))
        if draw(st.booleans()):
            owner = len(table) - 1
            table.append(TensorRow((*path, "tied"), dtype, shape, **facts, alias_of=owner))
            pieces.append(TensorPiece("", offsets, sizes, "cpu", ""))
    header = make_header(table, pieces, leaves=draw(JSON), metadata=draw(JSON))
    byte = draw(st.binary(min_size=1, max_size=1))
    return seal(header, lambda nbytes: byte * nbytes, room=draw(st.sampled_from([0, 40960])))


@given(shard_files())
def test_spans_tile_the_file_exactly_and_are_aligned(file: ShardFile) -> None:
    layout, position = file.layout, file.layout.data_start
    assert layout.data_start % 4096 == 0
    items = zip(layout.spans, file.header.table, file.header.pieces, strict=True)
    for (start, end), of, piece in sorted(items, key=lambda item: item[0]):
        if of.alias_of is not None:
            assert start == end == layout.data_start
            continue
        itemsize = DTYPES[of.dtype].itemsize
        assert end - start == math.prod(piece.sizes) * itemsize
        assert start % itemsize == 0
        if start != end:
            assert start == position
            position = end
    assert position == layout.nbytes == len(file.data)


@given(shard_files())
def test_a_file_parses_to_what_was_encoded(file: ShardFile) -> None:
    parsed = read(file.data)
    assert parsed.header == file.header
    assert parsed.layout == file.layout
    assert parsed.digest == header_digest(file.data)
    assert encode_header(parsed.header, parsed.layout) == file.data[: file.layout.data_start]


@given(shard_files())
def test_planning_again_gives_the_same_layout(file: ShardFile) -> None:
    header, layout = file.header, file.layout
    again = plan_layout(header.table, header.pieces, layout.data_start - 8, layout.data_start)
    assert again == layout


@given(shard_files())
@settings(max_examples=50)
def test_stock_safetensors_agrees_on_every_tensor(file: ShardFile) -> None:
    ours = parse_safetensors(file.data[: file.layout.data_start], len(file.data), source="ours")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank-00001.safetensors"
        path.write_bytes(file.data)
        with safetensors.safe_open(path, "np") as opened:
            assert set(opened.keys()) == ours.keys()
            assert json.loads(opened.metadata()["shardstore"])["rank"] == 1
            for key, tensor in ours.items():
                found = opened.get_slice(key)
                assert tuple(found.get_shape()) == tensor.shape
                assert found.get_dtype() == tensor.dtype


@given(at=st.integers(0, FILE.layout.data_start - 1), flip=st.integers(1, 255))
@settings(max_examples=500)
def test_a_header_with_any_byte_changed_is_refused(at: int, flip: int) -> None:
    data = bytearray(FILE.data)
    data[at] ^= flip
    with pytest.raises((FormatError, CorruptSnapshotError), match="file: "):
        read(bytes(data))


def test_a_header_with_any_single_bit_of_its_text_changed_is_refused() -> None:
    end = len(FILE.data[: FILE.layout.data_start].rstrip(b" "))
    for at in range(end + 2):
        data = bytearray(FILE.data)
        data[at] ^= 1 << (at % 8)
        with pytest.raises((FormatError, CorruptSnapshotError)):
            read(bytes(data))


@given(at=st.integers(0, len(MANIFEST) - 1), flip=st.integers(1, 255))
@settings(max_examples=500)
def test_a_manifest_with_any_byte_changed_is_refused(at: int, flip: int) -> None:
    data = bytearray(MANIFEST)
    data[at] ^= flip
    with pytest.raises((FormatError, CorruptSnapshotError), match="manifest: "):
        decode_manifest(bytes(data), source="manifest", expect=None)


@given(nbytes=st.integers(0, len(FILE.data) - 1))
def test_a_truncated_file_is_damage(nbytes: int) -> None:
    with pytest.raises(CorruptSnapshotError):
        read(FILE.data[:nbytes])


@given(nbytes=st.integers(0, len(MANIFEST) - 1))
def test_a_truncated_manifest_is_refused(nbytes: int) -> None:
    with pytest.raises((FormatError, CorruptSnapshotError)):
        decode_manifest(MANIFEST[:nbytes], source="manifest", expect=None)


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_readers(data: bytes) -> None:
    with pytest.raises((FormatError, CorruptSnapshotError)):
        read(len(data).to_bytes(8, "little") + data)
    with pytest.raises((FormatError, CorruptSnapshotError)):
        decode_manifest(data, source="manifest", expect=None)


@given(JSON)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_strict_json_reads_all_plain_json(value: object) -> None:
    assert find_unencodable(value) == []
    assert parse(json.dumps(value).encode()) == value


@given(st.text(alphabet='{}[]":,0e.-\\ ntfu', max_size=40))
def test_strict_json_accepts_nothing_that_json_does_not(text: str) -> None:
    try:
        value = parse(text.encode())
    except StrictJSONError:
        return
    assert json.loads(text) == value


BOXES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=2).map(
    lambda dims: TensorSlice(tuple(o for o, _ in dims), tuple(s for _, s in dims))
)


@given(BOXES, BOXES)
def test_boxes_behave_as_the_sets_of_their_elements(a: TensorSlice, b: TensorSlice) -> None:
    def elements(box: TensorSlice | None) -> set[tuple[int, int]]:
        if box is None:
            return set()
        (x, y), (height, width) = box.offsets, box.sizes
        return {(i, j) for i in range(x, x + height) for j in range(y, y + width)}

    assert elements(overlap(a, b)) == elements(a) & elements(b)
    assert contains(a, b) == (elements(b) <= elements(a))
    assert len(elements(a)) == a.num_elements
