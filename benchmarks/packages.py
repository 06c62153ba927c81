"""Peers from packages that nothing here depends on: `pip install torchsnapshot torch_checkpointing fastsafetensors`."""

from __future__ import annotations

import importlib
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.systems import State, System, fsync_files


def why_not(package: str) -> str | None:
    """Why a package cannot be used here; None if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name == package:
            return f"not installed (pip install {package})"
        return f"import fails: {error}"
    except Exception as error:  # noqa: BLE001 - whatever a package raises, the others are measured
        return f"import fails: {type(error).__name__}: {error}"
    return None


class TorchSnapshot(System):
    """`Snapshot.take`, which leaves fsync to its caller."""

    name = "torchsnapshot take + fsync"

    @classmethod
    def why_not(cls) -> str | None:
        """See System."""
        return why_not("torchsnapshot")

    def __init__(self, folder: Path) -> None:
        """See System."""
        super().__init__(folder)
        self.package: Any = importlib.import_module("torchsnapshot")

    def save(self, state: State) -> tuple[float, float]:
        """See System."""
        path = self.next_path()
        started = time.perf_counter()
        self.package.Snapshot.take(str(path), {"state": self.package.StateDict(**state)})
        fsync_files(path)
        taken_s = time.perf_counter() - started
        return taken_s, taken_s

    def read(self, state: State) -> None:
        """See System."""
        self.package.Snapshot(str(self.path)).restore({"state": self.package.StateDict(**state)})


class TorchSnapshotAsync(TorchSnapshot):
    """`Snapshot.async_take`."""

    name = "torchsnapshot async_take + fsync"
    measures_load = False

    def save(self, state: State) -> tuple[float, float]:
        """See System."""
        path = self.next_path()
        app = {"state": self.package.StateDict(**state)}
        started = time.perf_counter()
        pending = self.package.Snapshot.async_take(str(path), app)
        blocked_s = time.perf_counter() - started
        pending.wait()
        fsync_files(path)
        return blocked_s, time.perf_counter() - started


class TorchCheckpointing(System):
    """Its background process. It leaves fsync to its caller, and its direct writes fail on ext4."""

    name = "torch_checkpointing async + fsync"

    @classmethod
    def why_not(cls) -> str | None:
        """See System."""
        return why_not("torch_checkpointing")

    def __init__(self, folder: Path) -> None:
        """See System."""
        super().__init__(folder)
        package = importlib.import_module("torch_checkpointing")
        storage = importlib.import_module("torch_checkpointing.storage.filesystem")
        config = package.CheckpointManager.Config(
            save=self._saving(),
            storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),
        )
        self.manager = config.build()

    def _saving(self) -> Any:
        config = importlib.import_module("torch_checkpointing.config")
        staging = importlib.import_module("torch_checkpointing.staging")
        # `save` returns once staged, like the others; staging beside training needs its lock
        return config.AsyncCheckpointSaverConfig(
            staging_config=staging.CheckpointStagerConfig(use_async_staging=False)
        )

    def save(self, state: State) -> tuple[float, float]:
        """See System."""
        path = self.next_path()
        started = time.perf_counter()
        future = self.manager.save(str(path), {"state": state})
        blocked_s = time.perf_counter() - started
        if future is not None:
            future.result()
        fsync_files(path)
        durable_s = time.perf_counter() - started
        return (durable_s if future is None else blocked_s), durable_s

    def read(self, state: State) -> None:
        """See System."""
        self.manager.load(str(self.path), into={"state": state})

    def close(self) -> None:
        """See System."""
        self.manager.close()
        super().close()


class TorchCheckpointingSync(TorchCheckpointing):
    """The same in the calling thread."""

    name = "torch_checkpointing sync + fsync"
    measures_load = False

    def _saving(self) -> Any:
        config = importlib.import_module("torch_checkpointing.config")
        return config.SyncCheckpointSaverConfig()


PACKAGES: tuple[type[System], ...] = (
    TorchSnapshot,
    TorchSnapshotAsync,
    TorchCheckpointing,
    TorchCheckpointingSync,
)
