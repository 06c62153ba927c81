"""Read at once what this version wrote; everything else is left to the strict parsers.

A strict parse goes through text in Python, to name each thing that is wrong with it. Nothing is wrong with
a text that is, byte for byte, what the encoder gives for what a lenient decoder reads in it: no key twice,
no unknown field, no number out of range, no entry that differs from its piece. So that is tried first,
and the strict parser is for what remains: damage, hostile files, and other versions.
"""

from __future__ import annotations

import msgspec

from shardstore.errors import FormatError
from shardstore.format.digests import BLANK
from shardstore.format.header import DIGEST_AT, encode_json
from shardstore.format.layout import ShardLayout, plan_layout
from shardstore.format.records import FORMAT_VERSION, Manifest, ShardHeader

MANIFEST_OPENING = b'{"digest":"'
"""How a manifest begins; its own digest follows."""

_MANIFEST_REST = len(MANIFEST_OPENING) + len(BLANK) + len(b'",')


class _Metadata(msgspec.Struct):
    shardstore: str


class OuterHeader(msgspec.Struct):
    """The JSON of a shard file, as far as it leads to our record in it."""

    metadata: _Metadata = msgspec.field(name="__metadata__")


def read_canonical_header(
    text: bytes, data_start: int, file_nbytes: int
) -> tuple[ShardHeader, ShardLayout] | None:
    """The record and layout in the JSON text of a shard file; None if it is not canonical.

    The numbers in it are not judged: they say what they say, consistently.
    """
    try:
        outer = msgspec.json.decode(text, type=OuterHeader)
        header = msgspec.json.decode(outer.metadata.shardstore, type=ShardHeader)
        if header.format != FORMAT_VERSION or len(header.table) != len(header.pieces):
            return None
        layout = plan_layout(header.table, header.pieces, 0, data_start)
        if (layout.data_start, layout.nbytes) != (data_start, file_nbytes):
            return None
        expected = bytearray(encode_json(header, layout))
    except (msgspec.MsgspecError, FormatError, ValueError, OverflowError, RecursionError):
        return None
    at = DIGEST_AT - 8
    expected[at : at + len(BLANK)] = text[at : at + len(BLANK)]
    if not text.startswith(expected) or text[len(expected) :].strip(b" "):
        return None
    return header, layout


def read_canonical_manifest(data: bytes) -> Manifest | None:
    """The record in the content of a manifest file; None if it is not canonical."""
    if not data.startswith(MANIFEST_OPENING) or not data.endswith(b"\n"):
        return None
    record = b"{" + data[_MANIFEST_REST:-1]
    try:
        manifest = msgspec.json.decode(record, type=Manifest)
        if manifest.format != FORMAT_VERSION or msgspec.json.encode(manifest) != record:
            return None
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return None
    return manifest
