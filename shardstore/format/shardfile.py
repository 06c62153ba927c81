"""One rank's file: 8 bytes of header length, JSON padded to a page, then tensors without holes.

The file is a safetensors file that every reader of that format opens, and carries the whole
`ShardHeader`: enough to judge it without its manifest. docs/format.md is the specification. This module
is the front of `dtypes`, `digests`, `layout`, `header` (write), `parse` and `stock` (read).
"""

from __future__ import annotations

from shardstore.format.digests import Buffer, digest_of, table_digest
from shardstore.format.dtypes import DTYPES, DType
from shardstore.format.header import (
    check_opening,
    encode_header,
    header_digest,
    header_nbytes,
    is_header_whole,
)
from shardstore.format.layout import ShardLayout, plan_layout, stored_shape
from shardstore.format.parse import ParsedShard, parse_header
from shardstore.format.stock import StockTensor, header_length, parse_safetensors

__all__ = [
    "DTYPES",
    "Buffer",
    "DType",
    "ParsedShard",
    "ShardLayout",
    "StockTensor",
    "check_opening",
    "digest_of",
    "encode_header",
    "header_digest",
    "header_length",
    "header_nbytes",
    "is_header_whole",
    "parse_header",
    "parse_safetensors",
    "plan_layout",
    "stored_shape",
    "table_digest",
]
