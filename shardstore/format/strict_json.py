"""JSON without its loopholes: the first step of every parse of a stored record.

Python's decoder keeps the last of two equal keys, accepts NaN and lone surrogates, and recurses as deep
as the text says. Here each of these is a problem with a name.
"""

from __future__ import annotations

import json
import math
import re
from itertools import chain
from typing import Final

MAX_DEPTH: Final = 400
"""Objects and arrays nested deeper are refused: a leaf may take two levels of JSON for each of the 120
containers that it may nest in, and Python's decoder recurses."""

MAX_METADATA_DEPTH: Final = 100
"""Of what users hand over as JSON."""

MAX_DIGITS: Final = 4000
"""Longest integer. Converting digits to a number takes quadratic time."""

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class StrictJSONError(ValueError):
    """The text is no JSON of ours. `problems` lists all that was found."""

    def __init__(self, problems: list[str]) -> None:
        """Join the problems into the message."""
        super().__init__("; ".join(problems))
        self.problems = problems


def quote(text: object) -> str:
    """Show a value out of a file in a message, clipped: it may be megabytes long."""
    shown = repr(text[:120] if isinstance(text, (str, bytes, list, tuple)) else text)
    return shown if len(shown) <= 120 else shown[:117] + "..."


def parse(data: bytes) -> object:
    """Decode strict JSON.

    Raises:
        StrictJSONError: Not UTF-8, not JSON, NaN or Infinity, a number out of range, lone surrogates, too
            deep, or a key twice in one object. All duplicates are listed.
    """
    value, problems = scan(data)
    if problems:
        raise StrictJSONError(problems)
    return value


def scan(data: bytes | str) -> tuple[object, list[str]]:
    """Decode JSON, and list what is forbidden but does not stop the decoder.

    Args:
        data: The whole text. Leading and trailing white space is allowed.

    Returns:
        The value, and the duplicate keys and lone surrogates in it, as messages.

    Raises:
        StrictJSONError: There is no value: broken text, or one that is not worth decoding.
    """
    duplicates: list[str] = []

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    duplicates.append(f"key {quote(key)} appears twice in one JSON object")
                seen.add(key)
        return found

    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StrictJSONError([f"not UTF-8 at byte {error.start}"]) from None
    try:
        value: object = json.loads(
            text,
            object_pairs_hook=unique,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_refuse_constant,
        )
    except RecursionError:
        raise StrictJSONError([f"nested deeper than {MAX_DEPTH} levels"]) from None
    except json.JSONDecodeError as error:
        raise StrictJSONError([*duplicates, f"not JSON: {error.msg} at {error.pos}"]) from None
    except ValueError as error:
        raise StrictJSONError([*duplicates, str(error)]) from None
    if not _is_shallow(value):
        raise StrictJSONError([*duplicates, f"nested deeper than {MAX_DEPTH} levels"])
    if _SURROGATE_ESCAPE.search(text) is not None:
        duplicates += _find_surrogates(value)
    return value, duplicates


def find_unencodable(value: object, where: str = "metadata") -> list[str]:
    """List what in `value` JSON would change or refuse: one message each, empty if it is plain JSON.

    The encoder by itself would write NaN as null, 1 as the key "1" and a tuple as a list.
    """
    problems: list[str] = []
    level: list[tuple[str, object]] = [(where, value)]
    for _ in range(MAX_METADATA_DEPTH):
        deeper: list[tuple[str, object]] = []
        for path, item in level:
            kind = type(item)
            if kind is dict and isinstance(item, dict):
                for key, child in item.items():
                    if type(key) is not str or not _is_encodable(key):
                        problems.append(f"{path}: key {quote(key)} is not a valid string")
                    deeper.append((f"{path}[{quote(key)}]", child))
            elif kind is list and isinstance(item, list):
                deeper += [(f"{path}[{index}]", child) for index, child in enumerate(item)]
            elif isinstance(item, float) and kind is float:
                if not math.isfinite(item):
                    problems.append(f"{path}: {item} is no JSON number; store it as text or None")
            elif isinstance(item, str) and kind is str:
                if not _is_encodable(item):
                    problems.append(f"{path}: {quote(item)} has lone surrogates")
            elif isinstance(item, int) and kind is int:
                if item.bit_length() > 3 * MAX_DIGITS:
                    problems.append(f"{path}: integer of more than {MAX_DIGITS} digits")
            elif kind is not bool and item is not None:
                problems.append(f"{path}: {kind.__module__}.{kind.__qualname__} is not JSON")
        if not deeper:
            return problems
        level = deeper
    return [*problems, f"{where}: nested deeper than {MAX_METADATA_DEPTH} levels"]


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"integer of {len(digits)} digits")
    return int(digits)


def _float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"number {quote(digits)} is out of range")
    return number


def _refuse_constant(name: str) -> object:
    raise ValueError(f"not JSON: {name}")


def _is_shallow(value: object) -> bool:
    dicts: list[dict[str, object]] = []
    lists: list[list[object]] = [[value]]
    for _ in range(MAX_DEPTH + 1):
        children = chain(chain.from_iterable(map(dict.values, dicts)), chain.from_iterable(lists))
        dicts, lists = [], []
        for child in children:
            if isinstance(child, dict):
                dicts.append(child)
            elif isinstance(child, list):
                lists.append(child)
        if not dicts and not lists:
            return True
    return False


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _find_surrogates(value: object) -> list[str]:
    found: list[str] = []
    level = [value]
    while level:
        deeper: list[object] = []
        for item in level:
            if isinstance(item, dict):
                deeper += item.keys()
                deeper += item.values()
            elif isinstance(item, list):
                deeper += item
            elif isinstance(item, str) and not _is_encodable(item):
                found.append(f"string {quote(item)} has lone surrogates")
        level = deeper
    return found
