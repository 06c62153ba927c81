"""Ways to save and restore a sharded training job, all ranks together."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist

from benchmarks.gpt import App
from benchmarks.systems import memory_for


class OnRanks:
    """One way to save and restore it; all ranks call, each rank reports its seconds."""

    name: ClassVar[str]

    def __init__(self, folder: Path, app: App) -> None:
        """`folder` is shared by the ranks."""
        self.folder, self.app, self.step = folder, app, 0

    def save(self) -> tuple[float, float]:
        """Seconds blocked, and until durable."""
        raise NotImplementedError

    def restore(self) -> float:
        """Seconds until the live state is filled from disk."""
        raise NotImplementedError

    def close(self) -> None:
        """Free everything but the files."""


class OursOnRanks(OnRanks):
    """shardstore."""

    name = "shardstore"

    def __init__(self, folder: Path, app: App) -> None:
        """See OnRanks."""
        super().__init__(folder, app)
        from shardstore import SnapshotStore

        self.store = SnapshotStore(folder, memory=memory_for(app.nbytes, 1), keep=1)
        self.state = {"model": app.model, "optimizer": app.optimizer}

    def save(self) -> tuple[float, float]:
        """See OnRanks."""
        self.step += 1
        started = time.perf_counter()
        snapshot = self.store.save(self.state, step=self.step)
        blocked_s = time.perf_counter() - started
        snapshot.wait()
        return blocked_s, time.perf_counter() - started

    def restore(self) -> float:
        """See OnRanks."""
        started = time.perf_counter()
        report = self.store.restore(self.state)
        assert report.tier.startswith("root"), report.tier
        return time.perf_counter() - started

    def close(self) -> None:
        """See OnRanks."""
        self.store.close()


class DCPOnRanks(OnRanks):
    """torch.distributed.checkpoint, blocking."""

    name = "DCP save"

    def save(self) -> tuple[float, float]:
        """See OnRanks."""
        import torch.distributed.checkpoint as dcp

        path = self._next()
        started = time.perf_counter()
        dcp.save({"app": self.app}, checkpoint_id=path)  # type: ignore[attr-defined]
        taken_s = time.perf_counter() - started
        return taken_s, taken_s

    def restore(self) -> float:
        """See OnRanks."""
        import torch.distributed.checkpoint as dcp

        (path,) = self.folder.iterdir()
        started = time.perf_counter()
        dcp.load({"app": self.app}, checkpoint_id=path)  # type: ignore[attr-defined]
        return time.perf_counter() - started

    def _next(self) -> Path:
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        dist.barrier()
        self.step += 1
        return self.folder / str(self.step)


class DCPAsyncOnRanks(DCPOnRanks):
    """In the background, as it comes."""

    name = "DCP async_save"

    def save(self) -> tuple[float, float]:
        """See OnRanks."""
        import torch.distributed.checkpoint as dcp

        path = self._next()
        started = time.perf_counter()
        response: Any = dcp.async_save({"app": self.app}, checkpoint_id=path)  # type: ignore[attr-defined]
        blocked_s = time.perf_counter() - started
        getattr(response, "upload_completion", response).result()
        return blocked_s, time.perf_counter() - started


RANK_SYSTEMS: tuple[type[OnRanks], ...] = (OursOnRanks, DCPOnRanks, DCPAsyncOnRanks)
