"""What is saved."""

from __future__ import annotations

import torch

from benchmarks.systems import State

NUM_LARGE = 64
TINY_BYTES = 1024
TINY_PER_MIB = 1000
DEFAULT_MIB = {"large": 1024, "gpt": 4096, "tiny": 10}


def large(nbytes: int, num_tensors: int = NUM_LARGE) -> State:
    """Equal float32 tensors, every page touched, each with a value of its own."""
    numel = max(1, nbytes // num_tensors // 4)
    return {f"t{i}": torch.full((numel,), float(i)) for i in range(num_tensors)}


def num_tiny(mib: int) -> int:
    """How many tiny tensors make up about so many MiB."""
    return TINY_PER_MIB * mib


def tiny(num_tensors: int) -> State:
    """Tensors of one KiB."""
    return large(num_tensors * TINY_BYTES, num_tensors)
