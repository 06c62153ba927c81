"""A real training job, small enough for a test: FSDP2, AdamW, scheduler, dropout, data position."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardstore import RNGState


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    if isinstance(tensor, DTensor):
        local: torch.Tensor = tensor.to_local()
        return local
    return tensor


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = x + self.dropout(
            self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        )
        return added


class TinyModel(nn.Module):
    """Tied embedding and head over 5 * 3 - 2 tokens: no size divides by the number of ranks."""

    def __init__(self, vocabulary: int = 13, width: int = 7) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.seen: torch.Tensor

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.numel()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Loader:
    """Rank-private stream of tokens with a position."""

    def __init__(self, rank: int, vocabulary: int = 13) -> None:
        self.generator = torch.Generator().manual_seed(77 + rank)
        self.vocabulary = vocabulary
        self.position = 0

    def next(self) -> torch.Tensor:
        self.position += 1
        return torch.randint(self.vocabulary, (4, 6), generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.generator.set_state(state["generator"])


class Training:
    """Everything of one rank; `step` returns the loss, `draws` what the random streams give next."""

    def __init__(self, rank: int, seed: int = 0, mesh: DeviceMesh | None = None) -> None:
        torch.manual_seed(seed)
        self.model = TinyModel()
        if mesh is None:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1.0 / (1 + step)
        )
        self.loader = Loader(rank)
        self.progress: dict[str, Any] = {"epoch": 0, "losses": []}
        torch.manual_seed(100 * seed + rank)
        random.seed(100 * seed + rank)
        np.random.seed(100 * seed + rank)

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
            "rng": RNGState(),
            "progress": self.progress,
        }

    def step(self) -> str:
        tokens = self.loader.next()
        logits = self.model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        value = float(loss.item()).hex()
        self.progress["losses"].append(value)
        self.progress["epoch"] += random.random() + float(np.random.rand())
        return value

    def fingerprint(self) -> list[bytes]:
        """Raw bytes of all that training depends on."""
        found = []
        with torch.no_grad():
            tensors = [*self.model.parameters(), *self.model.buffers()]
            for entry in self.optimizer.state.values():
                tensors += [v for _, v in sorted(entry.items())]
            for tensor in tensors:
                local = local_of(tensor)
                found.append(bytes(local.contiguous().view(-1).view(torch.uint8).tolist()))
        found += [repr(self.scheduler.state_dict()).encode(), repr(self.progress).encode()]
        found.append(repr((self.loader.position, torch.rand(2), random.random())).encode())
        found.append(repr(np.random.rand(2)).encode())
        return found
