"""Stored leaves -> typed nodes, checked against the table. The way back from flatten.py.

What comes in was parsed from JSON and may be hostile: every tag, index, path and length is checked,
and nothing is run or allocated by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from shardstore.errors import FormatError
from shardstore.format.records import TensorRow
from shardstore.state.kinds import CONTAINERS, element
from shardstore.state.leaves import MAX_DEPTH, Blob, LeafError, decode_leaf
from shardstore.state.nodes import (
    ContainerNode,
    GroupNode,
    LeafNode,
    ModuleNode,
    Node,
    OptimizerNode,
    StatefulNode,
    TensorNode,
    describe_node,
)

_TAGS = {tag: cls for cls, tag in CONTAINERS.items()}
_DEPTH_LIMIT = MAX_DEPTH + 20  # objects and optimizers add levels of their own


def parse_leaves(leaves: object, table: Sequence[TensorRow]) -> dict[str, Node]:
    """Read the leaves of a header: one node per name of the state.

    Raises:
        FormatError: they break docs/format-leaves.md.
    """
    if not isinstance(leaves, dict):
        _fail((), "not an object")
    parser = _Parser(table)
    return {name: parser.node(node, (_text(name),), 0) for name, node in leaves.items()}


def _fail(path: tuple[str, ...], problem: str) -> NoReturn:
    where = ".".join(path)
    raise FormatError("the leaves of the header are malformed", problems=[f"{where!r}: {problem}"])


def _text(value: object) -> str:
    if type(value) is not str:
        _fail((), "a name that is not a string")
    return value


class _Parser:
    """Holds the table while nodes are read."""

    def __init__(self, table: Sequence[TensorRow]) -> None:
        self.table = table

    def node(self, node: object, path: tuple[str, ...], depth: int) -> Node:
        if depth > _DEPTH_LIMIT:
            _fail(path, f"nested deeper than {_DEPTH_LIMIT} levels")
        if isinstance(node, dict):
            keyed = [(_text(key), value) for key, value in node.items()]
            return self._mapping(dict, keyed, path, depth)
        if not isinstance(node, list):
            return self._leaf(node, path)
        match node:
            case ["tensor", row]:
                return TensorNode(self._row(row, path))
            case ["module", first, count, dict(extras)]:
                return self._module(first, count, extras, path, depth)
            case ["stateful", tree]:
                return StatefulNode(self.tree(tree, path, depth + 1))
            case ["optimizer", dict(body)]:
                return self._optimizer(body, path, depth)
            case [("list" | "tuple") as tag, *items]:
                children = [
                    (index, self.node(child, (*path, str(index)), depth + 1))
                    for index, child in enumerate(items)
                ]
                return ContainerNode(_TAGS[tag], tuple(children))
            case [("dict" | "ordered" | "counter") as tag, *items]:
                pairs: list[tuple[object, object]] = []
                for item in items:
                    if not isinstance(item, list) or len(item) != 2:
                        _fail(path, f"an entry of a {tag} that is not a pair")
                    pairs.append((self._key(item[0], path, depth + 1), item[1]))
                return self._mapping(_TAGS[tag], pairs, path, depth)
        return self._leaf(node, path)

    def tree(self, node: object, path: tuple[str, ...], depth: int) -> Node:
        """Read a node that holds tensors, leaves and containers only."""
        parsed = self.node(node, path, depth)
        stack: list[Node] = [parsed]
        while stack:
            current = stack.pop()
            if isinstance(current, ModuleNode | OptimizerNode | StatefulNode):
                _fail(path, f"{describe_node(current)} inside a state_dict")
            if isinstance(current, ContainerNode):
                stack.extend(child for _, child in current.items)
        return parsed

    def _mapping(
        self, cls: type, pairs: Sequence[tuple[Any, object]], path: tuple[str, ...], depth: int
    ) -> ContainerNode:
        items: list[tuple[object, Node]] = []
        for key, value in pairs:
            items.append((key, self.node(value, (*path, element(key)), depth + 1)))
        if len({key: None for key, _ in items}) != len(items):
            _fail(path, "a key that occurs twice")
        return ContainerNode(cls, tuple(items))

    def _key(self, node: object, path: tuple[str, ...], depth: int) -> object:
        if depth > _DEPTH_LIMIT:
            _fail(path, f"a key nested deeper than {_DEPTH_LIMIT} levels")
        if isinstance(node, list) and node[:1] == ["tuple"]:
            return tuple(self._key(item, path, depth + 1) for item in node[1:])
        value = self._leaf(node, path).value
        try:
            hash(value)
        except TypeError:
            _fail(path, "a key that cannot be one")
        if isinstance(value, Blob):
            _fail(path, "a key whose bytes are elsewhere")
        return value

    def _leaf(self, node: object, path: tuple[str, ...]) -> LeafNode:
        try:
            value = decode_leaf(node)
        except LeafError as error:
            _fail(path, str(error))
        if isinstance(value, Blob):
            row = self.table[self._row(value.row, path)]
            if row.dtype != "uint8" or len(row.shape) != 1 or not row.private:
                _fail(path, f"row {value.row} does not hold the bytes of a leaf")
            if value.nbytes is not None and row.shape[0] != value.nbytes:
                _fail(path, f"{row.shape[0]} bytes where {value.nbytes} are needed")
        return LeafNode(value)

    def _row(self, index: object, path: tuple[str, ...]) -> int:
        if type(index) is not int or not 0 <= index < len(self.table):
            _fail(path, f"no row {index!r:.40} in a table of {len(self.table)}")
        if self.table[index].path != path:
            _fail(path, f"row {index} is {'.'.join(self.table[index].path)!r}")
        return index

    def _module(
        self, first: object, count: object, extras: Any, path: tuple[str, ...], depth: int
    ) -> ModuleNode:
        if (
            type(first) is not int
            or type(count) is not int
            or first < 0
            or count < 0
            or first + count > len(self.table)
        ):
            _fail(path, f"rows {first!r:.40} + {count!r:.40} in a table of {len(self.table)}")
        rows: dict[str, int] = {}
        for index in range(first, first + count):
            at = self.table[index].path
            if len(at) != len(path) + 1 or at[: len(path)] != path or at[-1] in rows:
                _fail(path, f"row {index} ({'.'.join(at)!r}) is not one of this module")
            rows[at[-1]] = index
        states = {
            _text(name): self.tree(node, (*path, name), depth + 1) for name, node in extras.items()
        }
        return ModuleNode(rows, states)

    def _optimizer(self, body: Any, path: tuple[str, ...], depth: int) -> OptimizerNode:
        match body:
            case {"naming": str(naming), "groups": list(groups), "state": dict(entries)} if (
                len(body) == 3
            ):
                pass
            case _:
                _fail(path, "an optimizer without naming, groups and state")
        parsed = tuple(
            self._group(group, (*path, "param_groups", str(index)), depth + 1)
            for index, group in enumerate(groups)
        )
        names = [name for group in parsed for name in group.names]
        if len(set(names)) != len(names):
            _fail(path, "a parameter name that occurs twice")
        state: dict[str, ContainerNode] = {}
        for name, entry in entries.items():
            node = self.tree(entry, (*path, "state", _text(name)), depth + 1)
            if not isinstance(node, ContainerNode) or node.type is not dict:
                _fail((*path, "state", name), "the state of a parameter that is no dict")
            state[name] = node
        if unknown := state.keys() - set(names):
            _fail(path, f"state of {sorted(unknown)[:5]}, which are in no group")
        return OptimizerNode(naming, parsed, state)

    def _group(self, group: object, path: tuple[str, ...], depth: int) -> GroupNode:
        match group:
            case {
                "names": list(names),
                "devices": str() | list() as devices,
                "shapes": None | list() as shapes,
                "options": options,
            } if isinstance(group, dict) and len(group) == 4:
                pass
            case _:
                _fail(path, "a group without names, devices, shapes and options")
        texts = tuple(_text(name) for name in names)
        kinds = (devices,) * len(texts) if isinstance(devices, str) else tuple(map(_text, devices))
        sizes = None if shapes is None else tuple(_shape(shape, path) for shape in shapes)
        if len(kinds) != len(texts) or (sizes is not None and len(sizes) != len(texts)):
            _fail(path, "names, devices and shapes of different lengths")
        node = self.tree(options, path, depth)
        if not isinstance(node, ContainerNode) or node.type is not dict:
            _fail(path, "options that are no dict")
        return GroupNode(texts, kinds, sizes, {_text(key): child for key, child in node.items})


def _shape(shape: object, path: tuple[str, ...]) -> tuple[int, ...]:
    if not isinstance(shape, list) or any(type(size) is not int for size in shape):
        _fail(path, "a shape that is no list of integers")
    return tuple(shape)
