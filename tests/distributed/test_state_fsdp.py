"""FSDP2 states over real gloo ranks: sharded, tied, uneven, gathered, hybrid, with tensor parallel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from shardstore.errors import StateMismatchError
from shardstore.state.flatten import flatten_state
from tests.ranks import run_ranks
from tests.roundtrip import match, raw, restore, save

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
needs_torch_28 = pytest.mark.skipif(
    TORCH < (2, 8), reason="FSDP2 has no CPU forward or uneven shards under TP before torch 2.8"
)


class Tied(nn.Module):
    """Embedding and head are one parameter; five rows do not divide by two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.embedding(tokens)))
        return out


def _sharded(module: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    fully_shard(module, mesh=mesh, **options)
    return module


def _make(seed: int, mesh: Any, lr: float = 0.1) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = _sharded(Tied(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def _train(state: dict[str, Any], steps: range, rank: int) -> list[float]:
    losses = []
    for step in steps:
        tokens = (torch.arange(6) + step + rank) % 5
        if TORCH < (2, 8):
            loss = _give_gradients(state["model"], step)
        else:
            loss = state["model"](tokens).square().mean()
            loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["scheduler"].step()
        losses.append(loss.item())
    return losses


def _give_gradients(model: nn.Module, step: int) -> torch.Tensor:
    """Stand in for a forward and backward."""
    total = torch.zeros(())
    for parameter in model.parameters():
        parameter.grad = (parameter.detach() * (step + 1)).sin()
        assert isinstance(parameter.grad, DTensor)
        total += parameter.grad.to_local().sum()
    return total


def _locals(module: nn.Module) -> dict[str, bytes]:
    with torch.no_grad():
        return {
            name: raw(p.to_local() if isinstance(p, DTensor) else p)
            for name, p in module.named_parameters()
        }


def _resume(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    state = _make(0, mesh)
    _train(state, range(3), rank)
    saved = save(state, rank=rank, world_size=size)
    expected = _train(state, range(3, 6), rank)
    fresh = _make(1, mesh, lr=0.7)
    weight = fresh["model"].embedding.weight
    plan = restore(saved, fresh, rank=rank, world_size=size)
    assert plan.num_tensors == len(saved.header.table)
    assert fresh["model"].embedding.weight is weight is fresh["model"].head.weight
    assert next(iter(fresh["optimizer"].state)) is weight
    moment = fresh["optimizer"].state[weight]["exp_avg"]
    assert isinstance(moment, DTensor)
    assert moment.placements == weight.placements
    assert moment.shape == weight.shape
    assert _train(fresh, range(3, 6), rank) == expected
    assert _locals(fresh["model"]) == _locals(state["model"])


def test_uneven_tied_model_resumes_bit_for_bit_with_a_fresh_optimizer() -> None:
    run_ranks(2, _resume, 2)


def _table_of(rank: int, size: int) -> tuple[Any, ...]:
    mesh = init_device_mesh("cpu", (size,))
    state = _make(0, mesh)
    state["linear"] = _sharded(nn.Linear(5, 1), mesh)
    flat = flatten_state(state, rank=rank)
    tied = [row for row in flat.table if row.alias_of is not None]
    assert [row.path for row in tied] == [("model", "head.weight")]
    sizes = {
        ".".join(row.path): piece.sizes for row, piece in zip(flat.table, flat.pieces, strict=False)
    }
    for tensor, piece in zip(flat.tensors, flat.pieces, strict=False):
        assert tuple(tensor.shape) == piece.sizes
    return flat.table, sizes["model.embedding.weight"], sizes["linear.weight"], sizes["linear.bias"]


def test_tables_are_equal_on_all_ranks_and_empty_shards_keep_their_dims() -> None:
    results = run_ranks(4, _table_of, 4)
    assert all(result[0] == results[0][0] for result in results)
    assert [result[1] for result in results] == [(2, 4), (2, 4), (1, 4), (0, 4)]
    assert [result[2] for result in results] == [(1, 5), (0, 5), (0, 5), (0, 5)]
    assert [result[3] for result in results] == [(1,), (0,), (0,), (0,)]


def _gathered(rank: int, reshard_after_forward: bool | None) -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for layer in model:
        _sharded(layer, mesh, reshard_after_forward=reshard_after_forward)
    _sharded(model, mesh, reshard_after_forward=reshard_after_forward)
    x = torch.ones(3, 4)
    with torch.no_grad():
        before = model(x)
    saved = save({"model": model}, rank=rank, world_size=2)
    assert all(row.placements is not None for row in saved.header.table)
    with torch.no_grad():
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            parameter.to_local().fill_(7.0)
        model(x)  # gathers again
    restore(saved, {"model": model}, rank=rank, world_size=2)
    with torch.no_grad():
        assert torch.equal(model(x), before)
    assert isinstance(model, FSDPModule)


@needs_torch_28
@pytest.mark.parametrize("reshard_after_forward", [None, False, True])
def test_gathered_modules_are_resharded_for_save_and_restore(
    reshard_after_forward: bool | None,
) -> None:
    run_ranks(2, _gathered, reshard_after_forward)


def _hybrid(rank: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard"))
    module = nn.Module()
    module.weight = nn.Parameter(torch.arange(4.0))
    _sharded(module, mesh)
    saved = save({"model": module}, rank=rank, world_size=4)
    row = saved.header.table[0]
    assert [p.type for p in row.placements or ()] == ["Replicate", "Shard"]
    assert saved.header.meshes[0].axis_names == ("rep", "shard")
    assert saved.header.coordinates == ((rank // 2, rank % 2),)
    weight = module.weight
    assert isinstance(weight, DTensor)
    with torch.no_grad():
        weight.to_local().fill_(-1)
    restore(saved, {"model": module}, rank=rank, world_size=4)
    with torch.no_grad():
        values: list[float] = weight.to_local().tolist()
    return values


def test_hybrid_shards_record_both_axes_and_come_back() -> None:
    assert run_ranks(4, _hybrid) == [[0.0, 1.0], [2.0, 3.0], [0.0, 1.0], [2.0, 3.0]]


def _tensor_parallel(rank: int, rows: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    linear = nn.Linear(1, rows, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.arange(float(rows)).view(rows, 1))
    model = nn.Sequential(linear)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    _sharded(model, mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    saved = save(state, rank=rank, world_size=4)
    row = saved.header.table[0]
    assert row.placements is not None
    assert [p.type for p in row.placements] == ["_StridedShard", "Shard"]
    assert row.placements[0].split_factor == 2
    before = _locals(model)
    fresh = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            parameter.to_local().fill_(-1)
    restore(saved, {"model": model, "optimizer": fresh}, rank=rank, world_size=4)
    assert _locals(model) == before
    weight = next(iter(model.parameters()))
    buffer = fresh.state[weight]["momentum_buffer"]
    assert isinstance(buffer, DTensor)
    assert isinstance(weight, DTensor)
    assert buffer.placements == weight.placements
    with torch.no_grad():
        values: list[float] = (buffer.to_local() * 0 + weight.to_local() + 0.1).flatten().tolist()
    return values


@pytest.mark.parametrize("rows", [8, pytest.param(7, marks=needs_torch_28)])
def test_tensor_parallel_under_fsdp_keeps_strided_shards(rows: int) -> None:
    results = run_ranks(4, _tensor_parallel, rows)
    assert sorted(round(v) for values in results for v in values) == list(range(rows))
    if rows == 8:
        assert [[round(v) for v in values] for values in results] == [
            [0, 1],
            [4, 5],
            [2, 3],
            [6, 7],
        ]


def _untied(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    tied = _sharded(Tied(), mesh)
    saved = save({"model": tied}, rank=rank, world_size=2)
    model = Tied()
    model.head.weight = nn.Parameter(copy.deepcopy(model.embedding.weight.detach()))
    live = _sharded(model, mesh)
    before = _locals(live)
    with pytest.raises(StateMismatchError, match=r"tied to model.embedding.weight in the snapshot"):
        match(saved, {"model": live}, rank=rank, world_size=2)
    saved = save({"model": live}, rank=rank, world_size=2)
    with pytest.raises(StateMismatchError, match=r"in the live state .*separate in the snapshot"):
        match(saved, {"model": tied}, rank=rank, world_size=2)
    assert _locals(live) == before


def test_tied_against_separate_parameters_is_a_difference_both_ways() -> None:
    run_ranks(2, _untied)


def _lora(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    with torch.no_grad():
        a = distribute_tensor(torch.zeros(4, 8), mesh, [Shard(0)])
        b = distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)])
        a.to_local().fill_(0.03 + 0.01 * rank)
        b.to_local().fill_(0.01 + 0.01 * rank)
        saved = save({"adapter": {"A": a, "B": b}}, rank=rank, world_size=2)
        a.to_local().zero_()
        b.to_local().zero_()
        restore(saved, {"adapter": {"A": a, "B": b}}, rank=rank, world_size=2)
        assert torch.equal(a.to_local(), torch.full((2, 8), 0.03 + 0.01 * rank))
        assert torch.equal(b.to_local(), torch.full((4, 4), 0.01 + 0.01 * rank))
        dist.barrier()
        assert Replicate() not in a.placements


def test_each_rank_gets_its_own_slice_of_an_adapter_back() -> None:
    run_ranks(2, _lora)
