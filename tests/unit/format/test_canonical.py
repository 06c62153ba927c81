"""The quick reading takes exactly what the encoder writes; all else goes through the strict parsers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from shardstore import SnapshotStore
from shardstore.format.canonical import read_canonical_header, read_canonical_manifest
from shardstore.format.manifest import decode_manifest
from shardstore.format.parse import parse_header
from shardstore.format.register import read_register


@pytest.fixture
def files(tmp_path: Path) -> tuple[bytes, bytes]:
    """A shard file and its manifest."""
    tied = torch.arange(5.0)
    state = {
        "a": tied, "again": tied, "empty": torch.zeros(0, 2), "scalar": torch.tensor(1),
        "fp8": torch.zeros(3).to(torch.float8_e5m2), "notes": {"x": [1.5, None, "é\"\\\n"], 3: 1e300},
    }  # fmt: skip
    with SnapshotStore(tmp_path / "root", memory=0) as store:
        store.save(state, step=1, metadata={"loss": 0.1, "who": "ü"}).wait()
    folder = next((tmp_path / "root").glob("step-*"))
    shard = (folder / "rank-00000.safetensors").read_bytes()
    return shard, (folder / "manifest.json").read_bytes()


def test_what_is_written_is_read_at_once_and_equals_the_strict_reading(
    files: tuple[bytes, bytes],
) -> None:
    shard, manifest = files
    parsed = parse_header(shard, len(shard), source="x")
    text = shard[8 : parsed.layout.data_start]
    canonical = read_canonical_header(text, parsed.layout.data_start, len(shard))
    assert canonical == (parsed.header, parsed.layout)
    spaced = text.replace(b'"format":"pt",', b'"format" :"pt",', 1)[: len(text)]
    assert read_canonical_header(spaced, parsed.layout.data_start, len(shard)) is None

    record = read_canonical_manifest(manifest)
    assert record == decode_manifest(manifest, source="x", expect=None)
    assert record is not None
    register = read_register(manifest, expect=record.id)
    assert register is not None
    shown = ("state", "step", "created", "world_size", "metadata", "id", "nbytes")
    assert [getattr(register, name) for name in shown] == [getattr(record, name) for name in shown]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"pt",', b'"pt", '),
        (b'"DCP_VERSION":"1.0"', b'"DCP_VERSION":"1.1"'),
        (b'"dtype":"F32"', b'"dtype":"I32"'),
        (b'"shape":[5]', b'"shape":[4]'),
        (b'"data_offsets":[', b'"data_offsets":[0,'),
        (b'"scalar@0":{', b'"scalar@0":{"more":1,'),
        (b'{"__metadata__":', b'{"x":1,"__metadata__":'),
        (b'\\"saved_offsets\\":[0]', b'\\"saved_offsets\\":[1]'),
        (b'\\"persist\\":true', b'\\"persist\\":true,\\"persist\\":true'),
        (b'\\"step\\":1', b'\\"step\\":1.0'),
    ],
)
def test_a_header_that_differs_in_any_way_is_left_to_the_strict_parser(
    files: tuple[bytes, bytes], old: bytes, new: bytes
) -> None:
    shard, _ = files
    start = parse_header(shard, len(shard), source="x").layout.data_start
    text = shard[8:start]
    assert old in text
    changed = text.replace(old, new, 1)
    assert read_canonical_header(changed, start, len(shard)) is None
    assert read_canonical_header(text, start, len(shard) + 8) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"state":"committed"', b'"state": "committed"'),
        (b'"step":1,', b'"step":1,"step":1,'),
        (b'"world_size":1', b'"world_size":1,"more":2'),
        (b'"format":1', b'"format":2'),
        (b'"writer":', b'"writer2":'),
    ],
)
def test_a_manifest_that_differs_in_any_way_is_left_to_the_strict_parser(
    files: tuple[bytes, bytes], old: bytes, new: bytes
) -> None:
    _, manifest = files
    assert old in manifest
    record = msgspec.json.decode(manifest, type=dict)
    assert record["state"] == "committed"
    changed = manifest.replace(old, new, 1)
    assert read_canonical_manifest(changed) is None
    snapshot_id = decode_manifest(manifest, source="x", expect=None).id
    assert read_register(changed, expect=snapshot_id) is None, "its digest is wrong"
