"""DTensors over real gloo ranks: meshes, coordinates, ranks outside, refusals, objects that hold them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardstore.errors import StateMismatchError, TopologyMismatchError, UnsupportedStateError
from shardstore.state.flatten import flatten_state
from shardstore.state.rng import RNGState
from tests.ranks import run_ranks
from tests.roundtrip import match, restore, save


def _local(tensor: Any) -> torch.Tensor:
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
        return local


def _wrong_meshes(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    names = [f"w{i}" for i in range(30)]

    def tensors(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
        return {n: distribute_tensor(torch.zeros(8), mesh, [Replicate(), Shard(0)]) for n in names}

    saved = save({"model": tensors(mesh)}, rank=rank, world_size=4)
    renamed = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    permuted = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))
    for other, text in ((renamed, "(tp, dp)"), (permuted, "[0, 2, 1, 3]")):
        with pytest.raises(TopologyMismatchError) as caught:
            match(saved, {"model": tensors(other)}, rank=rank, world_size=4)
        message = str(caught.value)
        assert message.count("mesh of 30 tensors") == 1
        assert "(dp, tp)" in message
        assert text in message
        assert len(message.splitlines()) < 8
        assert "(dp, tp)" in caught.value.saved
        assert text in caught.value.current
        assert "open_snapshot" in message
        assert "HuggingFaceStorageReader" in message
    equal = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    restore(saved, {"model": tensors(equal)}, rank=rank, world_size=4)


def test_meshes_of_equal_shape_with_other_names_or_ranks_are_refused_once_per_mesh() -> None:
    run_ranks(4, _wrong_meshes)


def _placements(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(16.0).view(4, 4)
    saved = save({"w": distribute_tensor(full, mesh, [Shard(0)])}, rank=rank, world_size=2)
    for placement in (Shard(1), Replicate()):
        live = distribute_tensor(full - 20, mesh, [placement])
        with pytest.raises(
            StateMismatchError, match=r"w: placement \[Shard\(0\)\] saved"
        ) as caught:
            match(saved, {"w": live}, rank=rank, world_size=2, strict=False)
        assert not isinstance(caught.value, TopologyMismatchError)
        assert torch.equal(live.full_tensor(), full - 20)
    with pytest.raises(StateMismatchError, match="a plain tensor live"):
        match(saved, {"w": full}, rank=rank, world_size=2)


def test_another_placement_is_refused_even_if_names_may_differ() -> None:
    run_ranks(2, _placements)


def _world(rank: int) -> None:
    saved = save({"t": torch.zeros(2)}, rank=rank, world_size=2)
    with pytest.raises(TopologyMismatchError, match="saved by 2 ranks, restoring on 4 ranks"):
        match(saved, {"t": torch.zeros(2)}, rank=rank, world_size=4)
    with pytest.raises(TopologyMismatchError, match=f"the file is of rank {rank} of 2") as caught:
        match(saved, {"t": torch.zeros(3)}, rank=1 - rank, world_size=2)
    assert "world size 2" in caught.value.saved
    assert any("shape (2,) saved, (3,) live" in line for line in caught.value.mismatched)


def test_other_world_size_or_rank_is_refused_with_both_numbers() -> None:
    run_ranks(2, _world)


def _outside(rank: int) -> tuple[Any, ...]:
    inner = DeviceMesh("cpu", [0, 1])
    tensor = DTensor.from_local(torch.full((2, 3), float(rank)), inner, [Shard(0)])
    scalar = DTensor.from_local(torch.tensor(5.0), inner, [Replicate()])
    state = {"expert": tensor, "scalar": scalar}
    saved = save(state, rank=rank, world_size=4)
    with torch.no_grad():
        tensor.to_local().fill_(-1)
    restore(saved, state, rank=rank, world_size=4)
    piece = saved.header.pieces[0]
    fresh = DTensor.from_local(torch.zeros(2, 3), inner, [Shard(0)])
    holder = _Holder({"a": torch.tensor(0), "w": tensor})
    kept = save({"h": holder}, rank=rank, world_size=4)
    other = _Holder(None)
    restore(kept, {"h": other, "fresh": fresh}, rank=rank, world_size=4, strict=False)
    assert isinstance(other.tree, dict)
    assert other.tree["w"].shape == (4, 3)
    return piece.sizes, piece.offsets, saved.header.coordinates, _local(tensor).flatten().tolist()


def test_ranks_outside_a_mesh_store_nothing_and_restore() -> None:
    results = run_ranks(4, _outside)
    assert results[1] == ((2, 3), (2, 0), ((1,),), [1.0] * 6)
    assert results[2] == results[3] == ((0, 0), (0, 0), (None,), [])


class _Subclass(torch.Tensor):
    pass


def _refusals(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.ones(2) + rank, mesh, [Partial()])
    with pytest.raises(UnsupportedStateError, match=r"'p' .*Partial.*redistribute"):
        flatten_state({"p": partial}, rank=rank)
    inner = torch.ones(2).as_subclass(_Subclass)
    wrapped = DTensor.from_local(inner, mesh, [Shard(0)])
    with pytest.raises(UnsupportedStateError, match=r"'s' .*_Subclass"):
        flatten_state({"s": wrapped}, rank=rank)
    short = DTensor.from_local(
        torch.ones(3 - rank), mesh, [Shard(0)], shape=torch.Size([7]), stride=(1,)
    )
    with pytest.raises(UnsupportedStateError, match=r"'u' .*\(7,\)"):
        flatten_state({"u": short}, rank=rank)


def test_partial_subclassed_and_wrongly_shaped_dtensors_are_refused() -> None:
    run_ranks(2, _refusals)


class _Holder:
    """An object with state_dict whose tree is whatever it was given."""

    def __init__(self, tree: object) -> None:
        self.tree = tree

    def state_dict(self) -> object:
        return self.tree

    def load_state_dict(self, tree: object) -> None:
        self.tree = tree


def _stateful(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    weight = nn.Parameter(distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]))
    model = nn.Module()
    model.weight = weight
    average = distribute_tensor(torch.arange(5.0) * 2, mesh, [Shard(0)])
    state: dict[str, Any] = {"ema": _Holder({"n": 3, "w": average}), "model": model}
    saved = save(state, rank=rank, world_size=2)
    live = _Holder(None)
    restore(saved, {"ema": live, "model": model}, rank=rank, world_size=2)
    assert isinstance(live.tree, dict)
    rebuilt = live.tree["w"]
    assert isinstance(rebuilt, DTensor)
    assert rebuilt is not average
    assert rebuilt.placements == (Shard(0),)
    assert rebuilt.device_mesh == mesh
    assert torch.equal(_local(rebuilt), _local(average))
    with torch.no_grad():
        average.to_local().zero_()
    restore(saved, state, rank=rank, world_size=2)
    assert state["ema"].tree["w"] is average
    assert torch.equal(_local(average), _local(rebuilt))
    with pytest.raises(TopologyMismatchError, match=r"ema.w.*no equal mesh in the live state"):
        match(saved, {"ema": _Holder(None)}, rank=rank, world_size=2, partial=True)


def test_objects_get_their_dtensors_back_on_an_equal_live_mesh() -> None:
    run_ranks(2, _stateful)


def _private(rank: int) -> tuple[list[str], list[float]]:
    import random

    import numpy as np

    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    loader = {"pos": 100 + rank, "buf": torch.arange(rank + 1)}
    shared = torch.zeros(rank + 2, 2)
    state: dict[str, Any] = {
        "t": torch.full((2,), float(rank)),
        "loader": loader,
        "rng": RNGState(),
    }
    model: Any = nn.Module()
    model.register_buffer("expert", shared + 10 + rank)
    state["model"] = model
    saved = save(state, rank=rank, world_size=2)
    drawn = [torch.rand(1).item(), random.random(), float(np.random.rand())]
    state["t"].fill_(-1)
    loader["pos"] = 0
    model.expert.fill_(-1)
    restore(saved, state, rank=rank, world_size=2)
    assert [torch.rand(1).item(), random.random(), float(np.random.rand())] == drawn
    assert state["t"].tolist() == [rank, rank]
    assert loader["pos"] == 100 + rank
    assert model.expert.unique().tolist() == [10 + rank]
    keys = [piece.key for piece in saved.header.pieces]
    return keys, drawn


def test_plain_tensors_and_random_streams_are_private_to_a_rank() -> None:
    (keys0, drawn0), (keys1, drawn1) = run_ranks(2, _private)
    assert "t@0" in keys0
    assert "t@1" in keys1
    assert "loader.buf@1" in keys1
    assert "model.expert" in keys0
    assert "model.expert" in keys1
    assert drawn0 != drawn1


def _own_parameters(rank: int) -> None:
    parameters = [nn.Parameter(torch.full((2,), float(i))) for i in range(2 + rank)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.full((2,), float(rank + 1))
    optimizer.step()
    saved = save({"optimizer": optimizer}, rank=rank, world_size=2)
    fresh = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    restore(saved, {"optimizer": fresh}, rank=rank, world_size=2)
    assert len(fresh.state) == 2 + rank
    for parameter in parameters:
        assert fresh.state[parameter]["momentum_buffer"].tolist() == [rank + 1] * 2


def test_ranks_may_own_different_numbers_of_parameters() -> None:
    run_ranks(2, _own_parameters)


def _meshes_in_one(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    dense = distribute_tensor(torch.arange(8.0), mesh["dp"], [Shard(0)])
    expert = distribute_tensor(torch.arange(4.0) + 10 * (rank // 2), mesh["ep"], [Shard(0)])
    both = distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Shard(0)])
    again = distribute_tensor(torch.arange(8.0), mesh["dp"], [Shard(0)])
    state = {"dense": dense, "expert": expert, "both": both, "again": again}
    saved = save(state, rank=rank, world_size=4)
    assert [row.mesh for row in saved.header.table] == [0, 1, 2, 0]
    before = {name: _local(t).clone() for name, t in state.items()}
    for tensor in state.values():
        _local(tensor).fill_(-1)
    restore(saved, state, rank=rank, world_size=4)
    for name, tensor in state.items():
        assert torch.equal(_local(tensor), before[name])


def test_several_meshes_are_listed_once_in_order_of_appearance() -> None:
    run_ranks(4, _meshes_in_one)
