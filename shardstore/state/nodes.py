"""Typed nodes of a stored state: what each entry was, with tensors as row indexes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from shardstore.state.leaves import Blob


@dataclass(frozen=True, slots=True)
class LeafNode:
    """A plain value, or a blob that waits for its bytes."""

    value: object


@dataclass(frozen=True, slots=True)
class TensorNode:
    """A tensor: index of its row."""

    row: int


@dataclass(frozen=True, slots=True)
class ContainerNode:
    """A list, tuple or dict of nodes. Keys of lists and tuples are their indexes."""

    type: type
    items: tuple[tuple[object, Node], ...]


@dataclass(frozen=True, slots=True)
class ModuleNode:
    """A module: its rows by fully qualified name, and its extra state."""

    rows: dict[str, int]
    extras: dict[str, Node]


@dataclass(frozen=True, slots=True)
class StatefulNode:
    """What an object's state_dict() gave."""

    tree: Node


@dataclass(frozen=True, slots=True)
class GroupNode:
    """One param group: ordered names, device types, shapes if the names are positions, options."""

    names: tuple[str, ...]
    devices: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...] | None
    options: dict[str, Node]


@dataclass(frozen=True, slots=True)
class OptimizerNode:
    """An optimizer: groups, and entries of the parameters that have state."""

    naming: str
    groups: tuple[GroupNode, ...]
    state: dict[str, ContainerNode]


Node: TypeAlias = LeafNode | TensorNode | ContainerNode | ModuleNode | StatefulNode | OptimizerNode


def rows_of(node: Node) -> list[int]:
    """Rows that a node uses, leaves' bytes included."""
    match node:
        case LeafNode(value):
            return [value.row] if isinstance(value, Blob) else []
        case TensorNode(row):
            return [row]
        case ContainerNode(_, items):
            return [row for _, child in items for row in rows_of(child)]
        case ModuleNode(rows, extras):
            return [*rows.values(), *(row for child in extras.values() for row in rows_of(child))]
        case StatefulNode(tree):
            return rows_of(tree)
        case OptimizerNode(_, groups, state):
            children = [child for group in groups for child in group.options.values()]
            return [row for child in (*children, *state.values()) for row in rows_of(child)]


def describe_node(node: Node) -> str:
    """What a node was, in words."""
    match node:
        case LeafNode(value):
            return "a plain value" if isinstance(value, Blob) else f"a {type(value).__name__}"
        case TensorNode():
            return "a tensor"
        case ContainerNode(cls, _):
            return f"a {cls.__name__}"
        case ModuleNode():
            return "a module"
        case StatefulNode():
            return "an object with state_dict"
        case OptimizerNode():
            return "an optimizer"
