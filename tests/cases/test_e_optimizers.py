"""Real bug reports on optimizer state (C44 to C52)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.cases.bits import Outcomes, bits, soil
from tests.faults.scenario import open_store


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(5, 3)
        self.idle = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *, both: bool = False) -> torch.Tensor:
        out: torch.Tensor = self.used(x)
        return self.idle(out) if both else out


class _Job:
    """A model, sharded where there are ranks, with a part that gets no gradient at first."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = _Model()
        if torch.distributed.is_initialized():
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            for part in (self.model.used, self.model.idle, self.model):
                fully_shard(part, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **{"lr": 0.1, **options})
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self, *, both: bool = False) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model(torch.linspace(-1, 1, 10).view(2, 5), both=both).square().sum().backward()
        self.optimizer.step()


def _restored_into_a_fresh_one(rank: int, folder: str) -> dict[str, Any]:
    job = _Job()
    for _ in range(3):
        job.step()
    store = open_store(folder)
    store.save(job.state, step=3).wait(20)
    store.close()
    saved = bits(job.state)
    fresh = _Job()
    soil(fresh.state)
    store = open_store(folder, memory=0)
    store.restore(fresh.state)
    store.close()
    found: dict[str, Any] = {"equal": bits(fresh.state) == saved}
    idle = list(fresh.model.idle.parameters())
    used = list(fresh.model.used.parameters())
    found["idle has state"] = [p in fresh.optimizer.state for p in idle]
    found["steps"] = [fresh.optimizer.state[p]["step"].item() for p in used]
    job.step()
    fresh.step()
    found["next step"] = bits(fresh.state) == bits(job.state)
    fresh.step(both=True)
    found["idle steps"] = [fresh.optimizer.state[p]["step"].item() for p in idle]
    return found


def _ranks_own_different_parameters(rank: int, folder: str) -> tuple[bool, int]:
    def build() -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        weights = [nn.Parameter(torch.full((i + 1,), float(rank))) for i in range(2 + rank)]
        optimizer = torch.optim.AdamW(weights, lr=0.1)
        return optimizer, {"weights": weights, "optimizer": optimizer}

    optimizer, state = build()
    for parameter in state["weights"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = bits(state)
    store = open_store(folder)
    store.save(state, step=1).wait(20)
    optimizer, state = build()
    soil(state)
    store.restore(state)
    store.close()
    return bits(state) == saved, len(optimizer.state)


@pytest.fixture(scope="module")
def outcomes(shared_folder: str) -> Outcomes:
    cases = (_restored_into_a_fresh_one, _ranks_own_different_parameters)
    return Outcomes(2, shared_folder, *cases)


def test_parameters_without_a_gradient_have_no_state_after_a_restore(outcomes: Outcomes) -> None:
    """C44."""
    for found in outcomes.of(_restored_into_a_fresh_one):
        assert found["idle has state"] == [False, False]
        assert found["equal"]
        assert found["idle steps"] == [1, 1]


def test_a_fresh_optimizer_gets_its_moments_and_goes_on_bit_for_bit(outcomes: Outcomes) -> None:
    """C45."""
    for found in outcomes.of(_restored_into_a_fresh_one):
        assert found["steps"] == [3, 3]
        assert found["equal"]
        assert found["next step"]


def test_ranks_that_own_different_numbers_of_parameters_get_their_own(outcomes: Outcomes) -> None:
    """C51."""
    assert outcomes.of(_ranks_own_different_parameters) == [(True, 2), (True, 3)]


def test_extra_keys_of_a_group_are_kept(folder: str) -> None:
    """C47."""
    job = _Job()
    scheduler = torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda epoch: 0.9**epoch)
    for _ in range(5):
        job.step()
        scheduler.step()
    job.optimizer.param_groups[0]["mine"] = {"note": "kept", "at": (1, 2.5)}
    expected = {k: v for k, v in job.optimizer.param_groups[0].items() if k != "params"}
    store = open_store(folder)
    store.save(job.state, step=5).wait()
    fresh = _Job()
    assert "initial_lr" not in fresh.optimizer.param_groups[0]
    store.restore(fresh.state)
    store.close()
    found = {k: v for k, v in fresh.optimizer.param_groups[0].items() if k != "params"}
    assert found == expected
    assert found["initial_lr"] == 0.1
    again = torch.optim.lr_scheduler.LambdaLR(fresh.optimizer, lambda e: 0.9**e, last_epoch=5)
    assert again.base_lrs == [0.1]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_every_option_of_a_group_comes_from_the_snapshot(folder: str, as_tensor: bool) -> None:
    """C48."""

    def rate(value: float) -> Any:
        return torch.tensor(value, dtype=torch.float64) if as_tensor else value

    job = _Job(lr=rate(0.05), weight_decay=0.2, foreach=False)
    job.step()
    store = open_store(folder)
    store.save(job.state, step=1).wait()
    fresh = _Job(lr=rate(0.1), weight_decay=0.0, foreach=False)
    lr = fresh.optimizer.param_groups[0]["lr"]
    store.restore(fresh.state)
    store.close()
    group = fresh.optimizer.param_groups[0]
    assert group["weight_decay"] == 0.2
    assert float(group["lr"]) == 0.05
    if as_tensor:
        assert group["lr"] is lr
        assert group["lr"].dtype == torch.float64
    else:
        assert type(group["lr"]) is float


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=["fused", "foreach"])
def test_steps_are_tensors_where_the_optimizer_wants_them(
    folder: str, options: dict[str, Any]
) -> None:
    """C49. (On CPU; an accelerator is needed for the rest.)"""
    job = _Job(**options)
    for _ in range(3):
        job.step(both=True)
    store = open_store(folder)
    store.save(job.state, step=3).wait()
    fresh = _Job(**options)
    store.restore(fresh.state)
    store.close()
    for entry in fresh.optimizer.state.values():
        step = entry["step"]
        assert (step.shape, step.dtype, step.device.type) == ((), torch.float32, "cpu")
        assert step.item() == 3
    job.step(both=True)
    fresh.step(both=True)
    assert bits(fresh.state) == bits(job.state)


@pytest.mark.parametrize("optimizer", ["fresh", "stepped"])
def test_a_snapshot_from_before_the_first_step_breaks_nothing(folder: str, optimizer: str) -> None:
    """C50."""
    job = _Job()
    saved = bits(job.state)
    store = open_store(folder)
    store.save(job.state, step=0).wait()
    live = _Job()
    if optimizer == "stepped":
        live.step(both=True)
    soil({"model": live.model})
    store.restore(live.state)
    store.close()
    assert len(live.optimizer.state) == 0
    assert bits(live.state) == saved
    live.step(both=True)
    assert [entry["step"].item() for entry in live.optimizer.state.values()] == [1, 1, 1, 1]


def test_state_of_some_parameters_alone_is_restored_as_it_was(folder: str) -> None:
    """C52."""
    job = _Job()
    job.step(both=True)
    del job.optimizer.state[job.model.used.weight]
    saved = bits(job.state)
    store = open_store(folder)
    store.save(job.state, step=1).wait()
    fresh = _Job()
    fresh.step(both=True)
    store.restore(fresh.state)
    store.close()
    assert bits(fresh.state) == saved
    assert fresh.model.used.weight not in fresh.optimizer.state
    assert len(fresh.optimizer.state) == 3
