"""Modules: names, wrappers, buffers, extra state, ties, guards."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel

from shardstore.errors import StateMismatchError, UnsupportedStateError
from shardstore.state.flatten import flatten_state
from shardstore.state.guards import check_boundary
from tests.roundtrip import match, restore, save


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 3)
        self.bn = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("inv_freq", torch.ones(2), persistent=False)
        self.register_buffer("absent", None)
        self.register_parameter("none", None)
        self.hook: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.hook is not None:
            self.hook()
        out: torch.Tensor = self.bn(self.lin(x))
        return out


_NAMES = [
    "lin.weight",
    "lin.bias",
    "bn.weight",
    "bn.bias",
    "bn.running_mean",
    "bn.running_var",
    "bn.num_batches_tracked",
]


def _wrappers() -> dict[str, Callable[[nn.Module], nn.Module]]:
    def compiled(module: nn.Module) -> nn.Module:
        wrapped: nn.Module = torch.compile(module)  # type: ignore[assignment]
        return wrapped

    return {
        "plain": lambda m: m,
        "compiled": compiled,
        "checkpointed": checkpoint_wrapper,
        "parallel": DataParallel,
        "compiled parallel": lambda m: compiled(DataParallel(m)),
        "parallel compiled": lambda m: DataParallel(compiled(m)),
        "checkpointed compiled": lambda m: checkpoint_wrapper(compiled(m)),
    }


def test_parameters_and_persistent_buffers_are_stored_and_others_are_named() -> None:
    flat = flatten_state({"model": _Net()}, rank=0)
    assert {row.path for row in flat.table} == {("model", n) for n in ["mask", *_NAMES]}
    assert not any(row.private for row in flat.table)
    assert flat.uncovered == ("model.inv_freq",)
    saved = save({"model": _Net()})
    assert restore(saved, {"model": _Net()}).uncovered == ("model.inv_freq",)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("source", _wrappers())
@pytest.mark.parametrize("target", ["plain", "compiled", "checkpointed compiled", "parallel"])
def test_wrappers_are_left_out_of_names(source: str, target: str) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(2, 2), _wrappers()[source](_Net()))
    saved = save({"model": _wrappers()[source](inner)})
    live = nn.Sequential(nn.Linear(2, 2), _wrappers()[target](_Net()))
    restore(saved, {"model": _wrappers()[target](live)})
    for wanted, got in zip(inner.parameters(), live.parameters(), strict=True):
        assert torch.equal(wanted, got)


def test_two_parameters_that_unwrapping_gives_one_name_are_refused() -> None:
    model = checkpoint_wrapper(nn.Linear(2, 2))
    model._parameters["weight"] = nn.Parameter(torch.ones(1))
    with pytest.raises(UnsupportedStateError, match=r"'model.weight'.*wrapper"):
        flatten_state({"model": model}, rank=0)


def test_a_module_that_contains_itself_is_refused() -> None:
    model, child = nn.Module(), nn.Module()
    model._modules["child"], child._modules["back"] = child, model
    with pytest.raises(UnsupportedStateError, match="contains itself"):
        flatten_state({"model": model}, rank=0)


class _Extra(nn.Module):
    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def test_extra_state_comes_back_with_its_tensors() -> None:
    value: dict[str, Any] = {"scale": torch.arange(3.0), "n": 5, "t": (1, "x")}
    live: Any = nn.Sequential(_Extra(None), _Extra({}))
    saved = save({"model": nn.Sequential(_Extra(value), _Extra("s"))})
    assert ("model", "0._extra_state", "scale") in {row.path for row in saved.header.table}
    plan = restore(saved, {"model": live})
    assert live[0].value["n"] == 5
    assert live[0].value["t"] == (1, "x")
    assert torch.equal(live[0].value["scale"], value["scale"])
    assert live[1].value == "s"
    assert plan.num_tensors == 1


def test_extra_state_on_one_side_only_is_a_difference() -> None:
    saved = save({"model": nn.Sequential(_Extra(1))})
    with pytest.raises(StateMismatchError) as caught:
        match(saved, {"model": nn.Sequential(nn.Module())})
    assert caught.value.unexpected == ("model.0._extra_state",)
    with pytest.raises(StateMismatchError) as caught:
        match(save({"model": nn.Sequential(nn.Module())}), {"model": nn.Sequential(_Extra(1))})
    assert caught.value.missing == ("model.0._extra_state",)


def test_tied_parameters_are_stored_once_and_stay_tied() -> None:
    def tied() -> Any:
        model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    model, live = tied(), tied()
    saved = save({"model": model})
    rows = {row.path[-1]: row.alias_of for row in saved.header.table}
    assert rows["1.weight"] == 0
    assert rows["0.weight"] is None
    weight = live[0].weight
    plan = restore(saved, {"model": live})
    assert live[0].weight is weight is live[1].weight
    assert torch.equal(weight, model[0].weight)
    assert plan.num_tensors == 4
    assert len(plan.needed) == 3
    with pytest.raises(StateMismatchError, match=r"tied to model.0.weight in the snapshot"):
        match(saved, {"model": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))})


def test_a_part_of_a_tie_is_restored_from_the_row_that_has_the_bytes() -> None:
    model = nn.Linear(2, 2)
    saved = save({"model": model, "again": model})
    live = nn.Linear(2, 2)
    plan = restore(saved, {"again": live}, partial=True)
    assert plan.unexpected == ("model",)
    assert torch.equal(live.weight, model.weight)


def test_frozen_parameters_are_filled_and_stay_frozen() -> None:
    model, live = nn.Linear(2, 2), nn.Linear(2, 2)
    live.requires_grad_(False)
    restore(save({"model": model}), {"model": live})
    assert torch.equal(live.weight, model.weight)
    assert not live.weight.requires_grad


def test_missing_and_unexpected_names_are_listed_and_may_be_allowed() -> None:
    saved = save({"model": nn.Linear(2, 2)})
    live: Any = nn.Linear(2, 2, bias=False)
    live.register_parameter("scale", nn.Parameter(torch.full((1,), -1.0)))
    with pytest.raises(StateMismatchError) as caught:
        match(saved, {"model": live})
    assert caught.value.missing == ("model.scale",)
    assert caught.value.unexpected == ("model.bias",)
    assert "model.scale" in str(caught.value)
    assert "strict=False" in str(caught.value)
    with pytest.raises(StateMismatchError):
        match(saved, {"model": live}, partial=True)
    plan = restore(saved, {"model": live}, strict=False)
    assert plan.missing == ("model.scale",)
    assert plan.unexpected == ("model.bias",)
    assert live.scale.item() == -1


def test_a_live_module_on_meta_or_lazy_is_a_difference_that_names_the_tensor() -> None:
    saved = save({"model": nn.Linear(2, 2)})
    with pytest.raises(StateMismatchError, match=r"model.weight: the live tensor is on the meta"):
        match(saved, {"model": nn.Linear(2, 2, device="meta")})
    with pytest.raises(StateMismatchError, match=r"model.weight: the live tensor is uninit"):
        match(saved, {"model": nn.LazyLinear(2)})
    with pytest.raises(UnsupportedStateError, match=r"model.weight.*meta"):
        flatten_state({"model": nn.Linear(2, 2, device="meta")}, rank=0)
    with pytest.raises(UnsupportedStateError, match=r"model.weight.*uninitialized"):
        flatten_state({"model": nn.LazyLinear(2)}, rank=0)


def test_a_bare_module_tensor_or_list_is_refused_with_the_way_to_write_it() -> None:
    for bare in (nn.Linear(1, 1), torch.ones(1), [1], None):
        with pytest.raises(UnsupportedStateError, match=r"write {"):
            flatten_state(bare, rank=0)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedStateError, match=r'write {"model": model}'):
        flatten_state(nn.Linear(1, 1), rank=0)  # type: ignore[arg-type]


def test_saving_inside_a_forward_is_refused_and_names_the_module() -> None:
    model: Any = nn.Sequential(_Net())
    errors: list[UnsupportedStateError] = []

    def hook() -> None:
        for state in ({"model": model}, {"nested": {"part": [model[0].lin, model[0]]}}):
            try:
                check_boundary(state)
            except UnsupportedStateError as error:
                errors.append(error)
        check_boundary({"other": nn.Linear(1, 1)})

    model[0].hook = hook
    model(torch.ones(4, 2))
    assert [error.path for error in errors] == ["model", "nested.part.1"]
    assert "step boundary" in str(errors[0])
    check_boundary({"model": model})


def test_saving_inside_a_backward_is_refused() -> None:
    weight: Any = torch.ones(2, requires_grad=True)
    errors: list[str] = []

    def hook(_: torch.Tensor) -> None:
        try:
            check_boundary({"w": weight})
        except UnsupportedStateError as error:
            errors.append(str(error))

    weight.register_hook(hook)
    weight.sum().backward()
    assert len(errors) == 1
    assert "inside a backward pass" in errors[0]
    check_boundary({"w": weight})


def _best_s(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(7):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def test_the_guard_does_not_grow_with_the_model_and_the_walk_grows_in_proportion() -> None:
    """As ratios in one run: a busy machine, or one that measures coverage, is slow at both."""
    small, large = (
        {"model": nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(count)])}
        for count in (500, 10_000)
    )
    guards = [_best_s(partial(check_boundary, state)) for state in (small, large)]
    walks = [_best_s(partial(flatten_state, state, rank=0)) for state in (small, large)]
    print(
        f"guard {guards[1] / guards[0]:.2f}, walk {walks[1] / walks[0]:.1f} for 20 times the tensors"
    )
    assert guards[1] < 5 * guards[0]
    assert walks[1] < 200 * walks[0], "a walk whose cost is quadratic shows 400"
