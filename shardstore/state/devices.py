"""Copies off a CUDA device on a side stream, behind what its current stream has to do.

What torch does and does not: a non-blocking copy into host memory that is not page-locked makes the host
wait; lazy conjugation and negation it resolves in host memory at once, before a non-blocking copy has
come (`copy_kernel_cuda` in ATen/native/cuda/Copy.cu); a list of copies between devices is one call, which
holds no lock of Python's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from shardstore.state.pinning import PageLock
from shardstore.state.ring import NUM_BUFFERS, RING_BYTES, copy_through_ring

Pair = tuple[torch.Tensor, torch.Tensor]


class DeviceCopy:
    """Tensors of one CUDA device on their way to host memory. Any thread may run it, once.

    What the device's current stream was given before this object was made is part of the copy; what it
    is given later is not, as long as nothing writes to the sources before `finish` returned. The sources
    are kept alive until then, so that their memory is not given to others.
    """

    def __init__(
        self, device: torch.device, pairs: Sequence[Pair], page_lock: PageLock | None
    ) -> None:
        """Nothing is copied yet.

        Args:
            device: Where the sources are.
            pairs: Contiguous host tensors, and sources of the same shape and a dtype that torch copies.
            page_lock: Of the memory of all targets; None: it is ordinary memory.
        """
        self._pairs: Sequence[Pair] = pairs
        self._sources: list[torch.Tensor] = []
        self._page_lock = page_lock
        self._device = device
        self._stream = _side_stream(device)
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ready.record(torch.cuda.current_stream(device))

    def begin(self) -> None:
        """Give the device all that it can do without the host. Call `finish` whatever this raises."""
        if self._page_lock is None:
            return
        with self._on_stream():
            self._sources = [_resolved(source) for _, source in self._pairs]
            torch._foreach_copy_(
                [target for target, _ in self._pairs], self._sources, non_blocking=True
            )

    def finish(self) -> None:
        """Return when the targets are whole, and let go of the sources."""
        try:
            if self._page_lock is None:
                self._copy_through_ring()
        finally:
            self._stream.synchronize()
            self._pairs, self._sources, self._page_lock = (), [], None

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Behind what the current stream had to do.

        The device comes first: leaving a stream of another device sets the thread's own again, which for
        a new thread is the first of the host, and that would make a context there for every rank.
        """
        with torch.no_grad(), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            yield

    def _copy_through_ring(self) -> None:
        with self._on_stream():
            try:
                # torch keeps such memory for the next time.
                buffers = [
                    torch.empty(RING_BYTES, dtype=torch.uint8, pin_memory=True)
                    for _ in range(NUM_BUFFERS)
                ]
            except RuntimeError:  # nothing may be page-locked: the slow way is right as well
                for target, source in self._pairs:
                    target.copy_(source)
                return
            pairs = ((target, _resolved(source).contiguous()) for target, source in self._pairs)
            copy_through_ring(pairs, buffers, _launch, self._stream.record_event)


def _launch(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    torch._foreach_copy_(targets, sources, non_blocking=True)


def _resolved(source: torch.Tensor) -> torch.Tensor:
    if source.is_conj() or source.is_neg():
        return source.resolve_conj().resolve_neg()
    return source


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the process: torch hands out the same few again and again."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
