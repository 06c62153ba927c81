"""Optimizers: read directly, rebuilt without a step, names and positions, everything as saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardstore.errors import StateMismatchError, UnsupportedStateError
from shardstore.state.flatten import flatten_state
from tests.roundtrip import match, raw, restore, save

Make = Callable[[Any], torch.optim.Optimizer]

_OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def _model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    x = torch.arange(12.0).view(4, 3) / (step + 5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: Any = model(x).square().mean()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    loss: Any = optimizer.step(closure)  # type: ignore[arg-type]
    return float(loss.detach())


def _bytes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.shape, raw(value))
    if isinstance(value, dict):
        return {key: _bytes(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [_bytes(item) for item in value]
    return value


@pytest.mark.parametrize("name", _OPTIMIZERS)
@pytest.mark.parametrize("start", [0, 3])
def test_a_fresh_optimizer_goes_on_bit_for_bit(name: str, start: int) -> None:
    model = _model()
    optimizer = _OPTIMIZERS[name](model.parameters())
    for step in range(start):
        _step(model, optimizer, step)
    saved = save({"model": model, "optimizer": optimizer})
    wanted = _bytes(optimizer.state_dict())
    losses = [_step(model, optimizer, step) for step in range(start, start + 3)]
    live = _model(seed=1)
    fresh = _OPTIMIZERS[name](live.parameters())
    restore(saved, {"model": live, "optimizer": fresh})
    assert _bytes(fresh.state_dict()) == wanted
    assert all(a is b for a, b in zip(fresh.state, live.parameters(), strict=False))
    assert [_step(live, fresh, step) for step in range(start, start + 3)] == losses
    assert [raw(p) for p in live.parameters()] == [raw(p) for p in model.parameters()]


def test_existing_state_is_filled_in_place_and_again() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _step(model, optimizer, 0)
    state = {"model": model, "optimizer": optimizer}
    saved = save(state)
    entry = optimizer.state[model[0].weight]
    moment, pointer = entry["exp_avg"], entry["exp_avg"].data_ptr()
    for _ in range(3):
        before = _bytes(optimizer.state_dict())
        _step(model, optimizer, 1)
        assert _bytes(optimizer.state_dict()) != before
        restore(saved, state)
        assert _bytes(optimizer.state_dict()) == before
    assert optimizer.state[model[0].weight] is entry
    assert entry["exp_avg"] is moment
    assert moment.data_ptr() == pointer


def test_parameters_without_state_have_no_entry_and_start_at_step_one() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model[0].weight.requires_grad_(False)
    _step(model, optimizer, 0)
    saved = save({"model": model, "optimizer": optimizer})
    live = _model(1)
    used = torch.optim.AdamW(live.parameters(), lr=0.1)
    _step(live, used, 0)
    assert live[0].weight in used.state
    restore(saved, {"model": live, "optimizer": used})
    assert live[0].weight not in used.state
    assert len(used.state) == 3
    _step(live, used, 1)
    assert used.state[live[0].weight]["step"].item() == 1
    assert used.state[live[2].weight]["step"].item() == 2


def test_moments_of_frozen_parameters_and_keys_that_live_state_has_extra() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _step(model, optimizer, 0)
    model[0].weight.requires_grad_(False)
    saved = save({"model": model, "optimizer": optimizer})
    fresh = torch.optim.AdamW(model.parameters(), lr=0.1)
    fresh.state[model[0].weight] = {"extra": torch.ones(1), "note": "x"}
    restore(saved, {"model": model, "optimizer": fresh})
    assert set(fresh.state[model[0].weight]) == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.equal(
        fresh.state[model[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"]
    )


def test_group_options_come_back_and_live_only_ones_stay() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.2)
    optimizer.param_groups[0]["initial_lr"] = 0.3
    saved = save({"optimizer": optimizer, "model": model})
    fresh = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    fresh.param_groups[0]["mine"] = "kept"
    restore(saved, {"optimizer": fresh, "model": model})
    group = fresh.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["initial_lr"]) == (0.05, 0.2, 0.3)
    assert group["mine"] == "kept"
    assert group["betas"] == (0.9, 0.999)
    assert group["params"][0] is model[0].weight


def test_a_tensor_lr_keeps_its_object_and_takes_the_value() -> None:
    model = _model()
    saved = save({"optimizer": torch.optim.Adam(model.parameters(), lr=torch.tensor(0.05))})
    lr = torch.tensor(0.1)
    fresh = torch.optim.Adam(model.parameters(), lr=lr)
    restore(saved, {"optimizer": fresh})
    assert fresh.param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(0.05)
    plain = torch.optim.Adam(model.parameters(), lr=0.1)
    restore(saved, {"optimizer": plain})
    assert isinstance(plain.param_groups[0]["lr"], torch.Tensor)


def test_one_tensor_shared_by_groups_does_not_mix_values_that_were_separate() -> None:
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def make(first: torch.Tensor, second: torch.Tensor) -> torch.optim.Optimizer:
        groups = [{"params": [a], "lr": first}, {"params": [b], "lr": second}]
        return torch.optim.Adam(groups)

    saved = save({"optimizer": make(torch.tensor(0.1), torch.tensor(0.2))})
    shared = torch.tensor(0.7)
    live = make(shared, shared)
    restore(saved, {"optimizer": live})
    assert [round(float(g["lr"]), 3) for g in live.param_groups] == [0.1, 0.2]


def test_fused_step_stays_a_float32_scalar_and_default_step_sits_on_cpu() -> None:
    model = _model()
    choices: list[dict[str, Any]] = [{"fused": True}, {"foreach": True}, {}]
    for options in choices:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
        for step in range(3):
            _step(model, optimizer, step)
        fresh = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
        restore(save({"optimizer": optimizer}), {"optimizer": fresh})
        step = fresh.state[model[0].weight]["step"]
        assert (step.shape, step.dtype, step.device.type) == ((), torch.float32, "cpu")
        assert step.item() == 3


def test_names_are_relative_full_listed_or_positions() -> None:
    first, second = _model(), _model()
    both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    naming: dict[str, dict[str, Any]] = {
        "relative": {"m": first, "o": torch.optim.SGD(first.parameters(), lr=0.1)},
        "full": {"m": [first, second], "o": both},
        "listed": {"o": torch.optim.SGD(list(first.named_parameters()), lr=0.1)},
        "position": {"o": both},
    }
    for name, state in naming.items():
        node: Any = flatten_state(state, rank=0).leaves
        assert node["o"][1]["naming"] == name
    full: Any = flatten_state(naming["full"], rank=0).leaves
    assert full["o"][1]["groups"][0]["names"][0] == "m.0.0.weight"


def test_parameters_are_found_by_name_whatever_their_order() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(list(model.named_parameters()), lr=0.1)
    _step(model, optimizer, 0)
    saved = save({"model": model, "optimizer": optimizer})
    live = _model(1)
    turned = torch.optim.AdamW(list(reversed(list(live.named_parameters()))), lr=0.1)
    restore(saved, {"model": live, "optimizer": turned})
    for name, parameter in live.named_parameters():
        wanted = optimizer.state[model.get_parameter(name)]
        assert torch.equal(turned.state[parameter]["exp_avg"], wanted["exp_avg"])
    if "param_names" in turned.param_groups[0]:
        assert turned.param_groups[0]["param_names"][-1] == "0.weight"


def test_an_optimizer_alone_is_matched_by_position() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _step(model, optimizer, 0)
    saved = save({"model": model, "optimizer": optimizer})
    fresh = torch.optim.AdamW(model.parameters(), lr=0.1)
    restore(saved, {"optimizer": fresh}, partial=True)
    assert _bytes(fresh.state_dict()) == _bytes(optimizer.state_dict())


@pytest.mark.parametrize("named", [True, False])
def test_other_groups_or_parameters_are_listed(named: bool) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _step(model, optimizer, 0)
    extra = {"model": model} if named else {}
    saved = save({**extra, "o": optimizer})
    two = torch.optim.SGD(
        [{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1
    )
    with pytest.raises(StateMismatchError, match="o: 1 param groups saved, 2 live"):
        match(saved, {**extra, "o": two})
    fewer = torch.optim.SGD([model[0].weight], lr=0.1)
    text = "snapshot only: 0.bias, 2.weight" if named else "4 parameters saved, 1 live"
    with pytest.raises(StateMismatchError, match=text):
        match(saved, {**extra, "o": fewer}, strict=False)
    if not named:
        other = torch.optim.SGD(reversed(list(model.parameters())), lr=0.1)
        with pytest.raises(StateMismatchError, match=r"parameter 0: shape \(4, 3\) saved, \(2,\)"):
            match(saved, {"o": other})
    assert not fewer.state


def test_live_moments_of_another_dtype_are_a_difference() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _step(model, optimizer, 0)
    saved = save({"model": model, "o": optimizer})
    entry = optimizer.state[model[0].weight]
    entry["momentum_buffer"] = entry["momentum_buffer"].double()
    with pytest.raises(
        StateMismatchError, match=r"o.state.0.weight.momentum_buffer: dtype float32 saved"
    ):
        match(saved, {"model": model, "o": optimizer})


def test_matching_leaves_a_live_optimizer_as_it_is() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _step(model, optimizer, 0)
    saved = save({"model": model, "o": optimizer})
    fresh = torch.optim.AdamW(model.parameters(), lr=0.7)
    plan = match(saved, {"model": model, "o": fresh})
    plan.prepare({i: torch.zeros(saved.header.pieces[i].sizes) for i in plan.needed})
    assert not fresh.state
    assert fresh.param_groups[0]["lr"] == 0.7


def test_state_under_other_keys_than_parameters_is_refused() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["global"] = {"n": 1}  # type: ignore[index]
    with pytest.raises(UnsupportedStateError, match=r"o.state.global"):
        flatten_state({"o": optimizer}, rank=0)
    optimizer.state.clear()
    optimizer.state[torch.ones(1)] = {"n": 1}
    with pytest.raises(UnsupportedStateError, match="in no group"):
        flatten_state({"o": optimizer}, rank=0)
    optimizer.state.clear()
    optimizer.state[model[0].weight] = {"f": print}
    with pytest.raises(UnsupportedStateError, match=r"o.state.0.f"):
        flatten_state({"o": optimizer}, rank=0)


class _Wrapped(torch.optim.SGD):
    """Keeps its state elsewhere, as Accelerate's and torchtitan's wrappers do."""

    def state_dict(self) -> dict[str, Any]:
        return {"mine": self.param_groups[0]["lr"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.param_groups[0]["lr"] = state_dict["mine"]


def test_optimizers_with_their_own_state_dict_are_asked_for_it() -> None:
    model = _model()
    saved = save({"o": _Wrapped(model.parameters(), lr=0.3)})
    live = _Wrapped(model.parameters(), lr=0.1)
    restore(saved, {"o": live})
    assert live.param_groups[0]["lr"] == 0.3
    with pytest.raises(StateMismatchError, match="o: an object with state_dict in the snapshot"):
        match(saved, {"o": torch.optim.SGD(model.parameters(), lr=0.1)})
