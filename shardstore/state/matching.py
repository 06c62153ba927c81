"""Pair stored nodes with live values, kind by kind; see restore.py for the whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from shardstore.state.kinds import (
    IDENTITY,
    Kind,
    Stateful,
    element,
    holds_identity,
    items_of,
    kind_of,
)
from shardstore.state.matcher import Actions, Builder, Matcher, Slot
from shardstore.state.nodes import (
    ContainerNode,
    LeafNode,
    ModuleNode,
    Node,
    OptimizerNode,
    StatefulNode,
    TensorNode,
    describe_node,
    rows_of,
)
from shardstore.state.optimizer_restore import match_optimizer
from shardstore.state.rebuild import ABSENT, Placing, child_of, rebuild
from shardstore.state.rng import RNGState
from shardstore.state.tensors import type_name


def match_value(matcher: Matcher, path: tuple[str, ...], live: object, node: Node) -> Slot:
    """Match one live value with a stored node of the user's state tree."""
    kind = kind_of(live)
    if isinstance(live, nn.Module) and isinstance(node, ModuleNode):
        return _match_module(matcher, path, live, node)
    if isinstance(live, torch.optim.Optimizer) and isinstance(node, OptimizerNode):
        if kind is Kind.OPTIMIZER:
            return _deferred(matcher, live, lambda: match_optimizer(matcher, path, live, node))
    elif kind is Kind.STATEFUL and isinstance(node, StatefulNode):
        assert isinstance(live, Stateful)
        return _match_stateful(matcher, path, live, node)
    elif kind is Kind.TENSOR and isinstance(node, TensorNode):
        assert isinstance(live, torch.Tensor)
        return matcher.fill(path, live, node.row)
    elif isinstance(node, ContainerNode) and type(live) is node.type:
        return _match_container(matcher, path, live, node)
    elif (
        isinstance(node, LeafNode | ContainerNode)
        and kind in (Kind.LEAF, Kind.CONTAINER)
        and not holds_identity(live)
    ):
        return Slot(rebuild(matcher, path, ABSENT, node, Placing()), rebinds=True)
    matcher.differences.mismatched.append(
        f"{'.'.join(path)}: {describe_node(node)} in the snapshot, a {_live_text(live, kind)} in the "
        "live state"
    )
    return Slot(lambda _: live)


def _live_text(live: object, kind: Kind) -> str:
    name = type_name(live)
    return name if kind in (Kind.LEAF, Kind.CONTAINER) else f"{name} ({kind.value})"


def _match_module(
    matcher: Matcher, path: tuple[str, ...], module: nn.Module, node: ModuleNode
) -> Slot:
    contents = matcher.survey.read(module, path)
    name = ".".join(path)
    matcher.uncovered.extend(f"{name}.{fqn}" for fqn in contents.uncovered)
    slots: list[Builder] = []
    for fqn, tensor in contents.tensors.items():
        row = node.rows.get(fqn)
        if row is None:
            matcher.differences.missing.append(f"{name}.{fqn}")
        else:
            slots.append(matcher.fill((*path, fqn), tensor, row).build)
    live_names = contents.tensors.keys()
    unexpected = [fqn for fqn in node.rows if fqn not in live_names]
    unexpected += [fqn for fqn in node.extras if fqn not in contents.extras]
    matcher.differences.unexpected.extend(f"{name}.{fqn}" for fqn in unexpected)
    for fqn, owner in contents.extras.items():
        if fqn in node.extras:
            slots.append(_match_extra(matcher, (*path, fqn), owner, node.extras[fqn]))
        else:
            matcher.differences.missing.append(f"{name}.{fqn}")

    def build(actions: Actions) -> object:
        for slot in slots:
            slot(actions)
        return module

    return Slot(build)


def _match_extra(matcher: Matcher, path: tuple[str, ...], owner: nn.Module, node: Node) -> Builder:
    def match() -> Callable[[Actions], None]:
        build = rebuild(matcher, path, owner.get_extra_state(), node, Placing())

        def prepare(actions: Actions) -> None:
            value = build(actions)
            actions.loads.append(lambda: owner.set_extra_state(value))

        return prepare

    return _deferred(matcher, owner, match).build


def _match_stateful(
    matcher: Matcher, path: tuple[str, ...], live: Stateful, node: StatefulNode
) -> Slot:
    is_random = isinstance(live, RNGState)

    def match() -> Callable[[Actions], None]:
        tree = live.state_dict()
        _note_meshes(matcher, tree)
        build = rebuild(matcher, path, tree, node.tree, Placing())

        def prepare(actions: Actions) -> None:
            loads = actions.random if is_random else actions.loads
            value = build(actions)
            loads.append(lambda: live.load_state_dict(value))

        return prepare

    return _deferred(matcher, live, match)


