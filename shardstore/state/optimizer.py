"""Read an optimizer's state directly: no fake step, no `optimizer.state_dict()`.

The node in the leaves is `["optimizer", {naming, groups, state}]`: per group the ordered parameter
names, their device types and every option; per parameter that has state, its entries. Parameters
without state are absent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardstore.state.kinds import element
from shardstore.state.survey import Survey, name_parameters
from shardstore.state.tensors import refuse

TreeEncoder = Callable[[tuple[str, ...], object], object]
"""Encodes tensors, leaves and containers of them at a path."""


def encode_optimizer(
    survey: Survey,
    path: tuple[str, ...],
    optimizer: torch.optim.Optimizer,
    encode: TreeEncoder,
) -> object:
    """Return the JSON node of an optimizer, adding its tensors through `encode`.

    Raises:
        UnsupportedStateError: state under something that is no parameter of a group, or values in it
            that cannot be stored.
    """
    names = name_parameters(survey, optimizer)
    check_state_keys(path, optimizer)
    groups: list[object] = []
    state: dict[str, object] = {}
    for index, (group, group_names) in enumerate(
        zip(optimizer.param_groups, names.groups, strict=True)
    ):
        at = (*path, "param_groups", str(index))
        groups.append(
            {
                "names": list(group_names),
                "devices": _compact([p.device.type for p in group["params"]]),
                "shapes": [list(p.shape) for p in group["params"]]
                if names.naming == "position"
                else None,
                "options": encode(at, {k: v for k, v in group.items() if k != "params"}),
            }
        )
        for parameter, name in zip(group["params"], group_names, strict=True):
            if parameter in optimizer.state:
                entry = optimizer.state[parameter]
                if type(entry) is not dict:
                    refuse((*path, "state", name), entry, "the state of a parameter must be a dict")
                state[name] = encode((*path, "state", name), entry)
    return ["optimizer", {"naming": names.naming, "groups": groups, "state": state}]


def check_state_keys(path: tuple[str, ...], optimizer: torch.optim.Optimizer) -> None:
    """Refuse state that belongs to no parameter: it would have no name to come back to."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    keys: list[object] = list(optimizer.state)
    for key in keys:
        if id(key) not in known:
            tensor = isinstance(key, torch.Tensor)
            refuse(
                (*path, "state", "?" if tensor else element(key)),
                key,
                f"optimizer state is kept under {'a tensor in no group' if tensor else repr(key)}, "
                "not under a parameter: wrap the optimizer in an object with state_dict and "
                "load_state_dict",
            )


def _compact(devices: list[str]) -> str | list[str]:
    """One device type for all, or a list of them."""
    return devices[0] if len(set(devices)) == 1 else devices
