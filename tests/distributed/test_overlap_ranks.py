"""Late copies of FSDP2 states over real gloo ranks: training goes on over them, bit for bit."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from shardstore import SnapshotStore
from shardstore.tiers.fileops import use_ops
from tests.faults.breaking_ops import WatchedOps, hold_at
from tests.ranks import run_ranks

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
needs_torch_28 = pytest.mark.skipif(
    TORCH < (2, 8), reason="FSDP2 has no CPU forward before torch 2.8"
)


def _make(offloads: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    policy: Any = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offloads else {}
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, **policy)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def _backward(state: dict[str, Any], step: int, rank: int) -> None:
    torch.manual_seed(10 * step + rank)
    state["optimizer"].zero_grad()
    state["model"](torch.randn(4, 6)).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(state["model"].parameters(), 0.5)


def _values(state: dict[str, Any]) -> list[torch.Tensor]:
    moments = [t for entry in state["optimizer"].state.values() for t in entry.values()]
    found = [*state["model"].parameters(), *moments]
    return [getattr(t, "_local_tensor", t).detach().clone() for t in found]


def _train_over_a_late_copy(rank: int, folder: str, offloads: bool) -> list[bool]:
    reached, go = threading.Event(), threading.Event()
    ops = WatchedOps(hold_at("point:late copy", reached, go))
    with use_ops(ops):
        store = SnapshotStore(
            Path(folder) / "root", memory="16MiB", memory_dir=folder, timeout_s=30.0
        )
    state = _make(offloads)
    for step in (1, 2):
        _backward(state, step, rank)
        state["optimizer"].step()
    before = _values(state)
    ops.arm()
    snapshot = store.save(state, step=2, overlap=True)
    reached.wait(20)
    was_late = not snapshot.staged.done()
    _backward(state, 3, rank)  # gathers, reshards and clips, on both ranks, while the copy waits
    untouched = all(torch.equal(a, b) for a, b in zip(_values(state), before, strict=True))
    go.set()
    state["optimizer"].step()
    after = _values(state)
    moved = not any(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    store.restore(state)
    restored = all(torch.equal(a, b) for a, b in zip(_values(state), before, strict=True))
    _backward(state, 3, rank)
    state["optimizer"].step()
    again = all(torch.equal(a, b) for a, b in zip(_values(state), after, strict=True))
    store.close()
    return [was_late, untouched, moved, restored, again]


@needs_torch_28
@pytest.mark.parametrize("offloads", [False, True])
def test_fsdp_trains_over_a_late_copy_and_comes_back_bit_exact(folder: str, offloads: bool) -> None:
    for found in run_ranks(2, _train_over_a_late_copy, folder, offloads):
        assert found == [True] * 5


def _one_rank_fails(rank: int, folder: str) -> tuple[list[str], list[int]]:
    def act(name: str, _at: int) -> None:
        if rank == 1 and name.startswith("point:late copied"):
            raise OSError("rank 1 has had enough")

    ops = WatchedOps(act)
    with use_ops(ops):
        store = SnapshotStore(
            Path(folder) / "root", memory="16MiB", memory_dir=folder, timeout_s=30.0
        )
    state = _make(offloads=False)
    store.save(state, step=1).wait(30)
    ops.arm()
    snapshot = store.save(state, step=2, overlap=True)
    _backward(state, 1, rank)
    state["optimizer"].step()
    error = snapshot.committed.exception(30)
    ops.disarm()
    raised = ""
    try:
        store.drain(30)
    except Exception as seen:  # noqa: BLE001 - compared below
        raised = type(seen).__name__
    steps = [info.step for info in store.snapshots()]
    store.close()
    return [str(error), raised], steps


@needs_torch_28
def test_a_late_copy_that_fails_on_one_rank_fails_the_save_on_all(folder: str) -> None:
    for (error, raised), steps in run_ranks(2, _one_rank_fails, folder):
        assert "rank 1 has had enough" in error
        assert raised == "SaveFailedError"
        assert steps == [1]