def _note_meshes(matcher: Matcher, tree: object) -> None:
    if isinstance(tree, dict | list | tuple):
        for _, child in items_of(tree):
            _note_meshes(matcher, child)
    else:
        matcher.note_meshes(tree)


def _deferred(
    matcher: Matcher, live: object, match: Callable[[], Callable[[Actions], None]]
) -> Slot:
    """Match later, after all that is filled in place, so that shared memory is known."""
    matched: list[Callable[[Actions], None]] = []
    matcher.deferred.append(lambda: matched.append(match()))

    def build(actions: Actions) -> object:
        matched[0](actions)
        return live

    return Slot(build)


def _match_container(
    matcher: Matcher, path: tuple[str, ...], live: object, node: ContainerNode
) -> Slot:
    """Lists and dicts keep identity and take the stored contents; what they hold is filled."""
    is_strict = any(kind_of(value) in IDENTITY for _, value in items_of(live))
    slots: list[tuple[object, Slot]] = []
    for key, child in node.items:
        below, value = (*path, element(key)), child_of(live, key)
        slot = _match_child(matcher, below, value, child, is_strict=is_strict)
        if slot is not None:
            slots.append((key, slot))
    stored = {key for key, _ in node.items}
    for key, value in items_of(live):
        if key not in stored and holds_identity(value):
            names = _identity_names((*path, element(key)), value)
            matcher.differences.missing.extend(names)
            slots.append((key, _keep(value)))
    if isinstance(live, tuple):
        return _tuple_slot(live, slots)

    def build(actions: Actions) -> object:
        contents = [(key, slot.build(actions)) for key, slot in slots]
        actions.assigns.append(lambda: _set_contents(live, contents))
        return live

    return Slot(build)


def _match_child(
    matcher: Matcher, path: tuple[str, ...], value: object, node: Node, *, is_strict: bool
) -> Slot | None:
    """One stored entry of a container; None if it is not taken."""
    if value is not ABSENT:
        fresh = not is_strict and not holds_identity(value) and _is_plain(node)
        if not fresh or type(value) is getattr(node, "type", None):
            return match_value(matcher, path, value, node)
        return Slot(rebuild(matcher, path, ABSENT, node, Placing()), rebinds=True)
    if is_strict and _holds_rows(node):
        matcher.differences.unexpected.extend(_stored_names(matcher, path, node))
        return None
    return Slot(rebuild(matcher, path, ABSENT, node, Placing()), rebinds=True)


def _is_plain(node: Node) -> bool:
    """Made of leaves, tensors and containers: it can be built."""
    if isinstance(node, ContainerNode):
        return all(_is_plain(child) for _, child in node.items)
    return isinstance(node, LeafNode | TensorNode)


def _holds_rows(node: Node) -> bool:
    """Holds tensors, or objects that are filled in place."""
    if isinstance(node, ContainerNode):
        return any(_holds_rows(child) for _, child in node.items)
    return not isinstance(node, LeafNode)


def _stored_names(matcher: Matcher, path: tuple[str, ...], node: Node) -> list[str]:
    names = [".".join(matcher.header.table[row].path) for row in rows_of(node)]
    return names or [".".join(path)]


def _identity_names(path: tuple[str, ...], value: object) -> list[str]:
    kind = kind_of(value)
    if kind in IDENTITY:
        return [".".join(path)]
    if kind is not Kind.CONTAINER:
        return []
    return [
        name
        for key, child in items_of(value)
        for name in _identity_names((*path, element(key)), child)
    ]


def _keep(value: object) -> Slot:
    return Slot(lambda _: value)


def _tuple_slot(live: tuple[object, ...], slots: list[tuple[object, Slot]]) -> Slot:
    rebinds = len(slots) != len(live) or any(slot.rebinds for _, slot in slots)

    def build(actions: Actions) -> object:
        built = tuple(slot.build(actions) for _, slot in slots)
        return built if rebinds else live

    return Slot(build, rebinds=rebinds)


def _set_contents(live: object, contents: list[tuple[object, object]]) -> None:
    if isinstance(live, list):
        live[:] = [value for _, value in contents]
    elif isinstance(live, dict):
        live.clear()
        for key, value in contents:
            live[key] = value
