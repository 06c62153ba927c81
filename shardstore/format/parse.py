"""Read the header of a shard file, trusting nothing in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from shardstore.errors import FormatVersionError
from shardstore.format.canonical import read_canonical_header
from shardstore.format.checks import (
    check_coordinates,
    check_id,
    check_meshes,
    check_pieces,
    check_table,
    check_table_meshes,
)
from shardstore.format.digests import Buffer, digest_around, table_digest
from shardstore.format.dtypes import DTYPES
from shardstore.format.findings import Findings, fields_of
from shardstore.format.header import DCP_VERSION, DIGEST_AT, OPENING, dcp_sharding_info
from shardstore.format.layout import ALIGNMENT, ShardLayout, stored_shape
from shardstore.format.records import (
    FORMAT_VERSION,
    ShardHeader,
    SnapshotId,
    TensorPiece,
    TensorRow,
)
from shardstore.format.sharing import check_sharing, rows_elsewhere
from shardstore.format.stock import StockTensor, header_view, read_entries, read_metadata
from shardstore.format.strict_json import quote

_METADATA_KEYS: Final = frozenset(
    ("shardstore_digest", "format", "DCP_VERSION", "DCP_SHARDING_INFO", "shardstore")
)
_BROKEN: Final = "the shard header breaks the format"
_WORTH_EXPLAINING_NBYTES: Final = 16 << 20
"""To list all that is wrong with a damaged text takes many times its memory."""


@dataclass(frozen=True, slots=True)
class ParsedShard:
    """A header that passed every check. The tensors' bytes are not verified by it."""

    header: ShardHeader
    layout: ShardLayout
    digest: str
    """The header's own digest, which a manifest refers to."""


def parse_header(prefix: Buffer, file_nbytes: int, *, source: str) -> ParsedShard:
    """Read and check the header of a shard file.

    Args:
        prefix: The first 8 + header length bytes of the file, or more.
        file_nbytes: Size of the file.
        source: Names the file in errors.

    Raises:
        CorruptSnapshotError: The file is cut short or too long or the digest is wrong, and otherwise it
            is a good header or no JSON at all.
        FormatVersionError: Written by a newer shardstore.
        FormatError: Not sealed, not ours, or broken; all problems listed.
    """
    view = header_view(prefix, file_nbytes, source)
    data_start = 8 + len(view)
    findings = Findings(source)
    digest = ""
    if bytes(view[: len(OPENING)]) == OPENING:
        embedded = bytes(view[DIGEST_AT - 8 : DIGEST_AT + 24])
        digest = digest_around(memoryview(prefix)[:data_start], DIGEST_AT)
        if embedded != digest.encode():
            findings.damage.append(
                f"header digest is {digest}, stored is {quote(embedded.decode('ascii', 'replace'))}"
            )
            if len(view) > _WORTH_EXPLAINING_NBYTES:
                findings.raise_any(_BROKEN)
    text = bytes(view)
    if digest and not findings.damage:
        canonical = read_canonical_header(text, data_start, file_nbytes)
        if canonical is not None and data_start % ALIGNMENT == 0:
            header, layout = canonical
            _check_fields(fields_of(header), findings)
            findings.raise_any(_BROKEN)
            return ParsedShard(header, layout, digest)
    outer = findings.read_object(text, "header")
    if not digest:
        findings.add("the header does not begin as a shardstore file does")

    metadata = read_metadata(outer, findings)
    if "shardstore" not in metadata:
        findings.add("not a shardstore file: it has no `shardstore` metadata")
        findings.raise_any("not a shardstore file")
    record = findings.read_json(metadata["shardstore"], "shardstore")
    check_version(record, findings)
    if data_start % ALIGNMENT:
        findings.add(f"data starts at {data_start}, not on a page of {ALIGNMENT} bytes")
    fields = findings.read_record(record, ShardHeader)
    entries = read_entries(outer, data_start, file_nbytes, findings)
    _check_fields(fields, findings)
    _check_metadata(metadata, findings)
    table, pieces = fields.get("table"), fields.get("pieces")
    spans: list[tuple[int, int]] = []
    if table is not None and pieces is not None and len(table) == len(pieces):
        spans = _match_entries(table, pieces, entries, data_start, findings)
        info = findings.read_json(metadata.get("DCP_SHARDING_INFO", ""), "DCP_SHARDING_INFO")
        if info != dcp_sharding_info(table, pieces):
            findings.add("DCP_SHARDING_INFO differs from the offsets of the pieces")
    findings.raise_any(_BROKEN)
    layout = ShardLayout(data_start, file_nbytes, tuple(spans))
    return ParsedShard(ShardHeader(**fields), layout, digest)


