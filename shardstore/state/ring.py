"""Copies off a device through a few page-locked buffers, where the target itself cannot be page-locked.

A copy from a device into ordinary memory makes the host wait each time. Here pieces of many tensors are
collected in one buffer, which the device fills while the host empties the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

import torch

RING_BYTES: Final = 32 << 20
NUM_BUFFERS: Final = 3
_ALIGNMENT: Final = 16
Launch = Callable[[list[torch.Tensor], list[torch.Tensor]], None]
"""Begins copies into the first list from the second, in the order of the calls."""


class Mark(Protocol):
    """A place in the order of what was launched; a CUDA event is one."""

    def synchronize(self) -> object:
        """Return when all that was launched before is done."""
        ...


class _Window:
    """One buffer, and what lies in it."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.used = 0
        self.sources: list[torch.Tensor] = []
        self.rooms: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []
        self.mark: Mark | None = None

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        nbytes = target.numel()
        self.rooms.append(self.buffer[self.used : self.used + nbytes])
        self.targets.append(target)
        self.sources.append(source)
        self.used = -(-(self.used + nbytes) // _ALIGNMENT) * _ALIGNMENT

    def empty(self) -> None:
        """Wait for the device, and move what came to where it belongs."""
        if self.mark is not None:
            self.mark.synchronize()
            torch._foreach_copy_(self.targets, self.rooms)
        self.used, self.mark = 0, None
        self.sources, self.rooms, self.targets = [], [], []


def copy_through_ring(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
    buffers: Sequence[torch.Tensor],
    launch: Launch,
    mark: Callable[[], Mark],
) -> None:
    """Copy each source into its target, both of one length in bytes; returns when the targets are whole.

    Args:
        pairs: Targets in host memory and sources on the device, contiguous, of equal dtype. Drawn one
            by one: sources made on the way are let go of as soon as they were copied.
        buffers: At least one, uint8, of equal length, page-locked; free for use until this returns.
        launch: Begins the copies of one buffer.
        mark: Gives the place in the order that has been reached.
    """
    windows = [_Window(buffer) for buffer in buffers]
    room, turn = buffers[0].numel(), 0
    for target, source in pairs:
        into, out_of = (tensor.view(-1).view(torch.uint8) for tensor in (target, source))
        at, end = 0, into.numel()
        while at < end:
            window = windows[turn]
            taken = min(end - at, room - window.used)
            if taken <= 0:
                _launch(window, launch, mark)
                turn = (turn + 1) % len(windows)
                windows[turn].empty()
                continue
            window.add(into[at : at + taken], out_of[at : at + taken])
            at += taken
    _launch(windows[turn], launch, mark)
    for _ in windows:  # oldest first
        turn = (turn + 1) % len(windows)
        windows[turn].empty()


def _launch(window: _Window, launch: Launch, mark: Callable[[], Mark]) -> None:
    if window.sources:
        launch(window.rooms, window.sources)
        window.mark = mark()
