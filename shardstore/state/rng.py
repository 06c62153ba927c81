"""Random states of this process as one object for the state: torch, accelerators, Python, NumPy."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RNGState:
    """Saves and restores every random stream of this rank; loaded after everything else.

    `{"rng": RNGState()}` covers torch on CPU, every visible accelerator, Python's `random` and
    NumPy's global generator. Generators of your own belong in an object with state_dict.
    """

    def state_dict(self) -> dict[str, object]:
        """Read all streams. Draws nothing."""
        state: dict[str, object] = {
            "torch": torch.get_rng_state(),
            "accelerator": _read_accelerators(),
            "python": random.getstate(),
        }
        numpy = _numpy()
        if numpy is not None:
            state["numpy"] = numpy.random.get_state()
        return state

    def load_state_dict(self, state_dict: Any) -> None:
        """Set all streams. Accelerators beyond those that were saved keep theirs."""
        torch.set_rng_state(state_dict["torch"])
        _write_accelerators(state_dict["accelerator"])
        random.setstate(state_dict["python"])
        numpy = _numpy()
        if numpy is not None and "numpy" in state_dict:
            numpy.random.set_state(state_dict["numpy"])

    def __repr__(self) -> str:
        return "RNGState()"


def _numpy() -> Any:
    """NumPy if this process can have drawn from it."""
    if "numpy" not in sys.modules:
        try:
            import numpy  # noqa: F401
        except ImportError:
            return None
    return sys.modules["numpy"]


def _accelerator() -> Any:
    """The device module (as torch.cuda) of the visible accelerator, or None.

    `torch.accelerator` came with torch 2.6; where it is missing, CUDA is asked directly.
    """
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:
        return torch.cuda if torch.cuda.is_available() else None
    device = accelerator.current_accelerator() if accelerator.is_available() else None
    return None if device is None else torch.get_device_module(device)


def _read_accelerators() -> list[torch.Tensor]:
    module = _accelerator()
    if module is None:
        return []
    return [module.get_rng_state(index) for index in range(module.device_count())]


def _write_accelerators(states: list[torch.Tensor]) -> None:
    module = _accelerator()
    if module is None:
        return
    for index, state in enumerate(states[: module.device_count()]):
        module.set_rng_state(state, index)
