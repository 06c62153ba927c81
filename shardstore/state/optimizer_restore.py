"""Give an optimizer the stored state: existing tensors filled, absent ones built, the rest removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardstore.state.matcher import Actions, Builder, Matcher
from shardstore.state.nodes import ContainerNode, GroupNode, OptimizerNode
from shardstore.state.optimizer import check_state_keys
from shardstore.state.rebuild import ABSENT, Placing, child_of, rebuild
from shardstore.state.survey import GroupNames, name_parameters

_LISTED = 10


def match_optimizer(
    matcher: Matcher,
    path: tuple[str, ...],
    optimizer: torch.optim.Optimizer,
    node: OptimizerNode,
) -> Callable[[Actions], None]:
    """Pair stored parameters with live ones and return what prepare does.

    Pairs by name; by position if the parameters have no names here or had none when saved.
    """
    check_state_keys(path, optimizer)
    live = name_parameters(matcher.survey, optimizer)
    by_position = "position" in (live.naming, node.naming)
    pairs = _pair(matcher, path, optimizer, live, node, by_position=by_position)
    if pairs is None:
        return lambda _: None
    options: list[tuple[dict[str, Any], dict[str, Builder]]] = []
    entries: list[tuple[torch.Tensor, dict[str, Builder]]] = []
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, node.groups, strict=True)):
        at = (*path, "param_groups", str(index))
        options.append((group, _match_options(matcher, at, group, saved, pairs)))
        for name, saved_device in zip(saved.names, saved.devices, strict=True):
            if name in node.state:
                parameter = pairs[name]
                placing = Placing(
                    parameter,
                    saved_device,
                    step_on_device=bool(group.get("capturable") or group.get("fused")),
                    must_equal=True,
                    shared=None,
                )
                where = (*path, "state", name)
                builders = _match_entry(matcher, where, optimizer, placing, node.state[name])
                entries.append((parameter, builders))

    def prepare(actions: Actions) -> None:
        new_options = [(g, {k: b(actions) for k, b in built.items()}) for g, built in options]
        new_state = [(p, {k: b(actions) for k, b in built.items()}) for p, built in entries]
        actions.assigns.append(lambda: _assign(optimizer, new_options, new_state))

    return prepare


def _assign(
    optimizer: torch.optim.Optimizer,
    options: list[tuple[dict[str, Any], dict[str, object]]],
    entries: list[tuple[torch.Tensor, dict[str, object]]],
) -> None:
    """Memory only: keys stay the live parameters, entries that were not stored go."""
    for group, values in options:
        group.update(values)
    kept = {id(parameter) for parameter, _ in entries}
    for parameter in [p for p in optimizer.state if id(p) not in kept]:
        del optimizer.state[parameter]
    for parameter, entry in entries:
        if parameter in optimizer.state:
            optimizer.state[parameter].clear()
            optimizer.state[parameter].update(entry)
        else:
            optimizer.state[parameter] = entry


def _match_options(
    matcher: Matcher,
    path: tuple[str, ...],
    group: dict[str, Any],
    saved: GroupNode,
    pairs: dict[str, torch.Tensor],
) -> dict[str, Builder]:
    builders: dict[str, Builder] = {}
    for key, node in saved.options.items():
        if key == "param_names" and _is_reordered(group, saved, pairs):
            continue  # names belong to positions, and the live group has its own order
        placing = Placing(shared=None)
        builders[key] = rebuild(matcher, (*path, key), group.get(key, ABSENT), node, placing)
    return builders


def _is_reordered(group: dict[str, Any], saved: GroupNode, pairs: dict[str, torch.Tensor]) -> bool:
    return any(
        pairs[name] is not parameter
        for name, parameter in zip(saved.names, group["params"], strict=True)
    )


def _match_entry(
    matcher: Matcher,
    path: tuple[str, ...],
    optimizer: torch.optim.Optimizer,
    placing: Placing,
    node: ContainerNode,
) -> dict[str, Builder]:
    parameter = placing.parameter
    assert parameter is not None
    live = optimizer.state.get(parameter, {})
    return {
        key: rebuild(matcher, (*path, str(key)), child_of(live, key), child, placing)  # type: ignore[misc]
        for key, child in node.items
    }


def _pair(
    matcher: Matcher,
    path: tuple[str, ...],
    optimizer: torch.optim.Optimizer,
    live: GroupNames,
    node: OptimizerNode,
    *,
    by_position: bool,
) -> dict[str, torch.Tensor] | None:
    """Live parameters by stored name; None if they do not match, which is noted."""
    name = ".".join(path)
    problems: list[str] = []
    if len(live.groups) != len(node.groups):
        problems.append(f"{name}: {len(node.groups)} param groups saved, {len(live.groups)} live")
    pairs: dict[str, torch.Tensor] = {}
    for index, (group, names, saved) in enumerate(
        zip(optimizer.param_groups, live.groups, node.groups, strict=False)
    ):
        where = f"{name}: group {index}"
        if by_position:
            problems += _position_problems(where, group["params"], saved)
            pairs.update(zip(saved.names, group["params"], strict=False))
            continue
        gone = [fqn for fqn in saved.names if fqn not in names]
        new = [fqn for fqn in names if fqn not in saved.names]
        if gone:
            problems.append(f"{where} has parameters in the snapshot only: {_some(gone)}")
        if new:
            problems.append(f"{where} has parameters in the live state only: {_some(new)}")
        pairs.update(zip(names, group["params"], strict=True))
    matcher.differences.mismatched.extend(problems)
    return None if problems else pairs


def _position_problems(where: str, parameters: list[torch.Tensor], saved: GroupNode) -> list[str]:
    if len(saved.names) != len(parameters):
        return [f"{where} has {len(saved.names)} parameters saved, {len(parameters)} live"]
    if saved.shapes is None:
        return []
    return [
        f"{where}, parameter {position}: shape {shape} saved, {tuple(parameter.shape)} live"
        for position, (shape, parameter) in enumerate(zip(saved.shapes, parameters, strict=True))
        if shape != tuple(parameter.shape)
    ]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown}, ... ({len(names)} in all)"
