"""Which dtypes a shard file holds, and how: the table is part of the format (docs/format.md)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class DType(NamedTuple):
    """How one torch dtype is stored."""

    name: str
    """Torch's name, as `bfloat16`."""
    stored: str
    """Dtype in the safetensors header."""
    itemsize: int
    """Bytes of one torch element."""
    opaque: bool
    """Stored as U8 with an extra last dim of `itemsize`, so that every safetensors reader opens it."""


_NATIVE = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
}
_OPAQUE = {
    "complex128": 16,
    "complex32": 4,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}

DTYPES: Final[Mapping[str, DType]] = MappingProxyType(
    {name: DType(name, stored, size, opaque=False) for name, (stored, size) in _NATIVE.items()}
    | {name: DType(name, "U8", size, opaque=True) for name, size in _OPAQUE.items()}
)
"""By torch name."""

OPAQUE: Final = frozenset(_OPAQUE)
"""Names of the opaque dtypes."""

STOCK_BITS: Final[Mapping[str, int]] = MappingProxyType(
    {stored: 8 * size for stored, size in _NATIVE.values()}
    | {"F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}
)
"""Bits of one element of every dtype that the safetensors library writes."""
