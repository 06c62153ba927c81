"""Which kind of thing a value of the state is; the order of the questions is part of the contract."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Final, NoReturn, Protocol, runtime_checkable

import torch
from torch import nn

from shardstore.errors import UnsupportedStateError
from shardstore.state.leaves import SCALAR_TYPES, is_leaf
from shardstore.state.tensors import refuse, type_name


class Kind(enum.Enum):
    """What to do with a value; the value of each member is its name in messages."""

    MODULE = "module"
    OPTIMIZER = "optimizer"
    STATEFUL = "object with state_dict"
    TENSOR = "tensor"
    LEAF = "plain value"
    CONTAINER = "container"
    UNSUPPORTED = "unsupported object"


IDENTITY: Final = frozenset({Kind.MODULE, Kind.OPTIMIZER, Kind.STATEFUL, Kind.TENSOR})
"""Kinds that are filled in place: the object stays, its contents change."""

CONTAINERS: Final[dict[type, str]] = {
    list: "list",
    tuple: "tuple",
    dict: "dict",
    OrderedDict: "ordered",
    Counter: "counter",
}
"""Container types, exact, and their tags in the file."""


@runtime_checkable
class Stateful(Protocol):
    """As in torch.distributed.checkpoint: gives its state and takes it back."""

    def state_dict(self) -> object:
        """Everything needed to go on from here."""

    def load_state_dict(self, state_dict: object) -> object:
        """Become what `state_dict` returned."""


def kind_of(value: object) -> Kind:
    """Classify one value, not what it contains."""
    cls = type(value)
    if cls in SCALAR_TYPES:
        return Kind.LEAF
    if cls in CONTAINERS:
        return Kind.CONTAINER
    if isinstance(value, nn.Module):
        return Kind.MODULE
    if isinstance(value, torch.optim.Optimizer) and _keeps_state_dict(value):
        return Kind.OPTIMIZER
    if isinstance(value, torch.Tensor):
        return Kind.TENSOR
    if (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    ):
        return Kind.STATEFUL
    return Kind.LEAF if is_leaf(value) else Kind.UNSUPPORTED


def _keeps_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """False for wrappers (Accelerate, torchtitan), whose own `.state` is not the whole story."""
    cls, base = type(optimizer), torch.optim.Optimizer
    return (
        cls.state_dict is base.state_dict
        and cls.load_state_dict is base.load_state_dict
        and not {"state_dict", "load_state_dict"} & vars(optimizer).keys()
    )


def items_of(container: object) -> list[tuple[object, object]]:
    """Keys (indexes for lists and tuples) and values of a container."""
    if isinstance(container, dict):
        return list(container.items())
    assert isinstance(container, list | tuple)
    return list(enumerate(container))


def element(key: object) -> str:
    """Return the path element of a container key."""
    if isinstance(key, str):
        return str(key)
    if type(key) is int and key.bit_length() > 10_000:
        return hex(key)
    return str(key)


def holds_identity(value: object) -> bool:
    """True if the value is, or contains at any depth, something that is filled in place."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        current = stack.pop()
        kind = kind_of(current)
        if kind in IDENTITY:
            return True
        if kind is Kind.CONTAINER and id(current) not in seen:
            seen.add(id(current))
            stack.extend(child for _, child in items_of(current))
    return False


def check_state(state: object) -> dict[str, object]:
    """Return the named entries of a state.

    Raises:
        UnsupportedStateError: it is not a mapping of names to objects.
    """
    if not isinstance(state, Mapping):
        example = "model" if isinstance(state, nn.Module) else "state"
        raise UnsupportedStateError(
            f"the state must map names to objects, and this is a {type_name(state)}: "
            f'write {{"{example}": {example}}}',
            type=type_name(state),
        )
    entries: dict[str, object] = {}
    for name, value in state.items():
        if type(name) is not str:
            refuse((str(name),), name, "names in the state are strings: rename it")
        try:
            name.encode()
        except UnicodeEncodeError:
            refuse((name,), name, "its name holds a lone surrogate, which is not text: rename it")
        entries[name] = value
    return entries


def refuse_unsupported(path: tuple[str, ...], value: object) -> NoReturn:
    """Raise for a value of kind UNSUPPORTED, with the remedy that fits it."""
    refuse(path, value, _remedy(value))


def _remedy(value: object) -> str:
    if isinstance(value, enum.Enum):
        return "enums are not stored: store its .value or .name"
    if isinstance(value, set | frozenset):
        return "sets have no order: store sorted(...)"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "named tuples are not stored: store tuple(...) or _asdict()"
    if isinstance(value, list | tuple | dict):
        base = next(cls.__name__ for cls in (list, tuple, dict) if isinstance(value, cls))
        return f"subclasses of {base} are not stored: store {base}(...)"
    if isinstance(value, bool | int | float | str | bytes):
        base = next(c.__name__ for c in (int, float, str, bytes) if isinstance(value, c))
        return f"subclasses of {base} are not stored: store {base}(...)"
    if isinstance(value, bytearray | memoryview):
        return "store bytes(...)"
    if isinstance(value, torch.dtype | torch.device):
        return "store str(...)"
    if isinstance(value, type) or callable(value):
        return "code is never stored: store a name, and look it up after the restore"
    if callable(getattr(value, "state_dict", None)):
        return "it has state_dict but no load_state_dict, so it could not be restored: add one"
    return (
        "give its class state_dict and load_state_dict, or store its parts as tensors, numbers, "
        "strings, bytes, lists, tuples and dicts"
    )
