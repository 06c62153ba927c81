"""Another topology or another state is refused before any tensor is touched, all differences in one text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardstore import StateMismatchError, TopologyMismatchError
from tests.faults.scenario import open_store
from tests.ranks import run_ranks


def _state(mesh: DeviceMesh, placements: list[Any], value: float) -> dict[str, Any]:
    whole = torch.arange(16.0).view(4, 4)
    tensor = distribute_tensor(whole, mesh, placements)
    with torch.no_grad():
        tensor.to_local().fill_(value)
    return {"model": {"w": tensor}, "plain": torch.full((2,), value)}


def _save(rank: int, folder: str, names: tuple[str, ...], shape: tuple[int, ...]) -> None:
    store = open_store(folder)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    placements = [Replicate()] * (len(shape) - 1) + [Shard(0)]
    store.save(_state(mesh, placements, 3.0), step=1).wait(20)
    store.close(keep_memory=True)


def _refused(rank: int, folder: str, kind: str) -> tuple[str, str, bool]:
    store = open_store(folder)
    world_size = dist.get_world_size()
    placements: list[Any] = [Replicate(), Shard(0)]
    if kind == "world size":
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
        placements = [Shard(0)]
    elif kind == "axis names":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    elif kind == "permuted ranks":
        mesh = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("dp", "tp"))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        placements = [Shard(0), Replicate()]
    state = _state(mesh, placements, -1.0)
    with pytest.raises(StateMismatchError) as caught:
        store.restore(state)
    untouched = bool((state["model"]["w"].to_local() == -1).all()) and state["plain"][0] == -1
    store.close(keep_memory=True)
    return type(caught.value).__name__, str(caught.value), bool(untouched)


def test_another_world_size_is_refused_from_memory_and_from_disk(folder: str) -> None:
    run_ranks(2, _save, folder, ("dp",), (2,))
    for world_size in (1, 4):
        for name, text, untouched in run_ranks(world_size, _refused, folder, "world size"):
            assert name == TopologyMismatchError.__name__
            assert "2 ranks" in text
            assert str(world_size) in text
            assert "HuggingFaceStorageReader" in text
            assert untouched


@pytest.mark.parametrize("kind", ["axis names", "permuted ranks", "placements"])
def test_another_mesh_or_placement_is_refused_on_all_ranks(folder: str, kind: str) -> None:
    run_ranks(4, _save, folder, ("dp", "tp"), (2, 2))
    for name, text, untouched in run_ranks(4, _refused, folder, kind):
        assert untouched
        assert "w" in text
        if kind == "axis names":
            assert name == TopologyMismatchError.__name__
            assert "dp" in text
            assert "tp" in text
        elif kind == "permuted ranks":
            assert name == TopologyMismatchError.__name__
            assert "0, 2" in text or "[0, 2" in text, text
        else:
            assert "Replicate" in text
            assert "Shard" in text


def _many_differences(rank: int, folder: str) -> str:
    store = open_store(folder)
    saved = {"a": nn.Linear(2, 2), "gone": torch.ones(1), "n": {"x": torch.ones(3)}}
    store.save(saved, step=1).wait(20)
    live = {"a": nn.Linear(2, 3).double(), "new": torch.ones(1), "n": {"x": torch.ones(4)}}
    with pytest.raises(StateMismatchError) as caught:
        store.restore(live)
    assert set(caught.value.missing) == {"new"}
    assert set(caught.value.unexpected) == {"gone"}
    store.close()
    return str(caught.value)


def test_all_differences_are_in_one_message(folder: str) -> None:
    for text in run_ranks(2, _many_differences, folder):
        for named in ("a.weight", "a.bias", "n.x", "gone", "new", "float64", "(3,)", "(4,)"):
            assert named in text, f"{named} is not in: {text}"
