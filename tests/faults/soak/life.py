"""One life of a training job of two ranks: restore, train, save, until it ends or is ended.

Everything that happens depends on the plan alone, and every step is written down, so that a run that was
never interrupted can be compared with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import torch
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardstore import RNGState, ShardStoreError, SnapshotStore
from shardstore.tiers.fileops import use_ops
from tests.faults.breaking_ops import WatchedOps
from tests.faults.scenario import share_pids
from tests.roundtrip import raw

GRACE_S: Final = 20.0
TIMEOUT_S: Final = 8.0
"""How long a rank waits for one that is dead."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What happens in one life."""

    seed: int
    num_steps: int
    save_every: int
    memory: int | str
    has_disk: bool
    overlap: bool
    victims: tuple[int, ...] = ()
    """Ranks that are ended by SIGKILL, and take this one's number of operations to live."""
    kill_at: int = 0
    """Operation of the first victim's stores at which that happens."""
    warned: tuple[int, ...] = ()
    """Ranks that get SIGTERM, at this one's operation `warn_at` since they listen for it."""
    warn_at: int = 0
    broken_rank: int = -1
    """Whose operations fail now and then."""
    fault_chance: float = 0.0
    error: int = 0
    on_error: Literal["raise", "warn"] = "warn"
    is_measured: bool = False


class Trainer:
    """A small FSDP2 model; dropout makes it depend on the random stream of each rank."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(11, 24), nn.Dropout(0.2), nn.Linear(24, 5))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.progress = {"step": 0}
        torch.manual_seed(rank + 1)

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "rng": RNGState(),
            "progress": self.progress,
        }

    def train(self) -> str:
        """One step; what it came to, bit for bit."""
        data = torch.randn(8, 11)
        loss = self.model(data).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress["step"] += 1
        return f"{loss.item().hex()} {self._digest()}"

    def _digest(self) -> str:
        hasher = xxhash.xxh3_64()
        with torch.no_grad():
            for parameter in self.model.parameters():
                assert isinstance(parameter, DTensor)
                hasher.update(raw(parameter.to_local()))
        return hasher.hexdigest()


class FateOps(WatchedOps):
    """Ends processes at one operation, and fails others by chance."""

    def __init__(self, plan: Plan, rank: int, pids: list[int]) -> None:
        super().__init__()
        self._plan = plan
        self._rank = rank
        self._pids = pids
        self._chance = random.Random(plan.seed * 7 + rank)
        self.is_breaking = False
        self._warned_in: int | None = None
        """Operations until this rank gets SIGTERM."""

    def warn_soon(self) -> None:
        """The rank listens for signals now."""
        if self._rank in self._plan.warned:
            self._warned_in = self._plan.warn_at

    def _hit(self, name: str, *subjects: str) -> None:
        super()._hit(name, *subjects)
        plan = self._plan
        if plan.victims and self._rank == plan.victims[0] and len(self.names) >= plan.kill_at > 0:
            for victim in sorted(plan.victims, key=lambda v: v == self._rank):
                os.kill(self._pids[victim], signal.SIGKILL)
        with self._lock:
            if self._warned_in is not None:
                self._warned_in -= 1
            is_due = self._warned_in == 0
            fails = self.is_breaking and self._chance.random() < plan.fault_chance
        if is_due:
            os.kill(os.getpid(), signal.SIGTERM)
        if fails and not name.startswith(("point:", "store")):
            raise OSError(plan.error, "by chance")

    def read_at(self, fd: int, into: memoryview, offset: int) -> int:
        self._hit("read_at")
        return super().read_at(fd, into, offset)


def write_down(folder: str, rank: int, line: dict[str, Any]) -> None:
    """Survives the end of the process at any moment."""
    fd = os.open(f"{folder}/log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, json.dumps(line).encode() + b"\n")
    os.close(fd)


def live(rank: int, folder: str, life: int, plan: Plan) -> dict[str, Any]:
    """Restore the newest, train, save every few steps."""
    logging.getLogger("shardstore").setLevel(logging.ERROR)
    ops = FateOps(plan, rank, share_pids(rank, folder))
    trainer = Trainer(rank)
    ops.arm()
    where: dict[str, Any] = {"memory": plan.memory, "memory_dir": Path(folder) / "memory"}
    if plan.has_disk:
        where["disk"] = (Path(folder) / "disk").resolve()
    with use_ops(ops):
        store = SnapshotStore(
            Path(folder) / "root", keep=2, on_error=plan.on_error, timeout_s=TIMEOUT_S, **where
        )
    measured: list[dict[str, int]] = []
    guard = store.guard_preemption(grace_s=GRACE_S)
    with store, _ending_errors(folder, rank, life), guard:
        ops.warn_soon()
        report = store.restore(trainer.state, required=False)
        write_down(folder, rank, {"life": life, "restored": report.step if report else 0})
        assert trainer.progress["step"] == (report.step if report else 0)
        ops.is_breaking = rank == plan.broken_rank
        pending = []
        for number in range(plan.num_steps):
            result = trainer.train()
            step = trainer.progress["step"]
            write_down(folder, rank, {"life": life, "step": step, "result": result})
            stop = guard.should_stop(step)
            if stop or step % plan.save_every == 0:
                pending.append(store.save(trainer.state, step=step, overlap=plan.overlap))
            for handle in [h for h in pending if h.committed.done()]:
                pending.remove(handle)
                if handle.committed.exception() is None and handle.committed.result() is not None:
                    write_down(folder, rank, {"life": life, "committed": handle.step})
            if stop:
                write_down(folder, rank, {"life": life, "stopped": step})
                break
            if plan.is_measured and number % 100 == 50:
                measured.append(_measure())
        ops.is_breaking = False
        store.close(keep_memory=True)
    return {"measured": measured}


@contextlib.contextmanager
def _ending_errors(folder: str, rank: int, life: int) -> Iterator[None]:
    """A typed error ends a life as a kill does; anything else is a bug."""
    try:
        yield
    except ShardStoreError as error:
        write_down(folder, rank, {"life": life, "ended": f"{type(error).__name__}: {error}"})
        raise


def _measure() -> dict[str, int]:
    status = Path("/proc/self/status").read_text().splitlines()
    anonymous = next(line for line in status if line.startswith("RssAnon"))
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "anonymous": int(anonymous.split()[1]) << 10,
        "at": int(time.monotonic()),
    }


def reference(rank: int, num_steps: int) -> list[str]:
    """What an uninterrupted run comes to, step by step."""
    trainer = Trainer(rank)
    return [trainer.train() for _ in range(num_steps)]
