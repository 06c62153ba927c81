"""Leaves as JSON with exact types: scalars, strings, bytes and NumPy values. See docs/format-leaves.md.

Containers are walked in flatten.py and read back in skeleton.py; this file is what sits inside them.
Nothing here runs code from storage, and nothing is allocated by a number found in a file.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from shardstore.state.tensors import refuse

INLINE_NBYTES: Final = 256
"""Longer bytes and arrays become private uint8 tensors of the file."""

MAX_DEPTH: Final = 100
"""How deep containers may nest."""

SCALAR_TYPES: Final = frozenset({type(None), bool, int, float, str, bytes})

_MAX_PLAIN_INT: Final = 2**63
_DTYPE = re.compile(r"[<>|][biufcSU][1-9][0-9]*|[<>|][mM]8(\[[0-9A-Za-z]+\])?|[<>][qQ]")

BlobWriter = Callable[[torch.Tensor], int]
"""Stores bytes as a row of the file and returns its index."""


class LeafError(ValueError):
    """A stored leaf breaks the format; the caller adds where."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A leaf whose bytes are a row of the file. `dtype` None: a `bytes` object."""

    row: int
    nbytes: int | None
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()


def is_leaf(value: object) -> bool:
    """True for values that `encode_leaf` knows by type; containers are not among them."""
    cls = type(value)
    return cls in SCALAR_TYPES or cls is np.ndarray or isinstance(value, np.generic)


def encode_leaf(value: object, path: tuple[str, ...], write: BlobWriter | None) -> object:
    """Return JSON for a leaf, exact in value and type.

    Args:
        value: One for which `is_leaf` is true.
        path: Where it sits, for messages.
        write: Takes long bytes; None keeps all inline (dict keys).

    Raises:
        UnsupportedStateError: object or structured arrays and the like.
    """
    cls = type(value)
    if value is None or cls is bool:
        return value
    if cls is int:
        assert isinstance(value, int)
        return value if -_MAX_PLAIN_INT <= value < _MAX_PLAIN_INT else ["int", hex(value)]
    if cls is float:
        assert isinstance(value, float)
        return value if math.isfinite(value) else ["float", struct.pack(">d", value).hex()]
    if cls is str:
        assert isinstance(value, str)
        return value if _is_text(value) else ["str", value.encode("utf-8", "surrogatepass").hex()]
    if cls is bytes:
        assert isinstance(value, bytes)
        if write is None or len(value) <= INLINE_NBYTES:
            return ["bytes", _base64(value)]
        return ["bytes", write(torch.frombuffer(bytearray(value), dtype=torch.uint8))]
    if isinstance(value, np.generic):
        return _encode_scalar(value, path)
    assert isinstance(value, np.ndarray)
    return _encode_array(value, path, write)


