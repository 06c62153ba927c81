"""One rank of the training that `preempted_training.py` starts, kills and restarts.

A byte-level GPT learns the source of Python's standard library. What matters is `train`: a plain FSDP2
loop with `restore` before it and `save` inside it. Run it by torchrun; it works by hand as well:

    torchrun --standalone --nproc-per-node 2 examples/preempted_training_worker.py \
        --root /tmp/run --name run --log-dir /tmp/run-logs --steps 60
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import msgspec
import torch
import torch.distributed as dist
from progress_bars import Bars, bars_on
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from shardstore import Progress, RNGState, SnapshotStore

IMPORTED = time.time()
VOCABULARY = 256


class Block(nn.Module):
    """Causal attention and an MLP, both with dropout: the random streams matter."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        heads = (batch, length, self.num_heads, dim // self.num_heads)
        q, k, v = (t.reshape(heads).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(x.shape)))
        y: Tensor = x + self.dropout(self.mlp(self.norm_2(x)))
        return y


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, dim: int, num_layers: int, num_heads: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, dim)
        self.position = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList([Block(dim, num_heads, 0.1) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class TextLoader:
    """This rank's windows of the text, shuffled each epoch by a generator of its own."""

    def __init__(
        self, text: Tensor, *, length: int, batch: int, rank: int, world_size: int
    ) -> None:
        self.windows = text[: len(text) // (length + 1) * (length + 1)].view(-1, length + 1)
        self.windows = self.windows[rank::world_size]
        self.batch = batch
        self.generator = torch.Generator().manual_seed(1000 + rank)
        self.start_epoch()

    def start_epoch(self) -> None:
        self.epoch_start = self.generator.get_state()
        self.order = torch.randperm(len(self.windows), generator=self.generator)
        self.position = 0

    def next(self) -> tuple[Tensor, Tensor]:
        if self.position + self.batch > len(self.order):
            self.start_epoch()
        rows = self.windows[self.order[self.position : self.position + self.batch]].long()
        self.position += self.batch
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Where it stands: the shuffle is drawn again from the generator's state."""
        return {"epoch_start": self.epoch_start, "position": self.position}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.generator.set_state(state_dict["epoch_start"])
        self.start_epoch()
        self.position = state_dict["position"]


def read_standard_library() -> Tensor:
    """The bytes of the standard library's top-level modules: real text on every machine."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def learning_rate(num_steps: int, step: int) -> float:
    """Linear warm-up over 10 steps, then half a cosine."""
    return min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / num_steps))


def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 over this rank's bytes of all tensors, in order."""
    total = hashlib.sha256()
    for tensor in tensors:
        local = tensor.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        total.update(local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def final_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: TextLoader
) -> dict[str, object]:
    """What both runs must end with."""
    states = [optimizer.state[parameter] for parameter in model.parameters()]
    return {
        "parameters": digest(model.parameters()),
        "moments": digest(state[key] for state in states for key in sorted(state)),
        "random states": digest([torch.get_rng_state(), loader.generator.get_state()]),
        "data position": loader.position,
    }


class Log:
    """JSON lines in a file of this rank, each written at once: they outlive SIGKILL."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.lock = threading.Lock()

    def write(self, event: str, **facts: object) -> None:
        with self.lock:  # progress comes from other threads
            self.file.write(json.dumps({"event": event, **facts}) + "\n")


def train(
    args: argparse.Namespace, rank: int, world_size: int, log: Log, bars: Bars | None
) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))

    torch.manual_seed(0)
    model = GPT(dim=128, num_layers=4, num_heads=4, length=args.length)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(args.steps, step)
    )
    loader = TextLoader(
        read_standard_library(),
        length=args.length,
        batch=args.batch,
        rank=rank,
        world_size=world_size,
    )
    torch.manual_seed(1 + rank)  # dropout differs between ranks
    progress = {"bytes_seen": 0}
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
        "rng": RNGState(),
        "progress": progress,
    }

    def train_step() -> Tensor:
        tokens, targets = loader.next()
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress["bytes_seen"] += targets.numel() * world_size
        return loss.detach()

    def show(done: Progress) -> None:
        """Draw it where there is a terminal; the one that started this may draw from the log."""
        log.write("progress", **msgspec.to_builtins(done))
        if bars is not None:
            bars.show(done)

    with ExitStack() as stack:
        store, first = None, 0
        if args.root is not None:
            store = stack.enter_context(
                SnapshotStore(
                    args.root,
                    name=args.name,
                    keep=3,
                    timeout_s=60,
                    progress=show if rank == 0 else None,
                )
            )
            log.write("opened", time=time.time())
            report = store.restore(state, required=False)
            if report is not None:
                first = report.step + 1
                log.write(
                    "restored",
                    step=report.step,
                    tier=report.tier,
                    agree_s=report.agree_s,
                    verify_s=report.verify_s,
                    copy_s=report.copy_s,
                    skipped=[str(skip.step) for skip in report.skipped],
                )
        log.write("ready", time=time.time(), first=first)
        for step in range(first, args.steps):
            started = time.monotonic()
            own = train_step()
            mean = own.clone()
            dist.all_reduce(mean)
            mean /= world_size
            log.write(
                "loss",
                step=step,
                own=float(own).hex(),
                mean=float(mean).hex(),
                seconds=time.monotonic() - started,
            )
            if bars is not None:
                bars.train("train", step, args.steps, mean.item())
            if store is not None and (step + 1) % args.save_every == 0:
                store.save(state, step=step, metadata={"loss": mean.item()})
                log.write("saved", step=step)  # it returned; writing goes on in the background
    log.write("end", **progress, **final_state(model, optimizer, loader))
    dist.destroy_process_group()


def main(args: argparse.Namespace) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with ExitStack() as stack:
        path = Path(args.log_dir, f"rank-{rank}.jsonl")
        log = Log(stack.enter_context(path.open("a", buffering=1)))
        log.write("imported", time=IMPORTED, pid=os.getpid())
        bars = stack.enter_context(bars_on(sys.stderr)) if rank == 0 else None
        train(args, rank, world_size, log, bars)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One rank of the example's training.")
    parser.add_argument("--root", help="folder of the snapshots; left out: none are made")
    parser.add_argument("--name", help="namespace in memory")
    parser.add_argument("--log-dir", required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--length", type=int, default=96, help="bytes per sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_args())
