"""Containers, names, objects and schedulers: what keeps identity, what is rebound, what differs."""

from __future__ import annotations

import collections
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardstore.errors import StateMismatchError
from shardstore.state.rng import RNGState
from tests.roundtrip import Saved, match, restore, save


class _Holder:
    def __init__(self, tree: object) -> None:
        self.tree = tree
        self.loaded = 0

    def state_dict(self) -> object:
        return self.tree

    def load_state_dict(self, tree: object) -> None:
        self.loaded += 1
        self.tree = tree


def test_dicts_and_lists_keep_identity_and_take_the_saved_contents() -> None:
    saved = save({"p": {"epoch": 7, "xs": [1, {"k": 2}], "sub": {"a": 1}, "gone": "no"}})
    xs: list[object] = []
    sub: dict[str, object] = {"b": 5}
    progress: dict[str, object] = {"sub": sub, "epoch": 0, "xs": xs, "extra": 3}
    state: dict[str, object] = {"p": progress}
    restore(saved, state)
    assert state["p"] is progress
    assert progress["xs"] is xs
    assert progress["sub"] is sub
    assert progress == {"epoch": 7, "xs": [1, {"k": 2}], "sub": {"a": 1}, "gone": "no"}
    assert list(progress) == ["epoch", "xs", "sub", "gone"]


@pytest.mark.parametrize("cls", [collections.OrderedDict, collections.Counter])
def test_ordered_dicts_and_counters_keep_identity_type_and_order(cls: Any) -> None:
    saved = save({"c": cls({"z": 1, "a": 2})})
    live = cls({"a": 9, "q": 1})
    restore(saved, {"c": live})
    assert list(live.items()) == [("z", 1), ("a", 2)]
    assert type(live) is cls


def test_immutable_values_are_rebound_in_a_dict_and_refused_in_a_read_only_state() -> None:
    saved = save({"step": 7, "t": (1, 2), "name": "ü"})
    state: dict[str, object] = {"step": 0, "t": (), "name": None}
    restore(saved, state)
    assert state == {"step": 7, "t": (1, 2), "name": "ü"}
    with pytest.raises(StateMismatchError, match="step: its value is replaced, and the state is"):
        match(saved, types.MappingProxyType({"step": 0, "t": (), "name": None}))
    inner: dict[str, int] = {}
    restore(save({"p": {"a": 1}}), types.MappingProxyType({"p": inner}))
    assert inner == {"a": 1}


def test_what_nested_containers_hold_is_filled_in_place() -> None:
    def make(value: float) -> dict[str, Any]:
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, value)
        holder = _Holder({"v": value})
        return {"all": {"models": [model, {"deep": (holder, torch.full((2,), value))}], "n": value}}

    live = make(-1.0)
    models = live["all"]["models"]
    model, (holder, tensor) = models[0], models[1]["deep"]
    deep = models[1]["deep"]
    restore(save(make(3.0)), live)
    assert live["all"]["models"] is models
    assert models[0] is model
    assert models[1]["deep"] is deep
    assert model.weight.item() == 3
    assert holder.tree == {"v": 3.0}
    assert tensor.tolist() == [3, 3]
    assert live["all"]["n"] == 3.0
    assert holder.loaded == 1


def test_tensor_names_are_strict_where_a_container_holds_tensors() -> None:
    saved = save({"d": {"a": torch.ones(1), "b": torch.ones(1), "n": 1}})
    with pytest.raises(StateMismatchError) as caught:
        match(saved, {"d": {"a": torch.zeros(1), "c": torch.zeros(1)}})
    assert caught.value.missing == ("d.c",)
    assert caught.value.unexpected == ("d.b",)
    live: dict[str, Any] = {"a": torch.zeros(1), "c": torch.full((1,), -1.0), "leaf": 2}
    plan = restore(saved, {"d": live}, strict=False)
    assert plan.missing == ("d.c",)
    assert plan.unexpected == ("d.b",)
    assert set(live) == {"a", "c", "n"}
    assert live["c"].item() == -1
    assert live["a"].item() == 1
    with pytest.raises(StateMismatchError, match=r"d.b: a tensor in the snapshot, a NoneType"):
        match(saved, {"d": {"a": torch.zeros(1), "b": None}})


def test_lists_of_tensors_of_another_length_are_a_difference() -> None:
    saved = save({"xs": [torch.ones(1), torch.ones(1)]})
    with pytest.raises(StateMismatchError) as caught:
        match(saved, {"xs": [torch.ones(1)]})
    assert caught.value.unexpected == ("xs.1@0",) or caught.value.unexpected == ("xs.1",)
    with pytest.raises(StateMismatchError) as caught:
        match(saved, {"xs": [torch.ones(1)] * 3})
    assert caught.value.missing == ("xs.2",)


