"""Replicas stored once on meshes of more axes, with odd shards, and under what trainers do with a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardstore import SnapshotStore, list_snapshots
from tests.cases.bits import Outcomes, assert_refused, bits, local_of, refusal, soil, tensors_of
from tests.cli.conftest import run_json
from tests.faults.scenario import open_store

NUM_RANKS = 4


def _fresh(folder: str, **options: Any) -> SnapshotStore:
    return open_store(folder, **{"replicas": "once", "name": "fresh", "memory": 0, **options})


def _equal_after_restore(folder: str, state: dict[str, Any], **options: Any) -> bool:
    saved = bits(state)
    soil(state)
    with _fresh(folder, **options) as store:
        store.restore(state)
    return bits(state) == saved


def _stored(folder: str, step: int) -> int:
    """Bytes of tensors on the root."""
    total = 0
    for path in Path(folder, "root").glob(f"step-{step:012d}*/rank-*"):
        data = path.read_bytes()
        total += len(data) - 8 - int.from_bytes(data[:8], "little")
    return total


def _on_rank_0(act: Any) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        act()
    dist.barrier()


def _placed(mesh: Any, placements: list[Any], *shape: int, seed: int = 0) -> DTensor:
    generator = torch.Generator().manual_seed(seed)
    return distribute_tensor(torch.randn(*shape, generator=generator), mesh, placements)


def _meshes(rank: int, folder: str) -> dict[str, Any]:
    """TP with HSDP, three axes, sub-meshes, uneven and empty shards, ties, all in one state."""
    flat = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    deep = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("rep", "shard", "tp"))
    wide = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "rep", "shard"))
    pipeline = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    mixed = DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("rep", "shard"))
    tied = nn.Parameter(_placed(flat, [Replicate(), Shard(0)], 6, 5, seed=1))
    state: dict[str, Any] = {
        "column": _placed(flat, [Replicate(), Shard(1)], 5, 7, seed=2),
        "row": _placed(flat, [Shard(0), Replicate()], 7, 3, seed=3),
        "uneven": _placed(flat, [Replicate(), Shard(0)], 3, 4, seed=4),
        "one row": _placed(flat, [Replicate(), Shard(0)], 1, 9, seed=5),
        "both": _placed(flat, [Shard(0), Shard(0)], 5, 3, seed=6),
        "norm": _placed(flat, [Replicate(), Replicate()], 11, seed=7),
        "scalar": distribute_tensor(torch.tensor(3.5), flat, [Replicate(), Replicate()]),
        "deep": _placed(deep, [Replicate(), Shard(0), Shard(1)], 5, 6, seed=8),
        "wide": _placed(wide, [Shard(0), Replicate(), Shard(0)], 9, 2, seed=9),
        "sub tp": _placed(flat["tp"], [Shard(0)], 6, 2, seed=10),
        "sub dp": _placed(flat["dp"], [Replicate()], 4, 2, seed=11),
        "half": _placed(flat, [Replicate(), Shard(0)], 6, 5, seed=12).to(torch.bfloat16),
        "permuted": _placed(mixed, [Replicate(), Shard(0)], 5, 2, seed=13),
        f"stage {rank // 2}": {
            str(i): _placed(pipeline["dp"], [Replicate()], 3 + rank // 2, seed=20 + i)
            for i in range(2 + rank // 2)
        },
        "empty": _placed(flat, [Replicate(), Shard(0)], 0, 5),
        "tied": {"a": tied, "b": tied},
        "mine": torch.full((3,), float(rank)),
        "model": nn.Linear(3, 3),
    }
    with open_store(folder, replicas="once") as store:
        store.save(state, step=1).wait(20)
    result: dict[str, Any] = {
        "equal": [
            _equal_after_restore(folder, state),
            _equal_after_restore(folder, state, memory="64MiB"),
            _equal_after_restore(folder, state, memory="8KiB"),
        ],
        "once": _stored(folder, 1),
    }
    with open_store(folder, name="all") as store:
        store.save(state, step=2).wait(20)
    result["all"] = _stored(folder, 2)
    return result


def _tensor_parallel_hybrid(rank: int, folder: str) -> dict[str, Any]:
    """FSDP2 over (rep, shard) of a model that is tensor parallel as well, with AdamW."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("rep", "shard", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 6), nn.LayerNorm(6))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["rep", "shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)

    def train(step: int) -> float:
        torch.manual_seed(step)
        loss = model(torch.randn(4, 12)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    train(0)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with open_store(folder, replicas="once") as store:
        store.save(state, step=0).wait(20)
    saved = bits(state)
    losses = [train(1), train(2)]
    equal = []
    for memory in (0, "64MiB"):
        with _fresh(folder, memory=memory, name=f"tp-{memory}") as store:
            store.restore(state)
        equal.append(bits(state) == saved)
    again = [train(1), train(2)]
    return {
        "equal": equal, "losses": losses == again, "stored": _stored(folder, 0),
        "near": sum(local_of(t).nbytes for name, t in tensors_of(state) if isinstance(t, DTensor)),
    }  # fmt: skip


def _asked_for_in_part(rank: int, folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard"))

    def state(seed: int) -> dict[str, Any]:
        layers = {
            str(i): _placed(mesh, [Replicate(), Shard(0)], 8, 8, seed=seed + i) for i in range(6)
        }
        return {"model": layers, "ema": {"x": _placed(mesh, [Replicate(), Replicate()], 5, seed=seed)}, "rank": {"r": rank}}  # fmt: skip

    first, second = state(0), state(100)
    with open_store(folder, replicas="once") as store:
        store.save(first, step=1).wait(20)
        store.save(second, step=2).wait(20)
    found: dict[str, Any] = {}
    for memory in (0, "64MiB"):
        live = state(200)
        with _fresh(folder, memory=memory, name=f"part-{memory}") as store:
            store.restore({"ema": live["ema"]}, step=1, partial=True)
            inner = {k: live["model"][k] for k in ("1", "4")}
            store.restore({"model": inner}, step=1, strict=False)
            extra = {**live, "new": torch.full((2,), 9.0)}
            if memory:
                before = bits(live)
                with store.swapped({"model": live["model"]}, step=2):
                    inside = bits(live["model"]) == bits(second["model"])
                found["swapped"] = inside and bits(live) == before
        wanted = bits({"ema": first["ema"], "model": {k: first["model"][k] for k in ("1", "4")}})
        got = bits({"ema": live["ema"], "model": inner})
        untouched = bits(live["model"]["0"]) == bits(state(200)["model"]["0"])
        with _fresh(folder, memory=memory, name=f"loose-{memory}") as store:
            report = store.restore(extra, step=2, strict=False)
        found[str(memory)] = [
            wanted == got,
            untouched,
            bits(live) == bits(second),
            extra["new"].tolist() == [9.0, 9.0] and list(report.missing) == ["new"],
        ]
    return found


def _damaged_holder(rank: int, folder: str) -> dict[str, Any]:
    """One byte of one holder's file: only some ranks read it, and all go to the older one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard"))
    state: dict[str, Any] = {
        "w": {str(i): _placed(mesh, [Replicate(), Shard(0)], 64, 4, seed=i) for i in range(4)},
        "note": {"rank": rank},
    }
    with open_store(folder, replicas="once") as store:
        store.save(state, step=1).wait(20)
        older = bits(state)
        soil(state)
        store.save(state, step=2).wait(20)
    (path,) = Path(folder, "root").glob("step-000000000002*/rank-00003.safetensors")

    def flip() -> None:
        data = bytearray(path.read_bytes())
        data[-3] ^= 0x10
        path.write_bytes(data)

    _on_rank_0(flip)
    found: dict[str, Any] = {}
    for memory in (0, "64MiB"):
        with torch.no_grad():
            for tensor in state["w"].values():
                local_of(tensor).zero_()
        with _fresh(folder, memory=memory, name=f"damaged-{memory}") as store:
            report = store.restore(state)
            found[str(memory)] = [
                report.step,
                [s.step for s in report.skipped],
                bits(state) == older,
            ]
    with _fresh(folder) as store:
        found["refused"] = refusal(lambda: store.restore(state, step=2), state)
    _on_rank_0(path.unlink)
    with _fresh(folder) as store:
        found["lost"] = refusal(lambda: store.restore(state, step=2), state)
        found["older"] = store.restore(state).step
    return found


def _kept(rank: int, folder: str) -> dict[str, Any]:
    """keep=1, memory-only snapshots that give way, and restores of each while saves go on."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard"))
    state: dict[str, Any] = {"w": _placed(mesh, [Replicate(), Shard(0)], 4000), "at": {"step": 0}}

    def fill(step: int) -> None:
        with torch.no_grad():
            local_of(state["w"]).fill_(float(step))
        state["at"]["step"] = step

    def seen() -> bool:
        return set(local_of(state["w"]).tolist()) == {float(state["at"]["step"])}

    good = []
    with open_store(folder, replicas="once", keep=1, memory="60KiB") as store:
        for step in range(1, 6):
            fill(step)
            store.save(state, step=step)
            fill(-1)
            report = store.restore(state)
            good.append(report.step == step and seen())
        store.drain()
        fill(6)
        store.save(state, step=6, persist=False)
        for step in range(7, 10):
            fill(step)
            store.save(state, step=step)
        store.drain()
        fill(-1)
        store.restore(state, step=6)
        good.append(state["at"]["step"] == 6 and seen())
        store.restore(state)
        good.append(state["at"]["step"] == 9 and seen())
    fill(-1)
    with _fresh(folder) as store:
        good.append(store.restore(state).step == 9 and seen())
    steps = [info.step for info in list_snapshots(Path(folder, "root"))]
    return {"good": good, "steps": steps}


