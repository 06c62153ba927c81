"""verl's pair of functions, and the faults of the original that ours must not have."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardstore import CoordinationError, ShardStoreError, StateMismatchError
from shardstore.integrations import verl
from shardstore.integrations.verl import (
    fsdp2_sharded_load_from_cpu,
    fsdp2_sharded_save_to_cpu,
)
from tests.distributed.training import local_of
from tests.ranks import run_ranks


def _model(rank: int, *, reshard: bool | None = True) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    fully_shard(model[0], mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model


def _fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            local_of(tensor).fill_(value)


def _values(model: nn.Module) -> set[float]:
    with torch.no_grad():
        tensors = [*model.parameters(), *model.buffers()]
        return {float(v) for t in tensors for v in local_of(t).reshape(-1).tolist()}


def _cycles(rank: int) -> list[set[float]]:
    """Both trainers' order: keep pi_old, and flip to it and back in each later mini-batch."""
    model = _model(rank)
    seen = []
    for num_batches in (1, 2, 3, 4):
        _fill(model, 100.0)
        kept: dict[int, Any] = {1: fsdp2_sharded_save_to_cpu(model)}
        for batch in range(2, num_batches + 1):
            _fill(model, 100.0 + batch)  # the optimizer has stepped in place
            kept[batch] = fsdp2_sharded_save_to_cpu(model)
            fsdp2_sharded_load_from_cpu(model, *kept[1])
            assert _values(model) == {100.0}
            fsdp2_sharded_load_from_cpu(model, *kept.pop(batch))
        seen.append(_values(model))
    return seen


@pytest.mark.parametrize("world_size", [2, 4])
def test_flipping_to_old_weights_and_back_ends_on_the_current_ones(world_size: int) -> None:
    for seen in run_ranks(world_size, _cycles):
        assert seen == [{100.0}, {102.0}, {103.0}, {104.0}]


def _gathered(rank: int, reshard: bool | None) -> tuple[bool, bool]:
    model = _model(rank, reshard=reshard)
    model.eval()
    data = torch.ones(4, 5)
    with torch.no_grad():
        before: torch.Tensor = model(data)  # the root, or all of it, may stay gathered now
        pair = fsdp2_sharded_save_to_cpu(model)
        _fill_resharded(model)
        changed: torch.Tensor = model(data)
        fsdp2_sharded_load_from_cpu(model, *pair)
        after = model(data)
    return torch.equal(before, after), torch.equal(before, changed)


def _fill_resharded(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    _fill(model, 0.5)


@pytest.mark.parametrize("reshard", [None, True, False])
def test_a_model_left_gathered_by_a_forward_is_really_restored(reshard: bool | None) -> None:
    assert run_ranks(2, _gathered, reshard) == [(True, False)] * 2


class _Mixed(nn.Module):
    def __init__(self, placements: list[list[Any]]) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for index, placement in enumerate(placements):
            whole = torch.arange(24.0).view(4, 6) + index
            self.register_parameter(
                f"p{index}", nn.Parameter(distribute_tensor(whole, mesh, placement))
            )


def _layouts(rank: int) -> list[str]:
    first = _Mixed([[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Replicate()]])
    pair = fsdp2_sharded_save_to_cpu(first)
    before = [local_of(p).clone() for p in first.parameters()]
    _fill(first, -1)
    fsdp2_sharded_load_from_cpu(first, *pair)
    with torch.no_grad():
        same = all(
            torch.equal(a, local_of(b)) for a, b in zip(before, first.parameters(), strict=True)
        )
    swapped = _Mixed([[Shard(0), Shard(1)], [Shard(0), Replicate()], [Shard(1), Replicate()]])
    _fill(swapped, -1)
    with pytest.raises(StateMismatchError) as caught:
        fsdp2_sharded_load_from_cpu(swapped, *pair)
    assert _values(swapped) == {-1.0}
    return [str(same), str(caught.value)]


def test_each_tensor_has_its_own_layout_and_live_placements_are_compared() -> None:
    for same, text in run_ranks(4, _layouts):
        assert same == "True"
        assert "p1" in text
        assert "p0" not in text


def _mismatches(rank: int) -> str:
    model = _model(rank)
    pair = fsdp2_sharded_save_to_cpu(model)
    other = _model(rank).to(torch.bfloat16)
    other.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    with pytest.raises(StateMismatchError) as caught:
        fsdp2_sharded_load_from_cpu(other, *pair)
    return str(caught.value)


def test_other_dtypes_and_names_are_refused_in_one_message() -> None:
    for text in run_ranks(2, _mismatches):
        for named in ("extra", "0.weight", "bfloat16", "float32"):
            assert named in text


def _one_fails(rank: int) -> tuple[str, float, set[float]]:
    model = _model(rank)
    _fill(model, 1.0)
    state, spec = fsdp2_sharded_save_to_cpu(model)
    _fill(model, 2.0)
    started = time.monotonic()
    with pytest.raises(ShardStoreError) as caught:
        fsdp2_sharded_load_from_cpu(model, {} if rank == 1 else state, spec)  # type: ignore[arg-type]
    took_s = time.monotonic() - started
    values = _values(model)
    fsdp2_sharded_load_from_cpu(model, state, spec)
    assert _values(model) == {1.0}
    return str(caught.value), took_s, values


def test_one_failing_rank_makes_all_raise_at_once_and_touches_nothing() -> None:
    for text, took_s, values in run_ranks(2, _one_fails):
        assert "rank 1" in text
        assert "pair" in text
        assert took_s < 10
        assert values == {2.0}


def _absent(rank: int) -> str:
    verl._TIMEOUT_S = 1.0  # type: ignore[misc]
    model = _model(rank)
    pair = fsdp2_sharded_save_to_cpu(model)
    fsdp2_sharded_load_from_cpu(model, *pair)
    text = ""
    if rank == 0:
        with pytest.raises(CoordinationError) as caught:
            fsdp2_sharded_load_from_cpu(model, *pair)
        text = str(caught.value)
    dist.barrier()
    return text


def test_a_rank_that_does_not_come_is_named_within_the_deadline() -> None:
    assert "rank 1" in run_ranks(2, _absent)[0]


def test_a_single_process_model_on_the_cpu_is_copied_not_aliased() -> None:
    model = nn.BatchNorm1d(3)
    _fill(model, 1.0)
    state, spec = fsdp2_sharded_save_to_cpu(model)
    assert set(state) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert all(entry_spec is None for _, entry_spec in state.values())
    _fill(model, 2.0)
    assert state["weight"][0].tolist() == [1, 1, 1]
    fsdp2_sharded_load_from_cpu(model, state, spec)
    assert _values(model) == {1.0}
    _fill(model, 3.0)
    assert state["running_mean"][0].tolist() == [1, 1, 1], (
        "a load must not tie the copy to the model"
    )


def test_tied_parameters_stay_tied_and_are_copied_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    state, spec = fsdp2_sharded_save_to_cpu(model)
    assert state["0.weight"][0].data_ptr() == state["1.weight"][0].data_ptr()
    _fill(model, 9.0)
    fsdp2_sharded_load_from_cpu(model, state, spec)
    assert model[0].weight is model[1].weight
    assert _values(model) != {9.0}
