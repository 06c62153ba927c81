"""What a compared system is, and ours."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import ClassVar

import torch

from benchmarks.machine import drop_cache, fill_cache

State = dict[str, torch.Tensor]


SLACK_BYTES = 64 << 20


def memory_for(nbytes: int, num_snapshots: int = 2) -> int:
    """Budget in bytes that holds so many snapshots of a state."""
    return num_snapshots * nbytes + SLACK_BYTES


class System:
    """One way to save and load a state. Subclasses report seconds; the folder is on disk."""

    name: ClassVar[str]
    measures_save: ClassVar[bool] = True
    """False: a reader only; `save` makes the file that it reads."""
    measures_load: ClassVar[bool] = True
    """False: it reads as another system does."""

    def __init__(self, folder: Path) -> None:
        """Use `folder` for all files."""
        self.folder = folder
        self.step = 0
        folder.mkdir(parents=True)

    @classmethod
    def why_not(cls) -> str | None:
        """Why it cannot run here, in words; None if it can."""
        return None

    @property
    def path(self) -> Path:
        """Where the current step lies."""
        return self.folder / str(self.step)

    def save(self, state: State) -> tuple[float, float]:
        """Save durably; returns how long that blocked, and until it was durable."""
        raise NotImplementedError

    def read(self, state: State) -> None:
        """Fill `state` from what was saved last."""
        raise NotImplementedError

    def load(self, state: State, *, cold: bool = True) -> float:
        """Seconds to fill `state` from the device, or (not `cold`) from the page cache."""
        (drop_cache if cold else fill_cache)(self.path)
        started = time.perf_counter()
        self.read(state)
        return time.perf_counter() - started

    def close(self) -> None:
        """Free everything."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def next_path(self) -> Path:
        """Where the next step goes; the current one is deleted, outside of what is measured."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.step += 1
        return self.path


def fsync_files(path: Path) -> None:
    """Make a file, or the files of a folder, durable where a library leaves that to its caller."""
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class Shardstore(System):
    """Ours: memory and disk."""

    name = "shardstore"

    def __init__(self, folder: Path, *, memory: int) -> None:
        """`memory`: budget in bytes."""
        super().__init__(folder)
        from shardstore import SnapshotStore

        self.memory = memory
        self.store = SnapshotStore(folder / "root", memory=memory, keep=1)

    @property
    def path(self) -> Path:
        """See System."""
        return self.folder / "root"

    def warmup(self, state: State) -> None:
        """Get memory."""
        self.store.warmup(state)

    def save(self, state: State) -> tuple[float, float]:
        """See System."""
        self.step += 1
        started = time.perf_counter()
        snapshot = self.store.save(state, step=self.step)
        blocked_s = time.perf_counter() - started
        snapshot.wait()
        return blocked_s, time.perf_counter() - started

    def load(self, state: State, *, cold: bool = True) -> float:
        """By a store that has nothing in memory yet but warmed memory, as the peers have theirs."""
        from shardstore import SnapshotStore

        name = f"benchmark-reader-{os.getpid()}"
        with SnapshotStore(self.path, memory=self.memory, name=name) as reader:
            reader.warmup(state)
            (drop_cache if cold else fill_cache)(self.path)
            started = time.perf_counter()
            report = reader.restore(state)
            taken_s = time.perf_counter() - started
            assert report.tier.startswith("root"), report.tier
        return taken_s

    def load_memory(self, state: State) -> float:
        """From the memory tier."""
        started = time.perf_counter()
        report = self.store.restore(state)
        assert report.tier.startswith("memory"), report.tier
        return time.perf_counter() - started

    def close(self) -> None:
        """See System."""
        self.store.close()
        super().close()