def check_version(record: object, findings: Findings) -> None:
    """Stop at a newer format: nothing else in it can be judged.

    Raises:
        FormatVersionError: The version is newer and the record undamaged.
        FormatError: The version is newer and more is wrong.
    """
    version = record.get("format") if isinstance(record, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        return
    if version < 1:
        findings.add(f"format version {quote(version)} does not exist")
    if version > FORMAT_VERSION:
        message = (
            f"format version {quote(version)} is newer than {FORMAT_VERSION}, the newest that this"
            " shardstore reads: upgrade shardstore"
        )
        if not findings.damage and not findings.problems:
            raise FormatVersionError(f"{findings.source}: {message}")
        findings.add(message)
        findings.raise_any("unreadable")


def _check_fields(fields: Mapping[str, Any], findings: Findings) -> None:
    """Check whatever could be read: a fault in one field hides none in another."""
    add = findings.add
    has = fields.keys().__ge__
    if has({"step", "run", "count", "nonce", "world_size"}):
        identity = SnapshotId(*(fields[name] for name in ("step", "run", "count", "nonce")))
        check_id(identity, fields["world_size"], add)
    if has({"rank", "world_size"}) and not 0 <= fields["rank"] < fields["world_size"]:
        add(f"rank {quote(fields['rank'])} of {quote(fields['world_size'])}")
    if has({"meshes", "world_size"}):
        check_meshes(fields["meshes"], fields["world_size"], add)
    if has({"meshes", "coordinates", "rank"}):
        meshes, coordinates = fields["meshes"], fields["coordinates"]
        check_coordinates(meshes, coordinates, fields["rank"], "header", add)
    if has({"table"}):
        check_table(fields["table"], "table", add)
    if has({"table", "meshes"}):
        num_axes = [len(mesh.shape) for mesh in fields["meshes"]]
        check_table_meshes(fields["table"], num_axes, "table", add)
    if has({"table", "pieces"}):
        elsewhere = rows_elsewhere(fields.get("sharing", msgspec.UNSET))
        check_pieces(fields["table"], fields["pieces"], add, elsewhere)
    if has({"table", "pieces", "meshes", "rank", "sharing"}):
        check_sharing(fields, add)
    if has({"table", "table_digest"}) and table_digest(fields["table"]) != fields["table_digest"]:
        add("table_digest is not the digest of the table")


def _check_metadata(metadata: Mapping[str, str], findings: Findings) -> None:
    for name in sorted(metadata.keys() - _METADATA_KEYS):
        findings.add(f"unknown metadata {quote(name)}")
    if metadata.get("format") != "pt" or metadata.get("DCP_VERSION") != DCP_VERSION:
        findings.add(f"metadata lacks format `pt` or DCP_VERSION `{DCP_VERSION}`")


def _match_entries(
    table: Sequence[TensorRow],
    pieces: Sequence[TensorPiece],
    entries: Mapping[str, StockTensor],
    data_start: int,
    findings: Findings,
) -> list[tuple[int, int]]:
    """Compare pieces with safetensors entries; return the spans, complete if nothing is missing."""
    spans: list[tuple[int, int]] = []
    wanted: set[str] = set()
    for row, piece in zip(table, pieces, strict=True):
        if row.alias_of is not None or not piece.key:
            spans.append((data_start, data_start))
            continue
        wanted.add(piece.key)
        entry = entries.get(piece.key)
        if entry is None:
            findings.add(f"tensor {quote(piece.key)} has no safetensors entry that can be read")
            continue
        spans.append((entry.start, entry.end))
        dtype = DTYPES.get(row.dtype)
        if dtype is not None and (
            entry.dtype != dtype.stored or entry.shape != stored_shape(row, piece)
        ):
            findings.add(
                f"tensor {quote(piece.key)}: the entry is {entry.dtype} {quote(entry.shape)}, the"
                f" piece {row.dtype} {quote(piece.sizes)}"
            )
    for key in sorted(entries.keys() - wanted):
        findings.add(f"tensor {quote(key)} is not in the table")
    return spans