_CASES = (_meshes, _tensor_parallel_hybrid, _asked_for_in_part, _damaged_holder, _kept)


@pytest.fixture(scope="module")
def outcomes(shared_folder: str) -> Outcomes:
    return Outcomes(NUM_RANKS, shared_folder, *_CASES)


def test_meshes_of_several_axes_and_odd_shards_come_back(outcomes: Outcomes) -> None:
    for result in outcomes.of(_meshes):
        assert result["equal"] == [True, True, True]
        assert result["once"] < result["all"]


def test_tensor_parallel_training_on_a_hybrid_mesh_goes_on_bit_for_bit(outcomes: Outcomes) -> None:
    results = outcomes.of(_tensor_parallel_hybrid)
    for result in results:
        assert result["equal"] == [True, True]
        assert result["losses"]
        assert result["stored"] < sum(r["near"] for r in results) * 0.7


def test_parts_of_a_state_are_read_from_whoever_has_them(outcomes: Outcomes) -> None:
    for result in outcomes.of(_asked_for_in_part):
        assert result == {"0": [True] * 4, "64MiB": [True] * 4, "swapped": True}


def test_damage_that_some_ranks_read_makes_all_take_the_older_one(
    outcomes: Outcomes, shared_folder: str
) -> None:
    results = outcomes.of(_damaged_holder)
    for result in results:
        assert result["0"] == [1, [2], True]
        assert result["64MiB"] == [1, [2], True]
        assert result["older"] == 1
    assert_refused([r["refused"] for r in results], "rank-00003.safetensors")
    assert_refused([r["lost"] for r in results], "rank-00003.safetensors")
    root = Path(shared_folder, "damaged_holder", "root")
    document = run_json("verify", root, code=1)
    assert [found["ok"] for found in document["snapshots"]] == [True, False]


def test_retention_and_memory_only_snapshots_go_on_beside_it(outcomes: Outcomes) -> None:
    for result in outcomes.of(_kept):
        assert all(result["good"]), result
        assert 9 in result["steps"]