def test_tensors_are_built_where_the_live_container_holds_none() -> None:
    tensor = torch.arange(3)
    saved = save({"meta": [{"t": tensor, "k": (1, tensor * 2)}], "d": {"x": torch.ones(2)}})
    meta: list[Any] = []
    state: dict[str, Any] = {"meta": meta, "d": {"x": None, "y": 1}}
    restore(saved, state)
    assert state["meta"] is meta
    assert meta[0]["t"].tolist() == [0, 1, 2]
    assert meta[0]["k"][1].tolist() == [0, 2, 4]
    assert state["d"]["x"].tolist() == [1, 1]


def test_top_level_names_are_strict_unless_told_otherwise() -> None:
    saved = save({"a": torch.ones(1), "b": {"x": 1}})
    a = torch.full((1,), -1.0)
    with pytest.raises(StateMismatchError) as caught:
        match(saved, {"a": a})
    assert caught.value.unexpected == ("b",)
    assert "b" in str(caught.value)
    c = torch.full((1,), -1.0)
    with pytest.raises(StateMismatchError) as caught:
        match(saved, {"a": a, "b": {}, "c": c})
    assert caught.value.missing == ("c",)
    with pytest.raises(StateMismatchError) as caught:
        match(saved, {"a": a, "c": c}, partial=True)
    assert caught.value.missing == ("c",)
    assert a.item() == -1
    assert restore(saved, {"a": a}, partial=True).unexpected == ("b",)
    plan = restore(saved, {"a": a, "c": c}, strict=False)
    assert (plan.missing, plan.unexpected) == (("c",), ("b",))
    assert a.item() == 1
    assert c.item() == -1
    only = match(saved, {"b": {}}, partial=True)
    assert only.needed == ()
    assert only.num_tensors == 0


