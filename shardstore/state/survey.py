"""One look over the state before any walk: its modules, and what optimizers may call their params."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardstore.state.kinds import Kind, element, items_of, kind_of
from shardstore.state.modules import ModuleContents, read_module


@dataclass(slots=True)
class Survey:
    """Modules of a state, in order, each read once."""

    modules: list[tuple[tuple[str, ...], ModuleContents]] = field(default_factory=list)
    _by_id: dict[int, tuple[nn.Module, ModuleContents]] = field(default_factory=dict)
    _fqns: list[dict[int, str]] | None = None

    def read(self, module: nn.Module, path: tuple[str, ...]) -> ModuleContents:
        """Contents of a module, remembered."""
        known = self._by_id.get(id(module))
        if known is None:
            known = self._by_id[id(module)] = (module, read_module(module, path))
        return known[1]

    def fqns(self) -> list[dict[int, str]]:
        """For each module: the first name of each tensor in it, by id."""
        if self._fqns is None:
            self._fqns = []
            for _, contents in self.modules:
                names: dict[int, str] = {}
                for fqn, tensor in contents.tensors.items():
                    names.setdefault(id(tensor), fqn)
                self._fqns.append(names)
        return self._fqns


@dataclass(frozen=True, slots=True)
class GroupNames:
    """How an optimizer's parameters are called: one tuple of names per group."""

    naming: str
    """`relative` (fqn in the one module that holds all), `full` (path), `listed`, `position`."""
    groups: tuple[tuple[str, ...], ...]


def survey_state(state: Mapping[str, object]) -> Survey:
    """Find and read all modules of a state. Reshards FSDP2 modules that are left gathered."""
    found = Survey()
    seen: set[int] = set()
    stack: list[tuple[tuple[str, ...], object]] = [((name,), v) for name, v in state.items()]
    stack.reverse()
    while stack:
        path, value = stack.pop()
        kind = kind_of(value)
        if isinstance(value, nn.Module):
            found.modules.append((path, found.read(value, path)))
        elif kind is Kind.CONTAINER and id(value) not in seen:
            seen.add(id(value))
            stack.extend(((*path, element(k)), v) for k, v in reversed(items_of(value)))
    return found


def name_parameters(survey: Survey, optimizer: torch.optim.Optimizer) -> GroupNames:
    """Name an optimizer's parameters so that another process finds them again.

    Names relative to the module when exactly one module of the state holds all of them, else full
    paths, else the names that the optimizer was built with, else positions.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    flat = [parameter for group in groups for parameter in group]
    tables = survey.fqns() if flat else []
    holders = [table for table in tables if all(id(p) in table for p in flat)]
    if len(holders) == 1:
        table = holders[0]
        return GroupNames("relative", tuple(tuple(table[id(p)] for p in g) for g in groups))
    full: dict[int, str] = {}
    for (path, _), table in zip(survey.modules, tables, strict=True) if tables else ():
        for identity, fqn in table.items():
            full.setdefault(identity, ".".join((*path, fqn)))
    if flat and all(id(p) in full for p in flat):
        return GroupNames("full", tuple(tuple(full[id(p)] for p in g) for g in groups))
    listed: list[Any] = [group.get("param_names") for group in optimizer.param_groups]
    if flat and all(
        isinstance(names, list | tuple) and len(names) == len(group)
        for names, group in zip(listed, groups, strict=True)
    ):
        named = tuple(tuple(str(name) for name in names) for names in listed)
        if len({name for names in named for name in names}) == len(flat):
            return GroupNames("listed", named)
    count = iter(range(len(flat)))
    return GroupNames("position", tuple(tuple(str(next(count)) for _ in g) for g in groups))
