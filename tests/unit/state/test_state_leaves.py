"""Leaves: exact value and type back, refusals with remedies, hostile input refused."""

from __future__ import annotations

import collections
import enum
import math
import struct
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardstore.errors import FormatError, UnsupportedStateError
from shardstore.format.records import TensorRow
from shardstore.state.flatten import flatten_state
from shardstore.state.skeleton import parse_leaves
from tests.roundtrip import restore, save


def _through(value: object) -> Any:
    state: dict[str, object] = {"box": {"value": None}}
    restore(save({"box": {"value": value}}), state)
    return state["box"]["value"]  # type: ignore[index]


def same(a: object, b: object) -> bool:
    """Equal in type and value, bit for bit, at every depth and in order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype.str == b.dtype.str and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic) and isinstance(b, np.generic):
        return a.dtype.str == b.dtype.str and a.tobytes() == b.tobytes()
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return same(list(a.items()), list(b.items()))
    return a == b


_EXAMPLES = [
    None,
    True,
    0,
    -1,
    2**63,
    -(2**63),
    10**5000,
    -(10**30),
    0.1,
    -0.0,
    1e300,
    1.0,
    math.inf,
    -math.inf,
    math.nan,
    struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf8\xff")[0],
    "",
    "ü",
    "\ud800x",
    "\x00",
    b"",
    b"\xff" * 256,
    b"\xff" * 257,
    np.float32(0.1),
    np.float64(-0.0),
    np.int64(-5),
    np.longlong(3),
    np.bool_(True),
    np.uint8(255),
    np.complex128(1 - 2j),
    np.longdouble(0.1),
    np.float16(math.nan),
    np.str_("né\ud800"),
    np.str_(""),
    np.bytes_(b"a\x00"),
    np.datetime64("2024-01-02T03:04:05.678"),
    np.timedelta64(5, "h"),
    np.datetime64("NaT"),
    np.arange(6).reshape(2, 3),
    np.arange(1000, dtype=">i4"),
    np.array(3.5),
    np.zeros((0, 4), dtype=np.float16),
    np.array(["ab", "c"]),
    np.array([b"ab", b"c"]),
    np.arange(200.0).reshape(10, 20).T,
    np.array([True, False] * 200),
    [],
    (),
    {},
    [1, (2, [3.0, {"a": None}])],
    {1: "a", "1": "b", (2, "x"): [1], None: 0, b"k": 1.5, 2.5: (), np.int32(7): 3},
    {"int": 1, "list": ["list", 2], "tensor": ["tensor", 0]},
    collections.OrderedDict([("z", 1), ("a", 2)]),
    collections.Counter("banana"),
    collections.Counter({80: 1, 30: 2}),
]


@pytest.mark.parametrize("value", _EXAMPLES, ids=lambda v: f"{type(v).__name__}")
def test_value_and_type_come_back(value: object) -> None:
    assert same(_through(value), value)


_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()))
    | st.binary(max_size=600)
)
_keys = st.recursive(_scalars, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=3)
_trees = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(_keys, inner, max_size=4)
        | st.dictionaries(_keys, inner, max_size=4).map(collections.OrderedDict)
    ),
    max_leaves=12,
)


@given(_trees)
def test_any_tree_of_leaves_comes_back(value: object) -> None:
    try:
        result = _through(value)
    except (
        UnsupportedStateError
    ) as error:  # long bytes below keys that share a text or are not text
        refused = error.message
        allowed = "one name" in refused or "surrogate" in refused
    else:
        allowed = same(result, value)
    assert allowed


def test_restored_arrays_and_lists_are_fresh_and_writable() -> None:
    array = np.arange(100)
    result = _through([array, [1]])
    result[0][0] = -1
    assert array[0] == 0
    assert result[0].flags.owndata | result[0].flags.writeable


class _Point(NamedTuple):
    x: int


class _Color(enum.IntEnum):
    RED = 1


class _Int(int):
    pass


class _OnlySaves:
    def state_dict(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ({1, 2}, "sorted"),
        (_Color.RED, "value or .name"),
        (_Point(1), "_asdict"),
        (_Int(3), r"int\(...\)"),
        (collections.defaultdict(int), r"dict\(...\)"),
        (torch.Size([1]), r"tuple\(...\)"),
        (lambda: 1, "code is never stored"),
        (_OnlySaves, "code is never stored"),
        (_OnlySaves(), "no load_state_dict"),
        (object(), "give its class state_dict"),
        (torch.float32, r"str\(...\)"),
        (bytearray(b"x"), r"bytes\(...\)"),
        (1j, "give its class state_dict"),
        (np.array([None, {}], dtype=object), "plain numbers"),
        (np.zeros(2, dtype=[("a", int)]), "one array per field"),
        (np.zeros(2, dtype=[("a", "U0")])["a"], "use a list"),
        ({frozenset(): 1}, "keys are"),
        ({(torch.ones(1),): 1}, "keys are"),
    ],
)
def test_other_values_are_refused_with_path_and_remedy(value: object, remedy: str) -> None:
    with pytest.raises(UnsupportedStateError, match=rf"'a.b.0.*{remedy}") as caught:
        flatten_state({"a": {"b": [value]}}, rank=0)
    assert caught.value.path.startswith("a.b.0")


def test_cycles_and_deep_nesting_are_refused_but_sharing_is_not() -> None:
    loop: list[object] = []
    loop.append({"self": loop})
    with pytest.raises(UnsupportedStateError, match="contains itself"):
        flatten_state({"loop": loop}, rank=0)
    deep: list[object] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(UnsupportedStateError, match="deeper than 100"):
        flatten_state({"deep": deep}, rank=0)
    restore(save({"deep": deep[0]}), {"deep": []})
    twice = [1]
    assert _through([twice, twice]) == [[1], [1]]


def _row(path: tuple[str, ...], nbytes: int = 300, **changes: Any) -> TensorRow:
    return msgspec.structs.replace(TensorRow(path, "uint8", (nbytes,), private=True), **changes)


_BIG = ["array", "<f8", [2**31, 2**31], 0]


@pytest.mark.parametrize(
    "leaves",
    [
        [],
        None,
        {"x": ["unknown"]},
        {"x": []},
        {"x": [["list"]]},
        {"x": ["int", "12"]},
        {"x": ["int", 5]},
        {"x": ["float", "zz"]},
        {"x": ["str", "ff"]},
        {"x": ["bytes", "!!"]},
        {"x": ["bytes", 1]},
        {"x": ["bytes", -1]},
        {"x": ["bytes", True]},
        {"x": ["scalar", "<f4", "AAA="]},
        {"x": ["scalar", "|O8", "AAAAAAAAAAA="]},
        {"x": ["scalar", "<U1", "AAAAAA=="]},
        {"x": ["array", "V8", [1], "AAAAAAAAAAA="]},
        {"x": ["array", "<f4,<f4", [1], ""]},
        {"x": ["array", "<f7", [1], ""]},
        {"x": ["array", "<U99999999999", [0], ""]},
        {"x": ["array", "<f4", [-1], ""]},
        {"x": ["array", "<f4", [2], "AAAA"]},
        {"x": ["array", "<f4", [2**62, 2**62, 0], ""]},
        {"x": ["array", "<f4", [1.0], "AAAAAA=="]},
        {"x": ["array", "<f4", [1] * 40, "AAAAAA=="]},
        {"x": ["array", "<f4", [1], {}]},
        {"x": _BIG},
        {"x": ["array", "|u1", [299], 0]},
        {"x": ["tensor", 1]},
        {"x": ["tensor", "0"]},
        {"y": ["tensor", 0]},
        {"x": ["dict", [1]]},
        {"x": ["dict", [["list"], 1]]},
        {"x": ["dict", [1, 1], [1, 2]]},
        {"x": ["dict", [["bytes", 0], 1]]},
        {"x": ["dict", [["array", "<f4", [1], "AAAAAA=="], 1]]},
        {"x": ["module", 0, 5, {}]},
        {"x": ["module", -1, 1, {}]},
        {"x": ["module", 0, 1, {}]},
        {"x": ["module", 0, 1, []]},
        {"x": ["module", 0.0, 1, {}]},
        {"x": ["stateful", ["module", 0, 0, {}]]},
        {"x": ["stateful"]},
        {"x": ["optimizer", {}]},
        {"x": ["optimizer", {"naming": "full", "groups": [3], "state": {}}]},
        {"x": ["optimizer", {"naming": "full", "groups": [], "state": {"a": {}}}]},
    ],
)
def test_hostile_leaves_are_refused(leaves: object) -> None:
    with pytest.raises(FormatError, match="leaves of the header"):
        parse_leaves(leaves, [_row(("x",))])


@pytest.mark.parametrize(
    "group",
    [
        {"names": [1], "devices": "cpu", "shapes": None, "options": {}},
        {"names": ["a", "a"], "devices": "cpu", "shapes": None, "options": {}},
        {"names": ["a"], "devices": [], "shapes": None, "options": {}},
        {"names": ["a"], "devices": "cpu", "shapes": [], "options": {}},
        {"names": ["a"], "devices": "cpu", "shapes": [["x"]], "options": {}},
        {"names": ["a"], "devices": "cpu", "shapes": None, "options": ["list"]},
        {"names": ["a"], "devices": "cpu", "shapes": None, "options": ["dict", [1, 2]]},
        {"names": ["a"], "devices": "cpu", "shapes": None},
    ],
)
def test_hostile_param_groups_are_refused(group: object) -> None:
    leaves = {"x": ["optimizer", {"naming": "full", "groups": [group], "state": {}}]}
    with pytest.raises(FormatError, match="leaves of the header"):
        parse_leaves(leaves, [])


def test_deeply_nested_input_is_refused_rather_than_followed() -> None:
    node: object = 1
    key: object = 1
    for _ in range(500):
        node = ["list", node]
        key = ["tuple", key]
    for leaves in ({"x": node}, {"x": ["dict", [key, 1]]}):
        with pytest.raises(FormatError, match="deeper than"):
            parse_leaves(leaves, [])


@given(
    st.recursive(
        st.none()
        | st.integers(-2, 3)
        | st.sampled_from(["list", "tensor", "bytes", "module", "x"]),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner),
        max_leaves=10,
    )
)
def test_arbitrary_json_is_read_or_refused_with_a_format_error(node: object) -> None:
    try:
        parse_leaves({"x": node}, [_row(("x",)), _row(("x", "x"), dtype="float32")])
    except FormatError:
        pass
