"""save(overlap=True) with parameters on CUDA devices, alone and as FSDP2 over NCCL."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from shardstore import SnapshotStore
from shardstore.tiers.fileops import use_ops
from tests.faults.breaking_ops import WatchedOps, hold_at
from tests.gpu.test_staging import DEVICE, busy
from tests.ranks import run_ranks


def _trained(device: torch.device, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    for _ in range(2):
        model(torch.randn(4, 512, device=device)).square().sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def _values(state: dict[str, Any]) -> list[torch.Tensor]:
    moments = [t for entry in state["optimizer"].state.values() for t in entry.values()]
    found = [*state["model"].state_dict().values(), *moments]
    return [getattr(t, "_local_tensor", t).detach().cpu().clone() for t in found]


def _same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}])
def test_save_does_not_wait_for_the_device_and_steps_wait_for_the_copy(
    folder: str, options: dict[str, bool]
) -> None:
    state = _trained(DEVICE, **options)
    store = SnapshotStore(Path(folder) / "root", memory="64MiB", memory_dir=folder)
    store.warmup(state)
    store.save(state, step=0, overlap=True).wait(60)
    before = _values(state)
    running = state["model"][1].running_mean
    wanted = running.cpu() + 1
    event = busy(1.0)
    running.add_(1)
    snapshot = store.save(state, step=1, overlap=True)
    assert not event.query()  # type: ignore[no-untyped-call]
    running.fill_(9)  # behind the save in the stream
    state["optimizer"].step()
    torch.cuda.synchronize()
    assert not _same(_values(state), before)
    assert snapshot.wait(60) is not None
    store.restore(state)
    assert torch.equal(running.cpu(), wanted)
    assert _same(_values(state)[:2], before[:2])
    store.close()


def test_memory_of_moved_parameters_is_not_given_to_others_before_it_is_copied(
    folder: str,
) -> None:
    reached, go = threading.Event(), threading.Event()
    ops = WatchedOps(hold_at("point:late copy", reached, go))
    with use_ops(ops):
        store = SnapshotStore(Path(folder) / "root", memory="64MiB", memory_dir=folder)
    state = _trained(DEVICE)
    before = _values(state)
    ops.arm()
    store.save(state, step=1, overlap=True)
    assert reached.wait(20)
    for parameter in state["model"].parameters():
        parameter.data = torch.empty_like(parameter)
    others = [torch.full((512, 512), 9.0, device=DEVICE) for _ in range(20)]
    torch.cuda.synchronize()
    go.set()
    store.restore(state)
    assert _same(_values(state), before)
    del others
    store.close()


def test_device_memory_is_let_go_of_after_the_copy(folder: str) -> None:
    store = SnapshotStore(Path(folder) / "root", memory="64MiB", memory_dir=folder)
    state = _trained(DEVICE)
    for step in range(3):
        store.save(state, step=step, overlap=True).wait(60)
    used = torch.cuda.memory_allocated(DEVICE)
    for step in range(3, 8):
        store.save(state, step=step, overlap=True).wait(60)
    assert torch.cuda.memory_allocated(DEVICE) == used
    store.close()


def _train_fsdp(rank: int, folder: str, overlap: bool) -> list[bool]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    world_size = dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder}/nccl",
        rank=rank,
        world_size=world_size,
        device_id=device,
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).to(device)
    mesh = dist.device_mesh.init_device_mesh("cuda", (world_size,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1),
    }

    def train(step: int) -> None:
        torch.manual_seed(10 * step + rank)
        state["optimizer"].zero_grad()
        model(torch.randn(4, 64, device=device)).square().sum().backward()
        state["optimizer"].step()

    store = SnapshotStore(Path(folder) / "root", memory="64MiB", memory_dir=folder)
    for step in range(3):
        train(step)
        store.save(state, step=step, overlap=overlap)
    before = copy.deepcopy(_values(state))
    train(3)
    after = _values(state)
    store.restore(state)
    restored = _same(_values(state), before)
    train(3)
    again = _same(_values(state), after)
    store.close()
    alone = rank == 0 or not torch._C._cuda_hasPrimaryContext(0)  # type: ignore[attr-defined]
    return [restored, again, alone]


@pytest.mark.parametrize("overlap", [False, True])
def test_fsdp_comes_back_bit_exact_and_each_rank_stays_on_its_device(
    folder: str, overlap: bool
) -> None:
    for num_ranks in range(1, min(4, torch.cuda.device_count()) + 1):
        own = Path(folder) / str(num_ranks)
        own.mkdir()
        for found in run_ranks(num_ranks, _train_fsdp, str(own), overlap):
            assert found == [True] * 3