@pytest.mark.parametrize(
    ("live", "text"),
    [
        ({"w": torch.ones(1)}, "x: a module in the snapshot, a dict"),
        (torch.ones(1), r"x: a module in the snapshot, a torch.Tensor \(tensor\)"),
        (None, "x: a module in the snapshot, a NoneType"),
        (_Holder(None), "x: a module in the snapshot"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_another_kind_of_object_is_a_difference(live: object, text: str, strict: bool) -> None:
    saved = save({"x": nn.Linear(1, 1)})
    with pytest.raises(StateMismatchError, match=text):
        match(saved, {"x": live}, strict=strict)


def test_modules_and_objects_are_never_built() -> None:
    saved = save({"d": {"m": nn.Linear(1, 1), "n": 1}})
    with pytest.raises(StateMismatchError) as caught:
        match(saved, {"d": {}})
    assert "d.m" in caught.value.unexpected[0]
    with pytest.raises(StateMismatchError, match=r"d.m: a module in the snapshot, a NoneType"):
        match(saved, {"d": {"m": None}})


def test_all_differences_are_in_one_message_and_long_lists_are_cut() -> None:
    saved = save({"m": {f"t{i}": torch.ones(2) for i in range(50)}, "x": torch.ones(1), "y": 1})
    live = {"m": {f"t{i}": torch.ones(3) for i in range(50)}, "x": torch.ones(1).int(), "z": 1}
    with pytest.raises(StateMismatchError) as caught:
        match(saved, live)
    message = str(caught.value)
    assert len(caught.value.mismatched) == 51
    assert "... and 31 more (51 in all)" in message
    assert len(message.splitlines()) < 32
    assert caught.value.missing == ("z",)
    assert caught.value.unexpected == ("y",)
    assert "53 differences" in message


def test_kept_dicts_take_leaves_of_any_type() -> None:
    saved = save({"p": {"best": 1.5, "curve": [1, 2], "t": (1,)}})
    live: dict[str, Any] = {"best": None, "curve": None, "t": [5]}
    restore(saved, {"p": live})
    assert live == {"best": 1.5, "curve": [1, 2], "t": (1,)}


def test_objects_get_a_rebuilt_tree_and_live_tensors_are_reused() -> None:
    saved = save({"h": _Holder({"a": torch.ones(2), "b": torch.ones(2), "n": [1, (2,)], "k": 3})})
    kept = torch.zeros(2)
    tree: dict[str, Any] = {"a": kept, "b": torch.zeros(3), "n": None}
    holder = _Holder(tree)
    plan = match(saved, {"h": holder})
    assert holder.loaded == 0
    assert kept.tolist() == [0, 0]
    del plan
    restore(saved, {"h": holder})
    assert isinstance(holder.tree, dict)
    assert holder.tree is not tree
    assert holder.tree["a"] is kept
    assert kept.tolist() == [1, 1]
    assert holder.tree["b"].tolist() == [1, 1]
    assert tree["b"].tolist() == [0, 0, 0]
    assert holder.tree["n"] == [1, (2,)]
    assert list(holder.tree) == ["a", "b", "n", "k"]


def test_ties_inside_an_object_are_kept_and_live_ties_do_not_mix_values() -> None:
    tied = torch.ones(2)
    fresh = _Holder(None)
    restore(save({"h": _Holder([tied, tied])}), {"h": fresh})
    assert isinstance(fresh.tree, list)
    assert fresh.tree[0] is fresh.tree[1]
    shared = torch.zeros(2)
    live = _Holder([shared, shared])
    restore(save({"h": _Holder([torch.ones(2), torch.ones(2) * 2])}), {"h": live})
    assert [t.tolist() for t in live.tree] == [[1, 1], [2, 2]]  # type: ignore[attr-defined]


def test_an_error_from_load_state_dict_comes_through() -> None:
    class Refusing(_Holder):
        def load_state_dict(self, tree: object) -> None:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        restore(save({"h": _Holder(1)}), {"h": Refusing(0)})


def _module_states() -> Any:
    return nn.BatchNorm1d(2).state_dict()


def test_a_module_state_dict_keeps_its_versions_for_load_state_dict() -> None:
    live = _Holder(_module_states())
    restore(save({"h": _Holder(_module_states())}), {"h": live})
    assert type(live.tree) is collections.OrderedDict
    assert live.tree._metadata[""]["version"] == 2  # type: ignore[attr-defined]


_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 0.9**s),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=30),
    "multi step": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4, 8]),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.ConstantLR(o, 0.1, 2),
            torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        ],
        [3],
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("name", _SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_schedulers_go_on_exactly(name: str, tensor_lr: bool) -> None:
    def make() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        lr = torch.tensor(0.1) if tensor_lr else 0.1
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        return {"model": model, "scheduler": _SCHEDULERS[name](optimizer), "optimizer": optimizer}

    def run(state: dict[str, Any], n: int) -> list[float]:
        rates = []
        for _ in range(n):
            state["model"](torch.ones(1, 2)).sum().backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            args = (1.0,) if name == "plateau" else ()
            state["scheduler"].step(*args)
            rates.append(float(state["optimizer"].param_groups[0]["lr"]))
        return rates

    state = make()
    run(state, 3)
    saved = save(state)
    wanted = run(state, 6)
    live = make()
    run(live, 1)
    restore(saved, live)
    if name == "multi step":
        assert type(live["scheduler"].milestones) is collections.Counter
    assert run(live, 6) == wanted
    assert torch.equal(live["model"].weight, state["model"].weight)


def test_random_streams_go_on_and_are_loaded_last() -> None:
    class Drawing(_Holder):
        def load_state_dict(self, tree: object) -> None:
            torch.rand(3)
            random.random()
            np.random.rand()

    state = {"rng": RNGState(), "h": Drawing(1)}
    saved = save(state)
    assert "rng.torch@0" in {piece.key for piece in saved.header.pieces}

    def draw() -> tuple[Any, ...]:
        return (
            torch.rand(2).tolist(),
            random.random(),
            random.gauss(0, 1),
            np.random.standard_normal(3).tolist(),
        )

    wanted = draw()
    restore(saved, state)
    assert draw() == wanted
    assert repr(state["rng"]) == "RNGState()"


def test_saving_right_after_a_restore_gives_the_same_snapshot() -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
        return {
            "model": model,
            "optimizer": optimizer,
            "h": _Holder({"a": torch.rand(2), "b": [1]}),
            "p": {"n": seed},
            "rng": RNGState(),
        }

    def parts(saved: Saved) -> Any:
        header = saved.header
        return header.table, header.pieces, header.leaves, bytes(saved.buffer)

    state = make(0)
    state["model"](torch.ones(1, 2)).sum().backward()
    state["optimizer"].step()
    first = save(state)
    live = make(1)
    restore(first, live)
    assert parts(save(live)) == parts(first)


def test_live_values_changed_after_a_restore_are_what_the_next_save_stores() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    saved = save({"model": model})
    restore(saved, {"model": model})
    nn.init.constant_(model.weight, 2.0)
    again = save({"model": model})
    nn.init.zeros_(model.weight)
    restore(again, {"model": model})
    assert model.weight.item() == 2.0


def test_a_state_without_tensors_or_without_anything_comes_back() -> None:
    assert restore(save({}), {}).num_tensors == 0
    live: dict[str, Any] = {"x": None}
    restore(save({"x": {"a": 1}}), live)
    assert live == {"x": {"a": 1}}
