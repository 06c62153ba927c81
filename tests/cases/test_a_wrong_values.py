"""Real bug reports of the kind "wrong values restored with no error" (C01 to C12)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.cases.bits import Outcomes, assert_group_works, assert_refused, bits, refusal, soil
from tests.faults.scenario import Job, open_store
from tests.ranks import run_ranks


def _mesh() -> Any:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


def _another_dtype(rank: int, folder: str) -> Any:
    store = open_store(folder)
    store.save({"w": torch.tensor([1.2345678])}, step=1).wait(20)
    live = {"w": torch.full((1,), -1.0, dtype=torch.bfloat16)}
    found = refusal(lambda: store.restore(live), live)
    assert_group_works()
    store.close()
    assert live["w"].item() == -1
    return found


def _ranks_differ(rank: int, folder: str) -> dict[str, Any]:
    state: dict[str, Any] = {
        "t": torch.tensor([0.0, 1.0]) + 2 * rank,
        "experts": {"0": {"w": torch.full((2, 2), 10.0 + rank)}},
        "shared": distribute_tensor(torch.arange(6.0), _mesh(), [Shard(0)]),
    }
    store = open_store(folder)
    saved = bits(state)
    store.save(state, step=1).wait(20)
    store.close()
    soil(state)
    store = open_store(folder)
    store.restore(state)
    store.close()
    keys: list[str] = []
    for shard in sorted(Path(folder, "root").glob("step-*/rank-*.safetensors")):
        keys += [key for key in _offsets(shard) if key.startswith("experts")]
    return {"equal": bits(state) == saved, "t": state["t"].tolist(), "keys": keys,
            "w": state["experts"]["0"]["w"].unique().tolist()}  # fmt: skip


def _offsets(shard: Path) -> dict[str, tuple[int, int]]:
    """Where each tensor's bytes are, as any safetensors reader sees it."""
    data = shard.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__")
    return {key: tuple(entry["data_offsets"]) for key, entry in header.items()}


def _wrong_global_shape(rank: int, folder: str) -> Any:
    uneven = DTensor.from_local(torch.ones(3 - rank), _mesh(), [Shard(0)], run_check=False)
    store = open_store(folder)
    found = refusal(lambda: store.save({"uneven": uneven}, step=1).wait(20))
    refusal(store.drain)
    assert store.snapshots() == []
    assert_group_works()
    store.close()
    return found


def _everything_is_filled(rank: int, folder: str) -> tuple[int, int, bool]:
    job = Job(rank)
    job.fill(4)
    saved = bits(job.state)
    store = open_store(folder)
    store.save(job.state, step=4).wait(20)
    soil(job.state)
    soiled = bits(job.state)
    report = store.restore(job.state)
    store.close()
    now = bits(job.state)
    assert now == saved
    untouched = [n for n, f in now.items() if f.data and f == soiled[n]]
    manifest = json.loads(next(Path(folder, "root").glob("step-*/manifest.json")).read_text())
    table = manifest["tables"][manifest["shards"][rank]["table"]]
    return report.num_tensors, len(table), not untouched


@pytest.fixture(scope="module")
def outcomes(shared_folder: str) -> Outcomes:
    return Outcomes(
        2, shared_folder, _another_dtype, _ranks_differ, _wrong_global_shape, _everything_is_filled
    )


def test_a_stored_dtype_is_never_cast(outcomes: Outcomes) -> None:
    """C01."""
    assert_refused(outcomes.of(_another_dtype), "w", "float32", "bfloat16")


def test_plain_tensors_that_differ_by_rank_come_back_to_their_rank(outcomes: Outcomes) -> None:
    """C03, C04."""
    for rank, found in enumerate(outcomes.of(_ranks_differ)):
        assert found["equal"]
        assert found["t"] == [2.0 * rank, 2.0 * rank + 1]
        assert found["w"] == [10.0 + rank]
        assert len(set(found["keys"])) == 2, "the ranks' experts must have names of their own"


def _replicas(rank: int, folder: str) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = {"w": distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Shard(0)])}
    store = open_store(folder)
    store.save(state, step=1).wait(20)
    soil(state)
    store.restore(state)
    store.close()
    values: list[float] = state["w"].to_local().tolist()
    return values


