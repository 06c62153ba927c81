"""What of a module is stored: parameters, persistent buffers and extra state, by unwrapped name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from shardstore.errors import UnsupportedStateError
from shardstore.state import dtensor
from shardstore.state.tensors import refuse, type_name

_WRAPPERS = (
    # (module that defines it, class, attribute): looked up only if already imported
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "CheckpointWrapper",
        "_checkpoint_wrapped_module",
    ),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
)
_EXTRA = "_extra_state"


@dataclass(slots=True)
class ModuleContents:
    """Live contents of one module by fully qualified name, wrappers left out of the names.

    The rule: what `torch.compile`, `checkpoint_wrapper`, `DistributedDataParallel` and `DataParallel`
    wrap has the name of the wrapper; nothing else is renamed.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    extras: dict[str, nn.Module] = field(default_factory=dict)
    """Modules that override get_extra_state, by the name of that state."""
    uncovered: list[str] = field(default_factory=list)
    """Non-persistent buffers: not stored, as in state_dict."""


def read_module(module: nn.Module, path: tuple[str, ...]) -> ModuleContents:
    """Walk a module. FSDP2 modules that a forward left gathered are resharded first.

    Raises:
        UnsupportedStateError: FSDP1, two tensors that unwrapping gives one name, module cycles.
    """
    dtensor.reshard(module)
    contents = ModuleContents()
    wrappers = _wrapper_classes()
    fsdp1 = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    for prefix, child in _walk(module, "", path, wrappers, []):
        if fsdp1 is not None and isinstance(child, fsdp1):
            refuse(
                (*path, prefix[:-1]), child, "FSDP1 flattens parameters: use fully_shard (FSDP2)"
            )
        _read_one(contents, prefix, child, path)
    return contents


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside any stack of transparent wrappers."""
    wrappers = _wrapper_classes()
    while (inner := _inner(module, wrappers)) is not None:
        module = inner
    return module


def _wrapper_classes() -> list[tuple[type, str]]:
    found: list[tuple[type, str]] = []
    for source, name, attribute in _WRAPPERS:
        cls = getattr(sys.modules.get(source), name, None)
        if isinstance(cls, type):
            found.append((cls, attribute))
    return found


def _inner(module: nn.Module, wrappers: list[tuple[type, str]]) -> nn.Module | None:
    for cls, attribute in wrappers:
        if isinstance(module, cls):
            return module._modules.get(attribute)  # noqa: SLF001 - the walk of state_dict itself
    return None


def _walk(
    module: nn.Module,
    prefix: str,
    path: tuple[str, ...],
    wrappers: list[tuple[type, str]],
    above: list[nn.Module],
) -> Iterator[tuple[str, nn.Module]]:
    if any(module is other for other in above):
        refuse((*path, prefix[:-1]), module, "the module contains itself: break the cycle")
    yield prefix, module
    inner = _inner(module, wrappers)
    above.append(module)
    for name, child in module._modules.items():  # noqa: SLF001 - named_modules drops shared ones
        if child is not None:
            below = prefix if child is inner else f"{prefix}{name}."
            yield from _walk(child, below, path, wrappers, above)
    above.pop()


def _read_one(
    contents: ModuleContents, prefix: str, module: nn.Module, path: tuple[str, ...]
) -> None:
    # The three dicts are what state_dict reads; the public iterators drop persistence and ties.
    parameters, buffers = module._parameters, module._buffers  # noqa: SLF001
    volatile = module._non_persistent_buffers_set  # noqa: SLF001
    tensors = contents.tensors
    for source in (parameters, buffers):
        for name, tensor in source.items():
            if tensor is None:
                continue
            fqn = prefix + name
            if source is buffers and name in volatile:
                contents.uncovered.append(fqn)
            elif tensors.setdefault(fqn, tensor) is not tensor:
                _refuse_clash(path, fqn)
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        fqn = prefix + _EXTRA
        if contents.extras.setdefault(fqn, module) is not module:
            _refuse_clash(path, fqn)


def _refuse_clash(path: tuple[str, ...], fqn: str) -> None:
    name = ".".join((*path, fqn))
    raise UnsupportedStateError(
        f"two tensors of the module are named {name!r} once wrappers are left out of names: "
        "rename one, or store the inner module instead of the wrapper",
        path=name,
        type=type_name(nn.Parameter),
    )
