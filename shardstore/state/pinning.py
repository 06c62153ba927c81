"""Page-lock the memory of slots, so that a device copies straight into them.

A slot is registered as one range: CUDA refuses a copy that reaches over the border of a registered one
("Memory regions spanning over allocations that are both registered and not registered with CUDA are not
supported", CUDA driver API, cuMemcpy). It costs about a first touch and is kept as long as the slot is.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
import torch

_LOG: Final = logging.getLogger("shardstore")
_PORTABLE: Final = 1  # cudaHostRegisterPortable: page-locked for all devices of the process


def bytes_of(buffer: memoryview) -> torch.Tensor:
    """Writable memory as uint8, which stays mapped as long as the tensor or a view of it lives.

    Not `torch.frombuffer`: that keeps the object, but lets its memory be unmapped.
    """
    return torch.from_numpy(np.frombuffer(buffer, dtype=np.uint8))


class Locker(Protocol):
    """Page-locks memory of this process; the codes are CUDA's, 0 is success."""

    def register(self, address: int, nbytes: int) -> int:
        """Page-lock a range."""
        ...

    def unregister(self, address: int) -> int:
        """Let go of a range by where it begins."""
        ...

    def clear_error(self) -> None:
        """Make the runtime forget a failed call, which the next kernel would otherwise be blamed for."""
        ...


class CudaLocker:
    """The CUDA runtime, as seen from one device."""

    def __init__(self, device: torch.device) -> None:
        """`device` is in use by this process: a thread without one would wake the first of the host."""
        self._device = device

    def register(self, address: int, nbytes: int) -> int:
        """See Locker."""
        with torch.cuda.device(self._device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            return int(runtime.cudaHostRegister(address, nbytes, _PORTABLE))

    def unregister(self, address: int) -> int:
        """See Locker."""
        with torch.cuda.device(self._device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            return int(runtime.cudaHostUnregister(address))

    def clear_error(self) -> None:
        """See Locker. torch asks for the last error after each kernel, and asking clears it."""
        try:
            torch.ones(1, device=self._device).add_(1)
        except RuntimeError:
            pass


class PageLock:
    """Memory that is page-locked as long as this object lives. It keeps the memory mapped as well."""

    __slots__ = ("__weakref__", "_release")

    def __init__(self, locker: Locker, memory: torch.Tensor) -> None:
        """Of memory that `locker` has registered."""
        # At exit the mappings go with the process, and CUDA may be gone before.
        self._release = weakref.finalize(self, _unregister, locker, memory)
        self._release.atexit = False


def _unregister(locker: Locker, memory: torch.Tensor) -> None:
    code = locker.unregister(memory.data_ptr())
    if code != 0:
        locker.clear_error()
        _LOG.warning("CUDA did not let go of page-locked memory (error %d)", code)


class PageLocks:
    """Registers memory, until it fails once: then everything goes through small buffers instead."""

    def __init__(self, make_locker: Callable[[torch.device], Locker] = CudaLocker) -> None:
        """`make_locker` gives the runtime of a device."""
        self._make_locker = make_locker
        self._has_failed = False

    def lock(self, memory: memoryview, device: torch.device) -> PageLock | None:
        """Page-lock a slot's whole mapping; None if that cannot be done, which is said once.

        Args:
            memory: From its first page on; the rest of the last page is its own as well.
            device: A CUDA device that this process uses.
        """
        if self._has_failed or len(memory) == 0:
            return None
        base = bytes_of(memory)
        nbytes = -(-len(memory) // mmap.PAGESIZE) * mmap.PAGESIZE
        locker = self._make_locker(device)
        code = locker.register(base.data_ptr(), nbytes)
        if code == 0:
            return PageLock(locker, base)
        self._has_failed = True
        locker.clear_error()
        _LOG.warning(
            "CUDA did not page-lock %s bytes of snapshot memory (error %d): saves copy through small "
            "buffers instead, which is slower. Look at ulimit -l and the memory limit of the container.",
            f"{nbytes:,}", code,
        )  # fmt: skip
        return None
