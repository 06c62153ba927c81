"""Local tensors -> a buffer and back: the only step that training waits for.

Copies are bit-exact for every dtype and resolve lazy conjugation and negation. Nothing is allocated
that grows with the state. What of it may happen behind training is `overlap`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import torch

from shardstore.format.layout import ShardLayout
from shardstore.format.records import TensorPiece, TensorRow
from shardstore.state.devices import DeviceCopy, Pair
from shardstore.state.flatten import FlatState
from shardstore.state.pinning import PageLock, bytes_of
from shardstore.state.tensors import TORCH_DTYPES

_NO_COPY_KERNEL = frozenset({"float4_e2m1fn_x2"})


def views(
    buffer: memoryview,
    layout: ShardLayout,
    table: Sequence[TensorRow],
    pieces: Sequence[TensorPiece],
) -> list[torch.Tensor]:
    """Typed tensors over the spans of a shard file's memory.

    Args:
        buffer: The whole file, writable. The tensors keep it alive.
        layout: Where pieces lie in it.
        table: Rows of the file.
        pieces: This rank's pieces, parallel to `table`.

    Returns:
        One tensor per row: contiguous, of the piece's shape; aliases get an empty uint8 tensor, and
        dtypes that this torch lacks their bytes.
    """
    base = bytes_of(buffer)
    return [
        as_stored(base[start:end], row, piece)
        for row, piece, (start, end) in zip(table, pieces, layout.spans, strict=True)
    ]


def as_stored(data: torch.Tensor, row: TensorRow, piece: TensorPiece) -> torch.Tensor:
    """Bytes of one row as a tensor of its dtype and this rank's shape; see `views`."""
    if row.alias_of is not None:
        return _EMPTY
    dtype = TORCH_DTYPES.get(row.dtype)
    if dtype is None:
        return data
    if data.numel() == 0:
        return torch.empty(piece.sizes, dtype=dtype)
    return data.view(dtype).view(piece.sizes)


_EMPTY = torch.empty(0, dtype=torch.uint8)


def stage(
    flat: FlatState, views: Sequence[torch.Tensor], page_lock: PageLock | None = None
) -> None:
    """Copy this rank's tensors into `views`; live tensors may change once this returns.

    CUDA tensors are copied on a side stream that waits for the current one, so that pending kernels are
    part of the snapshot and later ones are not.

    Args:
        flat: What to copy.
        views: Where to; see `views`.
        page_lock: Of the memory of the views, if it is page-locked.
    """
    await_offloading()
    Copying(pairs_of(flat, views), page_lock).run()


def pairs_of(flat: FlatState, views: Sequence[torch.Tensor]) -> list[Pair]:
    """View and live tensor of each row that has bytes of its own."""
    pairs = list(zip(views, flat.tensors, strict=True))
    if not flat.has_aliases:
        return pairs
    return [pair for pair, row in zip(pairs, flat.table, strict=True) if row.alias_of is None]


class Copying:
    """Live tensors on their way to host memory.

    For CUDA tensors, what is copied is their value at the point that the current streams had reached when
    this was made, whichever thread runs it; for all others, their value while it runs.
    """

    def __init__(self, pairs: Sequence[Pair], page_lock: PageLock | None) -> None:
        """Nothing is copied yet. Targets are host memory, sources have their shape and dtype."""
        self._host: Sequence[Pair] = [pair for pair in pairs if pair[1].is_cpu]
        self._others: list[Pair] = []
        self._devices: list[DeviceCopy] = []
        if len(self._host) < len(pairs):
            by_device: dict[torch.device, list[Pair]] = {}
            for target, source in pairs:
                if source.is_cuda:
                    pair = (bytewise(target), bytewise(source))
                    by_device.setdefault(source.device, []).append(pair)
                elif not source.is_cpu:
                    self._others.append((target, source))
            self._devices = [DeviceCopy(d, mine, page_lock) for d, mine in by_device.items()]

    def run(self) -> None:
        """Copy; returns when all targets are whole. Any thread, once; lets go of all tensors."""
        try:
            with torch.no_grad(), contextlib.ExitStack() as stack:
                for device in self._devices:
                    stack.callback(device.finish)
                    device.begin()
                _copy_all(self._others)
                _copy_host(self._host)
        finally:
            self._host, self._others, self._devices = (), [], []


def fill(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy sources into live local tensors, which keep memory, strides and identity.

    Returns when the sources may be reused. Live tensors made under inference_mode are filled there.
    """
    await_offloading()
    devices: set[torch.device] = set()
    with torch.no_grad():
        for live, source in pairs:
            if live.device.type == "cuda":
                devices.add(live.device)
            target, narrowed = _unexpand(live, source)
            if target.is_inference():
                with torch.inference_mode():
                    copy_exact(target, narrowed)
            else:
                copy_exact(target, narrowed, non_blocking=target.device.type == "cuda")
        for device in devices:
            torch.cuda.synchronize(device)


def await_offloading() -> None:
    """Finish copies to host memory that were begun without blocking: host code does not wait for them."""
    device = torch.accelerator.current_accelerator()
    if device is not None and torch.get_device_module(device).is_initialized():
        torch.accelerator.synchronize()


def is_expanded(live: torch.Tensor) -> bool:
    """True if several elements share one place in memory through a stride of 0."""
    return any(
        stride == 0 and size > 1 for stride, size in zip(live.stride(), live.shape, strict=True)
    )


def fits_expanded(live: torch.Tensor, source: torch.Tensor) -> bool:
    """True if `source` has equal bytes wherever an expanded `live` has one place for them."""
    _, narrow = _unexpand(live, source)
    again = narrow.expand(source.shape).contiguous()
    if again.numel() == 0:
        return True
    raw = again.reshape(-1).view(torch.uint8), source.contiguous().reshape(-1).view(torch.uint8)
    return bool(torch.equal(*raw))


def copy_exact(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy equal dtype and shape, bit for bit."""
    bytewise(target).copy_(bytewise(source), non_blocking=non_blocking)


def bytewise(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or its bytes where torch has no copy of its dtype."""
    return tensor.view(torch.uint8) if tensor.dtype in _BYTEWISE else tensor


_BYTEWISE = frozenset(TORCH_DTYPES[name] for name in _NO_COPY_KERNEL if name in TORCH_DTYPES)


def _copy_host(pairs: Sequence[Pair]) -> None:
    """One call for all: a call each takes longer than copying a small tensor."""
    if not pairs:
        return
    targets, sources = zip(*pairs, strict=True)
    if _BYTEWISE.isdisjoint({source.dtype for source in sources}):
        torch._foreach_copy_(targets, sources)
    else:
        pairs = [(bytewise(target), bytewise(source)) for target, source in pairs]
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _copy_all(pairs: Iterable[Pair]) -> None:
    for target, source in pairs:
        copy_exact(target, source)


def _unexpand(live: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Narrow both to one element along dims where `live` has a stride of 0."""
    if 0 in live.stride():
        for dim, stride in enumerate(live.stride()):
            if stride == 0 and live.shape[dim] > 1:
                live, source = live.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    return live, source
