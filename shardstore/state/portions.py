"""Local tensors in portions of a shard file, for states that are larger than any buffer.

A portion is a half-open range of file offsets. Offsets of tensors are multiples of their item size, and
portions begin and end at multiples of 16 bytes from the data start, so no element is ever cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from shardstore.format.layout import ShardLayout
from shardstore.state.flatten import FlatState
from shardstore.state.staging import await_offloading, bytewise


class PortionReader:
    """Copies any portion of a live state into a buffer. Belongs to the thread that saves."""

    def __init__(self, flat: FlatState, layout: ShardLayout) -> None:
        """Finish copies that are under way; from now on the state must not change."""
        await_offloading()
        self._tensors = flat.tensors
        self._rows = _in_file_order(
            layout, [i for i, row in enumerate(flat.table) if row.alias_of is None]
        )
        self._spans = layout.spans
        self._next = 0

    def copy(self, start: int, stop: int, into: torch.Tensor) -> None:
        """Copy the file's bytes [start, stop) into `into` (uint8, aligned); portions come in order."""
        with torch.no_grad():
            while self._next < len(self._rows):
                index = self._rows[self._next]
                begin, end = self._spans[index]
                if begin >= stop:
                    break
                first, last = max(begin, start), min(end, stop)
                tensor = bytewise(self._tensors[index])
                size = tensor.element_size()
                out = into[first - start : last - start].view(tensor.dtype)
                for block, at in blocks(tensor, (first - begin) // size, (last - begin) // size):
                    out[at : at + block.numel()].view(block.shape).copy_(block)
                if end > stop:
                    break
                self._next += 1


class PortionWriter:
    """Fills live tensors from portions of a file that come in order."""

    def __init__(self, targets: Mapping[int, Sequence[torch.Tensor]], layout: ShardLayout) -> None:
        """`targets`: live local tensors by row; several may take the same bytes."""
        self._targets = targets
        self._rows = _in_file_order(layout, targets)
        self._spans = layout.spans
        self._next = 0
        await_offloading()

    def copy(self, start: int, stop: int, source: torch.Tensor) -> None:
        """Fill from the file's bytes [start, stop), `source` (uint8, aligned), which may be reused then."""
        devices: set[torch.device] = set()
        while self._next < len(self._rows):
            index = self._rows[self._next]
            begin, end = self._spans[index]
            if begin >= stop:
                break
            first, last = max(begin, start), min(end, stop)
            for live in self._targets[index]:
                if live.device.type != "cpu":
                    devices.add(live.device)
                with torch.inference_mode() if live.is_inference() else torch.no_grad():
                    tensor = bytewise(live)
                    size = tensor.element_size()
                    typed = source[first - start : last - start].view(tensor.dtype)
                    part = ((first - begin) // size, (last - begin) // size)
                    for block, at in blocks(tensor, *part):
                        block.copy_(typed[at : at + block.numel()].view(block.shape))
            if end > stop:
                break
            self._next += 1
        for device in devices:
            torch.accelerator.synchronize(device)


def _in_file_order(layout: ShardLayout, rows: Sequence[int] | Mapping[int, object]) -> list[int]:
    """Rows that have bytes, by where those lie."""
    spans = layout.spans
    return sorted((i for i in rows if spans[i][0] < spans[i][1]), key=spans.__getitem__)


def blocks(tensor: torch.Tensor, start: int, stop: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Cut elements [start, stop), in row-major order, into views of `tensor`.

    Yields:
        A view, and where its first element lies in the range. Together the views are the range.
    """
    yield from _cut(tensor, start, stop, 0)


def _cut(
    tensor: torch.Tensor, start: int, stop: int, at: int
) -> Iterator[tuple[torch.Tensor, int]]:
    if start >= stop:
        return
    if tensor.is_contiguous():
        yield tensor.view(-1)[start:stop], at
        return
    if tensor.dim() == 1:
        yield tensor[start:stop], at
        return
    inner = tensor.numel() // tensor.shape[0]
    row, offset = divmod(start, inner)
    if offset:
        taken = min(inner - offset, stop - start)
        yield from _cut(tensor[row], offset, offset + taken, at)
        start, at, row = start + taken, at + taken, row + 1
    whole = (stop - start) // inner
    if whole:
        yield tensor[row : row + whole], at
        start, at, row = start + whole * inner, at + whole * inner, row + whole
    if start < stop:
        yield from _cut(tensor[row], 0, stop - start, at)