def test_replicas_are_not_taken_for_shards_nor_shards_for_replicas(folder: str) -> None:
    """C05."""
    assert run_ranks(4, _replicas, folder) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
    shards = sorted(Path(folder, "root").glob("step-*/rank-*.safetensors"))
    stored = sum(stop - start for s in shards for start, stop in _offsets(s).values())
    assert stored >= 8 * 4


def test_ranks_that_disagree_on_a_global_shape_are_refused(outcomes: Outcomes) -> None:
    """C06."""
    assert_refused(outcomes.of(_wrong_global_shape), "uneven", "6", "4")


def test_no_tensor_keeps_its_sentinel(outcomes: Outcomes) -> None:
    """C11."""
    for filled, stored, all_touched in outcomes.of(_everything_is_filled):
        assert filled == stored
        assert all_touched


class _Training:
    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Embedding(5, 4)
        fully_shard(self.model, mesh=_mesh())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            out = self.model(torch.tensor([step % 5, 4]))
            loss = (out - torch.arange(4.0)).square().sum()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses


def _six_steps(rank: int, folder: str) -> list[float]:
    job = _Training()
    job.train(range(3))
    store = open_store(folder)
    store.save(job.state, step=3).wait(20)
    losses = job.train(range(3, 6))
    store.close()
    return losses


def _three_more(rank: int, folder: str) -> list[float]:
    job = _Training()
    store = open_store(folder)
    soil({"model": job.model})
    store.restore(job.state)
    store.close()
    return job.train(range(3, 6))


def test_a_vocabulary_that_does_not_divide_trains_on_bit_for_bit(folder: str) -> None:
    """C07."""
    uninterrupted = run_ranks(2, _six_steps, folder)
    assert run_ranks(2, _three_more, folder) == uninterrupted
    (shard,) = Path(folder, "root").glob("step-*/rank-00001.safetensors")
    start, stop = _offsets(shard)["model.weight"]
    assert stop - start == 32


def test_a_save_after_a_restore_stores_the_live_values(folder: str) -> None:
    """C08."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with torch.no_grad():
        model.weight.fill_(1)
    model(torch.ones(1)).backward()
    store = open_store(folder)
    store.save(state, step=1).wait()
    optimizer.step()
    before = model.weight
    store.restore(state)
    assert model.weight is before
    assert model.weight.item() == 1
    optimizer.step()
    assert list(optimizer.state) == [before]
    with torch.no_grad():
        model.weight.fill_(2)
    store.save(state, step=2).wait()
    store.close()
    fresh = nn.Linear(1, 1, bias=False)
    with open_store(folder) as store:
        store.restore({"model": fresh}, partial=True)
    assert fresh.weight.item() == 2


def test_missing_and_unexpected_names_are_refused_unless_asked_for(folder: str) -> None:
    """C10."""
    store = open_store(folder)
    store.save({"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}, step=1).wait()
    fewer = {"a": torch.full((1,), -1.0)}
    assert_refused([refusal(lambda: store.restore(fewer), fewer)], "b")
    more = {name: torch.full((1,), -1.0) for name in "abc"}
    assert_refused([refusal(lambda: store.restore(more), more)], "c")
    other = {name: torch.full((1,), -1.0) for name in "ac"}
    report = store.restore(other, strict=False)
    assert (report.missing, report.unexpected) == (("c",), ("b",))
    assert (other["a"].item(), other["c"].item()) == (1, -1)
    assert store.restore(fewer, partial=True).unexpected == ("b",)
    store.close()


def test_plain_values_are_updated_with_their_exact_types(folder: str) -> None:
    """C12."""
    saved = {"epoch": 7, "lr": 1e-3, "name": "ü", "flag": True, "none": None}
    live: dict[str, Any] = {"epoch": 0, "lr": 0.0, "name": "", "flag": False, "none": 1}
    store = open_store(folder)
    store.save({"progress": dict(saved), **saved}, step=1).wait()
    state: dict[str, Any] = {"progress": dict(live), **live}
    store.restore(state)
    store.close()
    for found in (state["progress"], {k: v for k, v in state.items() if k != "progress"}):
        assert found == saved
        assert [type(v) for v in found.values()] == [type(v) for v in saved.values()]
