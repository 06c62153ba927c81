"""Peers of torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.systems import State, System


class DCP(System):
    """Blocking, as it comes."""

    name = "DCP save"

    def save(self, state: State) -> tuple[float, float]:
        """See System."""
        import torch.distributed.checkpoint as dcp

        path = self.next_path()
        started = time.perf_counter()
        dcp.save(dict(state), checkpoint_id=path)  # type: ignore[attr-defined]
        taken_s = time.perf_counter() - started
        return taken_s, taken_s

    def read(self, state: State) -> None:
        """See System."""
        import torch.distributed.checkpoint as dcp

        dcp.load(dict(state), checkpoint_id=self.path)  # type: ignore[attr-defined]


class DCPAsync(DCP):
    """In the background, as it comes."""

    name = "DCP async_save"
    measures_load = False

    def __init__(self, folder: Path) -> None:
        """See System."""
        super().__init__(folder)
        self.stager = self._make_stager()

    def _make_stager(self) -> Any:
        return None

    def save(self, state: State) -> tuple[float, float]:
        """See System."""
        import torch.distributed.checkpoint as dcp

        path = self.next_path()
        options = {} if self.stager is None else {"async_stager": self.stager}
        started = time.perf_counter()
        response: Any = dcp.async_save(dict(state), checkpoint_id=path, **options)  # type: ignore[attr-defined]
        blocked_s = time.perf_counter() - started
        future = getattr(response, "upload_completion", response)
        future.result()
        return blocked_s, time.perf_counter() - started


class DCPAsyncShared(DCPAsync):
    """The same with a stager that reuses shared memory: its best tuning."""

    name = "DCP async_save, reused shared memory"

    def _make_stager(self) -> Any:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=True,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        return DefaultStager(options)

    def close(self) -> None:
        """See System."""
        self.stager.close()
        super().close()


class DCPSafetensors(DCP):
    """With its safetensors writer and reader."""

    name = "DCP save as safetensors"

    @classmethod
    def why_not(cls) -> str | None:
        """See System."""
        import torch.distributed.checkpoint as dcp

        if hasattr(dcp, "HuggingFaceStorageReader"):
            return None
        return "this torch has no HuggingFaceStorageReader (2.8 and newer have)"

    def __init__(self, folder: Path) -> None:
        """See System."""
        super().__init__(folder)
        self._storage: Any = importlib.import_module("torch.distributed.checkpoint")

    def save(self, state: State) -> tuple[float, float]:
        """See System."""
        import torch.distributed.checkpoint as dcp

        path = self.next_path()
        started = time.perf_counter()
        writer = self._storage.HuggingFaceStorageWriter(path=str(path), save_distributed=True)
        dcp.save(dict(state), storage_writer=writer)  # type: ignore[attr-defined]
        taken_s = time.perf_counter() - started
        return taken_s, taken_s

    def read(self, state: State) -> None:
        """See System."""
        import torch.distributed.checkpoint as dcp

        reader = self._storage.HuggingFaceStorageReader(path=str(self._files()))
        wanted = {self._key(name): tensor for name, tensor in state.items()}
        dcp.load(wanted, storage_reader=reader)  # type: ignore[attr-defined]

    def _files(self) -> Path:
        return self.path

    def _key(self, name: str) -> str:
        return name


class DCPReadsOurs(DCPSafetensors):
    """Its safetensors reader on the folder of one of our snapshots."""

    name = "DCP load of a shardstore snapshot"
    measures_save = False

    def save(self, state: State) -> tuple[float, float]:
        """See System."""
        from shardstore import SnapshotStore

        name = f"benchmark-for-dcp-{os.getpid()}"
        started = time.perf_counter()
        with SnapshotStore(self.next_path(), memory=0, name=name) as store:
            store.save(state, step=1).wait()
        taken_s = time.perf_counter() - started
        return taken_s, taken_s

    def _files(self) -> Path:
        (found,) = self.path.glob("step-*")
        return found

    def _key(self, name: str) -> str:
        return f"{name}@0"  # a plain tensor is the rank's own


DCP_SYSTEMS: tuple[type[System], ...] = (
    DCP,
    DCPAsync,
    DCPAsyncShared,
    DCPSafetensors,
    DCPReadsOurs,
)
