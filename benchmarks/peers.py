"""Peers that write one file: torch.save and safetensors, and fastsafetensors, which reads."""

from __future__ import annotations

import importlib
import time
from pathlib import Path

import torch

from benchmarks.dcp import DCP_SYSTEMS
from benchmarks.packages import PACKAGES, why_not
from benchmarks.systems import State, System, fsync_files


class TorchSave(System):
    """`torch.save` into one file."""

    name = "torch.save + fsync"

    def save(self, state: State) -> tuple[float, float]:
        """See System."""
        path = self.next_path()
        path.mkdir()
        started = time.perf_counter()
        torch.save(state, path / "state.pt")
        fsync_files(path / "state.pt")
        taken_s = time.perf_counter() - started
        return taken_s, taken_s

    def read(self, state: State) -> None:
        """See System."""
        loaded = torch.load(self.path / "state.pt", mmap=True, weights_only=True)
        for name, tensor in state.items():
            tensor.copy_(loaded[name])


class SaveFile(System):
    """`safetensors.torch.save_file`."""

    name = "safetensors save_file + fsync"

    @property
    def file(self) -> Path:
        """The file of the current step."""
        return self.path / "state.safetensors"

    def save(self, state: State) -> tuple[float, float]:
        """See System."""
        from safetensors.torch import save_file

        self.next_path().mkdir()
        started = time.perf_counter()
        save_file(state, self.file)
        fsync_files(self.file)
        taken_s = time.perf_counter() - started
        return taken_s, taken_s

    def read(self, state: State) -> None:
        """See System."""
        from safetensors.torch import load_file

        loaded = load_file(self.file)
        for name, tensor in state.items():
            tensor.copy_(loaded[name])


class FastSafetensors(SaveFile):
    """Reads what `save_file` wrote, with its threaded copier."""

    name = "fastsafetensors"
    measures_save = False

    @classmethod
    def why_not(cls) -> str | None:
        """See System."""
        return why_not("fastsafetensors")

    def read(self, state: State) -> None:
        """See System."""
        package = importlib.import_module("fastsafetensors")
        with package.fastsafe_open(str(self.file), nogds=True, device="cpu") as opened:
            for name, tensor in state.items():
                tensor.copy_(opened.get_tensor(name))


PEERS: tuple[type[System], ...] = (TorchSave, SaveFile, FastSafetensors, *DCP_SYSTEMS, *PACKAGES)
"""All of them; some cannot run here, see `System.why_not`."""
