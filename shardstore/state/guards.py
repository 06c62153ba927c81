"""Refuse to save or restore in the middle of a step, where parameters and state disagree."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Final, NoReturn

import torch
from torch import nn

from shardstore.errors import UnsupportedStateError
from shardstore.state.kinds import Kind, items_of, kind_of
from shardstore.state.tensors import type_name


def _code_of(name: str) -> CodeType | None:
    code = getattr(getattr(nn.Module, name, None), "__code__", None)
    return code if isinstance(code, CodeType) else None


_CALLS: Final = frozenset({_code_of("_call_impl"), _code_of("_wrapped_call_impl")} - {None})


def check_boundary(state: Mapping[str, object]) -> None:
    """Check that no forward of a module in `state`, and no backward, is running on this thread.

    Raises:
        UnsupportedStateError: one is; `path` names the entry of the state.
    """
    task = getattr(torch._C, "_current_graph_task_id", None)  # noqa: SLF001 - no public question
    if task is not None and task() != -1:
        _refuse("inside a backward pass", "", "Tensor")
    running: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the interpreter's own interface
    while frame is not None:
        if frame.f_code in _CALLS:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                running.append(module)
        frame = frame.f_back
    if not running or not isinstance(state, Mapping):
        return
    active = {id(module) for module in running}
    for name, root in _modules_of(state):
        for prefix, module in root.named_modules():
            if id(module) in active:
                where = f"{name}.{prefix}" if prefix else name
                _refuse(f"inside the forward of {where!r}", where, type_name(module))


def _modules_of(state: Mapping[str, object]) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    stack: list[tuple[str, object]] = [(str(name), value) for name, value in state.items()]
    while stack:
        name, value = stack.pop()
        if isinstance(value, nn.Module):
            found.append((name, value))
        elif kind_of(value) is Kind.CONTAINER and id(value) not in seen:
            seen.add(id(value))
            stack.extend((f"{name}.{key}", child) for key, child in items_of(value))
    return found


def _refuse(where: str, path: str, kind: str) -> NoReturn:
    raise UnsupportedStateError(
        f"called {where}: parameters and optimizer state do not belong together there; call save "
        "and restore at a step boundary, after optimizer.step()",
        path=path,
        type=kind,
    )
