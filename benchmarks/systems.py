"""The systems that are compared, each behind the same few calls."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.machine import drop_cache

State = dict[str, torch.Tensor]


class System:
    """One way to save and load a state. Subclasses report seconds; the folder is on disk."""

    name: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        """Use `folder` for all files; the caller removes it."""
        self.folder = folder
        self.step = 0
        folder.mkdir(parents=True)

    @property
    def path(self) -> Path:
        """Where the current step lies."""
        return self.folder / str(self.step)

    def save(self, state: State) -> tuple[float, float]:
        """Save durably; returns how long that blocked, and until it was durable."""
        raise NotImplementedError

    def load(self, state: State) -> float:
        """Fill `state` from what was saved last, read from the device."""
        raise NotImplementedError

    def close(self) -> None:
        """Free everything."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _next(self) -> Path:
        shutil.rmtree(self.path, ignore_errors=True)
        self.step += 1
        return self.path


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Shardstore(System):
    """Ours: memory and disk."""

    name = "shardstore"

    def __init__(self, folder: Path, *, memory: int) -> None:
        """`memory`: budget in bytes; room for two snapshots."""
        super().__init__(folder)
        from shardstore import SnapshotStore

        self.store = SnapshotStore(folder / "root", memory=memory, keep=1)

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


class TorchSave(System):
    """`torch.save` into one file."""

    name = "torch.save + fsync"

    def save(self, state: State) -> tuple[float, float]:
        """See System."""
        path = self._next()
        path.mkdir()
        started = time.perf_counter()
        torch.save(state, path / "state.pt")
        _fsync(path / "state.pt")
        taken_s = time.perf_counter() - started
        return taken_s, taken_s

    def load(self, state: State) -> float:
        """See System."""
        drop_cache(self.path)
        started = time.perf_counter()
        loaded = torch.load(self.path / "state.pt", mmap=True, weights_only=True)
        for name, tensor in state.items():
            tensor.copy_(loaded[name])
        return time.perf_counter() - started


class SaveFile(System):
    """`safetensors.torch.save_file`."""

    name = "safetensors save_file + fsync"

    def save(self, state: State) -> tuple[float, float]:
        """See System."""
        from safetensors.torch import save_file

        path = self._next()
        path.mkdir()
        started = time.perf_counter()
        save_file(state, path / "state.safetensors")
        _fsync(path / "state.safetensors")
        taken_s = time.perf_counter() - started
        return taken_s, taken_s

    def load(self, state: State) -> float:
        """See System."""
        from safetensors.torch import load_file

        drop_cache(self.path)
        started = time.perf_counter()
        loaded = load_file(self.path / "state.safetensors")
        for name, tensor in state.items():
            tensor.copy_(loaded[name])
        return time.perf_counter() - started


class DCP(System):
    """torch.distributed.checkpoint, blocking."""

    name = "DCP save"

    def save(self, state: State) -> tuple[float, float]:
        """See System."""
        import torch.distributed.checkpoint as dcp

        path = self._next()
        started = time.perf_counter()
        dcp.save(dict(state), checkpoint_id=path)  # type: ignore[attr-defined]
        taken_s = time.perf_counter() - started
        return taken_s, taken_s

    def load(self, state: State) -> float:
        """See System."""
        import torch.distributed.checkpoint as dcp

        drop_cache(self.path)
        started = time.perf_counter()
        dcp.load(dict(state), checkpoint_id=self.path)  # type: ignore[attr-defined]
        return time.perf_counter() - started


class DCPAsync(DCP):
    """torch.distributed.checkpoint in the background, as it comes."""

    name = "DCP async_save"

    def _stager(self) -> Any:
        return None

    def __init__(self, folder: Path) -> None:
        """See System."""
        super().__init__(folder)
        self._own_stager = self._stager()

    def save(self, state: State) -> tuple[float, float]:
        """See System."""
        import torch.distributed.checkpoint as dcp

        path = self._next()
        options = {} if self._own_stager is None else {"async_stager": self._own_stager}
        started = time.perf_counter()
        response: Any = dcp.async_save(dict(state), checkpoint_id=path, **options)  # type: ignore[attr-defined]
        blocked_s = time.perf_counter() - started
        future = getattr(response, "upload_completion", response)
        future.result()
        return blocked_s, time.perf_counter() - started


class DCPAsyncShared(DCPAsync):
    """The same with a stager that reuses shared memory: its best tuning."""

    name = "DCP async_save, reused shared memory"

    def _stager(self) -> Any:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=True,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        return DefaultStager(options)


PEERS: tuple[type[System], ...] = (TorchSave, SaveFile, DCP, DCPAsync, DCPAsyncShared)