def _is_text(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_scalar(value: np.generic, path: tuple[str, ...]) -> object:
    code = _dtype_code(value.dtype, value, path)
    if isinstance(value, np.bytes_):
        return ["scalar", "S", _base64(bytes(value))]
    if isinstance(value, np.str_):
        return ["scalar", "U", _base64(str(value).encode("utf-8", "surrogatepass"))]
    return ["scalar", code, _base64(value.tobytes())]


def _encode_array(
    value: np.ndarray[Any, Any], path: tuple[str, ...], write: BlobWriter | None
) -> object:
    code = _dtype_code(value.dtype, value, path)
    if value.dtype.itemsize == 0:
        refuse(path, value, "arrays of empty strings have no bytes: use a list")
    if write is None or value.nbytes <= INLINE_NBYTES:
        return ["array", code, list(value.shape), _base64(value.tobytes())]
    flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    if not flat.flags.writeable:
        flat = flat.copy()
    return ["array", code, list(value.shape), write(torch.from_numpy(flat))]


def _dtype_code(dtype: np.dtype[Any], value: object, path: tuple[str, ...]) -> str:
    if dtype.kind not in "biufcSUmM":
        refuse(
            path,
            value,
            f"NumPy dtype {dtype} has no exact bytes of its own: use plain numbers or strings, "
            "one array per field",
        )
    if dtype.char in "qQ" and np.dtype(dtype.str).char != dtype.char:
        return str(dtype.str[0] + dtype.char)  # long long, where it is not the same type as int64
    return str(dtype.str)


def decode_leaf(node: object) -> object:
    """Read a leaf back: its value, or a `Blob` that waits for its bytes.

    Raises:
        LeafError: not a leaf that `encode_leaf` writes.
    """
    if node is None or type(node) in (bool, int, float, str):
        return node
    match node:
        case ["int", str(text)] if re.fullmatch(r"-?0x[0-9a-f]+", text):
            return int(text, 16)
        case ["float", str(text)] if re.fullmatch(r"[0-9a-f]{16}", text):
            return struct.unpack(">d", bytes.fromhex(text))[0]
        case ["str", str(text)] if re.fullmatch(r"(?:[0-9a-f]{2})*", text):
            return _surrogates(bytes.fromhex(text))
        case ["bytes", str(text)]:
            return _unbase64(text)
        case ["bytes", int(row)] if type(row) is int:
            return Blob(row, None)
        case ["scalar", str(code), str(text)]:
            return _decode_scalar(code, _unbase64(text))
        case ["array", str(code), list(shape), str() | int() as data]:
            return _decode_array(code, shape, data)
    tag = repr(node[0])[:40] if isinstance(node, list) and node else repr(type(node).__name__)
    raise LeafError(f"unknown or malformed leaf {tag}")


def decode_blob(blob: Blob, data: torch.Tensor) -> object:
    """Build the value of a blob from its bytes, a uint8 tensor; always a copy."""
    raw = data.contiguous().numpy().tobytes()
    if blob.dtype is None:
        return raw
    return _array(blob.dtype, blob.shape, raw)


def _decode_scalar(code: str, raw: bytes) -> object:
    if code == "S":
        return np.bytes_(raw)
    if code == "U":
        return np.str_(_surrogates(raw))
    dtype = _dtype(code)
    if len(raw) != dtype.itemsize or dtype.kind in "SU":
        raise LeafError(f"a scalar of {code!r} with {len(raw)} bytes")
    return np.frombuffer(raw, dtype)[0]


def _decode_array(code: str, shape: list[object], data: str | int) -> object:
    dtype = _dtype(code)
    sizes: list[int] = []
    for size in shape:
        if type(size) is not int or not 0 <= size < _MAX_PLAIN_INT:
            raise LeafError(f"array shape {shape!r:.80}")
        sizes.append(size)
    if len(sizes) > 32:
        raise LeafError(f"an array of {len(sizes)} dims")
    nbytes = math.prod(sizes) * dtype.itemsize
    if math.prod(size or 1 for size in sizes) * dtype.itemsize >= _MAX_PLAIN_INT:
        raise LeafError(f"array shape {sizes} overflows")
    if type(data) is int:
        return Blob(data, nbytes, dtype, tuple(sizes))
    if not isinstance(data, str):
        raise LeafError("array data is neither text nor a row")
    raw = _unbase64(data)
    if len(raw) != nbytes:
        raise LeafError(f"an array of {nbytes} bytes with {len(raw)} bytes")
    return _array(dtype, tuple(sizes), raw)


def _array(dtype: np.dtype[Any], shape: tuple[int, ...], raw: bytes) -> object:
    if not raw:
        return np.empty(shape, dtype)
    return np.frombuffer(bytearray(raw), dtype).reshape(shape)


def _dtype(code: str) -> np.dtype[Any]:
    if not _DTYPE.fullmatch(code):
        raise LeafError(f"unknown NumPy dtype {code!r:.40}")
    try:
        return np.dtype(code)
    except (TypeError, ValueError, OverflowError) as error:
        raise LeafError(f"unknown NumPy dtype {code!r:.40}") from error


def _surrogates(raw: bytes) -> str:
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise LeafError("a string that is not UTF-8") from error


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _unbase64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise LeafError("bytes that are not base64") from error
