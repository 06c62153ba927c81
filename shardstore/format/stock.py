"""Read the header of any safetensors file, stricter than the stock library."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from shardstore.errors import CorruptSnapshotError, FormatError
from shardstore.format.checks import bounded_product
from shardstore.format.digests import Buffer
from shardstore.format.dtypes import STOCK_BITS
from shardstore.format.findings import MAX_INT, Findings
from shardstore.format.layout import MAX_HEADER_NBYTES
from shardstore.format.strict_json import quote


class StockTensor(NamedTuple):
    """One entry of a safetensors header."""

    dtype: str
    """Safetensors name, as `BF16`."""
    shape: tuple[int, ...]
    start: int
    """Offset in the file, not in the data section."""
    end: int


def header_length(first8: Buffer, file_nbytes: int, *, source: str) -> int:
    """Read how many bytes of JSON follow the first 8, checked before anyone reads them.

    Raises:
        CorruptSnapshotError: The file is shorter than its header.
        FormatError: Not sealed (zero), or over 100,000,000.
    """
    if len(first8) < 8 or file_nbytes < 8:
        raise CorruptSnapshotError(
            f"{source}: truncated to {min(len(first8), file_nbytes)} bytes", file=source
        )
    length: int = struct.unpack("<Q", bytes(first8[:8]))[0]
    if length == 0:
        raise FormatError(f"{source}: not sealed, its header length is zero")
    if length > MAX_HEADER_NBYTES:
        raise FormatError(f"{source}: not a safetensors file, its header would have {length} bytes")
    if 8 + length > file_nbytes:
        raise CorruptSnapshotError(
            f"{source}: truncated to {file_nbytes} bytes, its header ends at {8 + length}",
            file=source,
            expected=f"{8 + length} bytes or more",
            actual=f"{file_nbytes} bytes",
        )
    return length


def parse_safetensors(prefix: Buffer, file_nbytes: int, *, source: str) -> dict[str, StockTensor]:
    """Read the header of any safetensors file, stricter than the stock library.

    Args:
        prefix: The first 8 + header length bytes of the file, or more.
        file_nbytes: Size of the file.
        source: Names the file in errors.

    Returns:
        Entries by key, in file order of the header, with absolute file offsets.

    Raises:
        CorruptSnapshotError: Only the size of the file is wrong.
        FormatError: Anything else, all problems listed.
    """
    text = bytes(header_view(prefix, file_nbytes, source))
    findings = Findings(source)
    outer = findings.read_object(text, "header")
    read_metadata(outer, findings)
    entries = read_entries(outer, 8 + len(text), file_nbytes, findings)
    findings.raise_any("not a safetensors file")
    return entries


def header_view(prefix: Buffer, file_nbytes: int, source: str) -> memoryview:
    """Cut the JSON out of the first bytes of a file; `prefix` may be longer, not shorter."""
    view = memoryview(prefix)
    length = header_length(view[:8], file_nbytes, source=source)
    if view.nbytes < 8 + length:
        raise CorruptSnapshotError(
            f"{source}: {view.nbytes} bytes read of a header that ends at {8 + length}", file=source
        )
    return view[8 : 8 + length]


def read_metadata(outer: dict[str, Any], findings: Findings) -> dict[str, str]:
    """Read `__metadata__`, in which every value is a string; empty if there is none."""
    metadata = outer.get("__metadata__")
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        findings.add("__metadata__ is not an object")
        return {}
    for key, value in metadata.items():
        if not isinstance(value, str):
            findings.add(f"__metadata__[{quote(key)}] is not a string")
    return {key: value for key, value in metadata.items() if isinstance(value, str)}


def read_entries(
    outer: dict[str, Any], data_start: int, file_nbytes: int, findings: Findings
) -> dict[str, StockTensor]:
    """Read the tensor entries, and check that their spans tile the rest of the file."""
    entries: dict[str, StockTensor] = {}
    num_before = len(findings.problems)
    for key, entry in outer.items():
        if key == "__metadata__":
            continue
        problem = _entry_problem(entry)
        if problem:
            findings.add(f"tensor {quote(key)}: {problem}")
            continue
        start, end = entry["data_offsets"]
        entries[key] = StockTensor(
            entry["dtype"], tuple(entry["shape"]), data_start + start, data_start + end
        )
    if len(findings.problems) > num_before:
        return entries  # a missing entry would show as a hole
    position = data_start
    for key, tensor in sorted(entries.items(), key=lambda item: item[1][2:]):
        if tensor.start != position:
            kind = "a hole" if tensor.start > position else "an overlap"
            findings.add(f"tensor {quote(key)}: {kind} before byte {tensor.start} of the file")
        position = max(position, tensor.end)
    if position != file_nbytes:
        findings.damage.append(f"the file has {file_nbytes} bytes, its header says {position}")
    return entries


def _entry_problem(entry: object) -> str | None:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return "the entry is not {dtype, shape, data_offsets}"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = STOCK_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        return f"unknown dtype {quote(dtype)}"
    if not _are_sizes(shape):
        return f"no tensor can have the shape {quote(shape)}"
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"data_offsets {quote(offsets)} are no span"
    num_elements = bounded_product(shape, MAX_INT // bits)
    if num_elements is None:
        return f"no tensor can have the shape {quote(shape)}"
    if num_elements * bits != (offsets[1] - offsets[0]) * 8:
        return f"{dtype} of shape {quote(shape)} does not fill the span {quote(offsets)}"
    return None


def _are_sizes(numbers: object) -> bool:
    return isinstance(numbers, list) and all(
        type(number) is int and 0 <= number <= MAX_INT for number in numbers
    )
