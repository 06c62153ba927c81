"""An unchanged structure is described once; whatever changes is described anew."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardstore.state.flatten import FlatState, flatten_state
from shardstore.state.recorder import Memory


def _state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "tensor": torch.ones(2, 3),
        "blob": bytes(5000),
        "numbers": {"a": 1, "b": [2.5, None]},
    }


def _equal(one: FlatState, other: FlatState) -> bool:
    return (
        (one.table, one.pieces, one.meshes, one.coordinates, one.leaves)
        == (other.table, other.pieces, other.meshes, other.coordinates, other.leaves)
        and all(
            a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
            for row, a, b in zip(one.table, one.tensors, other.tensors, strict=True)
            if row.path[0] != "blob"
        )
    )  # fmt: skip


def test_an_unchanged_structure_gives_the_same_description_whatever_the_values() -> None:
    state, memory = _state(), Memory()
    first = flatten_state(state, rank=0, memory=memory)
    state["model"][0].weight.data.fill_(7)
    state["numbers"]["a"] = 8
    state["blob"] = bytes(range(250)) * 20
    again = flatten_state(state, rank=0, memory=memory)
    assert again.table is first.table
    assert again.pieces is first.pieces
    assert _equal(again, flatten_state(state, rank=0))
    assert again.leaves != first.leaves


def _moved(state: dict[str, Any]) -> None:
    state["model"][0].weight.data = state["model"][0].weight.data.clone()


def _halved(state: dict[str, Any]) -> None:
    state["model"].half()


def _transposed(state: dict[str, Any]) -> None:
    state["tensor"].t_()


def _replaced(state: dict[str, Any]) -> None:
    state["tensor"] = state["tensor"].view_as(state["tensor"])


def _retied(state: dict[str, Any]) -> None:
    state["optimizer"].state[state["model"][0].weight]["exp_avg"] = state["optimizer"].state[
        state["model"][0].weight
    ]["exp_avg_sq"]


def _renamed(state: dict[str, Any]) -> None:
    state["other"] = state.pop("tensor")


def _grown(state: dict[str, Any]) -> None:
    state["model"].register_buffer("more", torch.ones(1))


def _longer(state: dict[str, Any]) -> None:
    state["blob"] = bytes(6000)


def _emptied(state: dict[str, Any]) -> None:
    state["optimizer"].state.clear()


@pytest.mark.parametrize(
    "change",
    [_moved, _halved, _transposed, _replaced, _retied, _renamed, _grown, _longer, _emptied],
)
def test_any_change_is_noticed(change: Callable[[dict[str, Any]], None]) -> None:
    state, memory = _state(), Memory()
    first = flatten_state(state, rank=0, memory=memory)
    change(state)
    again = flatten_state(state, rank=0, memory=memory)
    assert again.table is not first.table
    assert _equal(again, flatten_state(state, rank=0))
    assert flatten_state(state, rank=0, memory=memory).table is again.table


def test_another_object_at_the_same_memory_is_another_structure() -> None:
    """Ties are found by identity as well: two names of one object, or two views of one memory."""
    tensor = torch.ones(6)
    memory = Memory()
    first = flatten_state({"a": tensor, "b": tensor}, rank=0, memory=memory)
    again = flatten_state({"a": tensor, "b": tensor.view(6)}, rank=0, memory=memory)
    assert again.table is not first.table
    assert again.table[1].alias_of == 0


def test_a_refused_state_is_forgotten() -> None:
    state, memory = _state(), Memory()
    flatten_state(state, rank=0, memory=memory)
    state["bad"] = torch.ones(2, 2).to_sparse()
    for _ in range(2):
        with pytest.raises(TypeError, match="sparse"):
            flatten_state(state, rank=0, memory=memory)
    del state["bad"]
    assert _equal(flatten_state(state, rank=0, memory=memory), flatten_state(state, rank=0))


def test_remembering_keeps_nothing_alive() -> None:
    state, memory = _state(), Memory()
    flatten_state(state, rank=0, memory=memory)
    watched = [weakref.ref(p) for p in state["model"].parameters()]
    watched.append(weakref.ref(state["tensor"]))
    del state
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)
    flatten_state(_state(), rank=0, memory=memory)
