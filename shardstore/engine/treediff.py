"""Where two JSON trees differ: stored leaves (docs/format-leaves.md) and metadata, for people."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_MAX_TEXT: Final = 120
_SEQUENCES: Final = ("list", "tuple")
_PAIRS: Final = ("dict", "ordered", "counter")
_ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """One value that differs; a side's text is None where it has no such value."""

    path: str
    a: str | None
    b: str | None
    ranks: tuple[int, ...] = ()


def differing_leaves(a: object, b: object) -> list[ValueDifference]:
    """Compare two leaf trees. Row numbers are left out: rows are compared as tensors."""
    return list(_walk(_named(a), _named(b), ""))


def differing_json(a: object, b: object) -> list[ValueDifference]:
    """Compare two plain JSON values, as metadata."""
    return list(_walk(a, b, ""))


def _named(node: object) -> object:
    """A leaf tree with containers as plain dicts by key or index, and without row numbers."""
    if isinstance(node, dict):
        return {str(key): _named(value) for key, value in node.items()}
    if not isinstance(node, list) or not node or not isinstance(node[0], str):
        return [_named(item) for item in node] if isinstance(node, list) else node
    tag, rest = node[0], node[1:]
    if tag in _SEQUENCES:
        return {str(index): _named(item) for index, item in enumerate(rest)}
    if tag in _PAIRS and all(isinstance(pair, list) and len(pair) == 2 for pair in rest):
        return {_text(key): _named(value) for key, value in rest}
    if tag == "stateful" and len(rest) == 1:
        return _named(rest[0])
    if tag == "module" and len(rest) == 3:
        return _named(rest[2])
    if tag == "optimizer" and len(rest) == 1:
        return _named(rest[0])
    if tag == "float" and len(rest) == 1:
        return _special_float(rest[0])
    if tag in ("tensor", "bytes", "array"):
        return [tag, *rest[:-1], None if isinstance(rest[-1], int) else rest[-1]]
    return node


def _special_float(digits: object) -> object:
    try:
        return struct.unpack(">d", bytes.fromhex(str(digits)))[0]
    except (ValueError, struct.error):
        return ["float", digits]


def _walk(a: object, b: object, path: str) -> Iterator[ValueDifference]:
    """Differences in the order of `a`, without recursion beyond what JSON itself nests."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            inner = f"{path}.{key}" if path else str(key)
            yield from _walk(a.get(key, _ABSENT), b.get(key, _ABSENT), inner)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (left, right) in enumerate(zip(a, b, strict=True)):
            yield from _walk(left, right, f"{path}[{index}]")
    elif not _same(a, b):
        yield ValueDifference(path, _side(a), _side(b))


def _same(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    return type(a) is type(b) and a == b


def _side(value: object) -> str | None:
    return None if value is _ABSENT else _text(value)


def _text(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
