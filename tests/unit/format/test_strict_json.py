from __future__ import annotations

import math

import pytest

from shardstore.format.strict_json import (
    MAX_DEPTH,
    StrictJSONError,
    find_unencodable,
    parse,
)


def test_plain_json_keeps_its_values() -> None:
    data = '{"a": [1, -2.5, true, null, "é\\u00e9\\ud83d\\ude00"], "b": 123456789012345678901}'.encode()
    assert parse(data) == {"a": [1, -2.5, True, None, "éé😀"], "b": 123456789012345678901}


def test_every_duplicate_key_is_listed_at_any_level() -> None:
    with pytest.raises(StrictJSONError) as caught:
        parse(b'{"a": 1, "a": [{"b": 1, "b": 2}], "c": 3}')
    assert len(caught.value.problems) == 2
    assert "'a'" in str(caught.value)
    assert "'b'" in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"{} {}",
        b"[1,]",
        b"\xef\xbb\xbf{}",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b"[-Infinity]",
        b"[1e999]",
        b"[01]",
        b'"\xff"',
        b'"\x01"',
        b'["\\ud800"]',
        b'{"\\udfff": 1}',
        b"[" + b"9" * 5000 + b"]",
        b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b"[" * 1_000_000,
        b"{}\x00\x00",
    ],
    ids=range(20),
)
def test_what_is_not_strict_json_is_refused(data: bytes) -> None:
    with pytest.raises(StrictJSONError):
        parse(data)


def test_nesting_up_to_the_limit_is_read() -> None:
    value = parse(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    for _ in range(MAX_DEPTH - 1):
        assert isinstance(value, list)
        (value,) = value
    assert value == []


def test_messages_stay_short_whatever_the_file_says() -> None:
    key = b"k" * 1_000_000
    with pytest.raises(StrictJSONError) as caught:
        parse(b'{"' + key + b'": 1, "' + key + b'": 2}')
    assert len(str(caught.value)) < 1000


def test_values_that_json_would_change_are_named() -> None:
    value = {"a": [1.0, math.nan, -math.inf], 1: (2,), "b": {"c": b"x", "d": "\ud800"}, "e": {1}}
    found = find_unencodable(value)
    assert len(found) == 7
    assert any(message.startswith("metadata['a'][1]: nan") for message in found)
    assert any("builtins.bytes" in message for message in found)


def test_plain_json_has_nothing_unencodable() -> None:
    assert find_unencodable({"a": [1, 2.5, None, True, "é", {"b": {}}], "big": 10**30}) == []


def test_endless_and_huge_metadata_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    assert find_unencodable(loop)
    assert find_unencodable(10**5000)
