"""A small sharded training state whose every element says which step it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardstore import RNGState, SnapshotStore


class Counter:
    """A Stateful with a rank-private position and a tensor whose length depends on the rank."""

    def __init__(self, rank: int) -> None:
        self.position = 0
        self.buffer = torch.zeros(3 + rank)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.buffer = state["buffer"]


class Job:
    """Model, optimizer and counters of one rank, filled with a step number."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        if dist.is_initialized() and dist.get_world_size() > 1:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.counter = Counter(rank)
        self.progress: dict[str, Any] = {"step": -1, "history": [0.5]}
        self.fill(-1)

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "counter": self.counter,
            "progress": self.progress,
            "rng": RNGState(),
        }

    def tensors(self) -> list[torch.Tensor]:
        found = [*self.model.parameters(), *self.model.buffers(), self.counter.buffer]
        for entry in self.optimizer.state.values():
            found += [value for value in entry.values() if isinstance(value, torch.Tensor)]
        with torch.no_grad():
            return [t.to_local() if isinstance(t, DTensor) else t.detach() for t in found]

    def fill(self, step: int) -> None:
        """Make every element of this rank `step`."""
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.fill_(step)
        self.counter.position = 1000 * self.rank + step
        self.progress["step"] = step
        torch.manual_seed(1000 * self.rank + step)

    def steps_seen(self) -> set[int]:
        """Steps found in any element: one if the state is whole."""
        seen = {int(value) for t in self.tensors() for value in t.reshape(-1).tolist()}
        seen.add(self.counter.position - 1000 * self.rank)
        seen.add(int(self.progress["step"]))
        expected = torch.Generator().manual_seed(1000 * self.rank + max(seen)).get_state()
        if not torch.equal(torch.get_rng_state(), expected):
            seen.add(-999)
        return seen


def open_store(folder: str, **options: Any) -> SnapshotStore:
    """A store under `folder`, with its memory files there too (on the tmpfs where `folder` is)."""
    memory_dir = Path(folder) / "memory"
    memory_dir.mkdir(exist_ok=True)
    options.setdefault("timeout_s", 20.0)
    options.setdefault("memory", "64MiB")
    root = Path(folder) / options.pop("root", "root")
    return SnapshotStore(root, memory_dir=memory_dir, **options)


def share_pids(rank: int, folder: str) -> list[int]:
    """Process ids of all ranks."""
    (Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))
    dist.barrier()
    return [int((Path(folder) / f"pid-{r}").read_text()) for r in range(dist.get_world_size())]
