"""Copy what only optimizers change behind training, and make their steps wait for it.

A step goes forward, backward, step: parameters and optimizer state do not change before the last of them
(DataStates-LLM, HPDC 2024, copies meanwhile). So only their copy may be late. Late is the memory of
parameters that an optimizer in the state holds, and of that optimizer's state for them; everything else
(buffers, plain tensors, averages, frozen weights, options such as a tensor lr, random states, leaves) has
been copied when `save` returns.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardstore.errors import ShardStoreError
from shardstore.state import dtensor
from shardstore.state.devices import Pair
from shardstore.state.flatten import FlatState
from shardstore.state.kinds import Kind, items_of, kind_of
from shardstore.state.pinning import PageLock
from shardstore.state.staging import Copying, await_offloading, pairs_of

_MAX_CLONES_BYTES: Final = 64 << 20
"""Device memory that a save with overlap may take for tensors whose copy must not be late."""


class LateCopy:
    """The part of a snapshot that is still in live memory. Some other thread runs it, once."""

    def __init__(self, pairs: Sequence[Pair], page_lock: PageLock | None) -> None:
        """Refers to the memory that the sources have now, wherever they are moved to meanwhile."""
        self._copying = Copying([(view, tensor.detach()) for view, tensor in pairs], page_lock)
        self._is_given_up = False
        self.nbytes = sum(tensor.nbytes for _, tensor in pairs)
        self.done = threading.Event()
        """Set by who runs it, when it is over: the memory may change."""

    def run(self) -> None:
        """Copy.

        Raises:
            ShardStoreError: It took so long that somebody stopped waiting: it may be of two steps.
        """
        self._copying.run()
        if self._is_given_up:
            raise ShardStoreError(
                "copying parameters behind training took longer than the store's timeout_s, and an "
                "optimizer went on: the copy may be of two steps and is dropped"
            )

    def wait(self, timeout_s: float) -> None:
        """Wait until the memory may change. Past the deadline it may as well: the copy is given up."""
        if not self.done.wait(timeout_s):
            self.give_up()

    def give_up(self) -> None:
        """The memory changes before the copy is over: it must not become a snapshot."""
        self._is_given_up = True


class StepGuard:
    """Makes every optimizer of the process wait for the late copy of one store, if one is under way.

    Its hook is there from the first late copy until `close`, and costs a microsecond while nothing is
    under way. It runs in whichever thread steps, also within a backward pass.
    """

    def __init__(self, timeout_s: float) -> None:
        """Hooks into nothing yet. After `timeout_s` seconds a copy is given up, not training."""
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._copy: LateCopy | None = None
        self._handle: RemovableHandle | None = None

    def watch(self, copy: LateCopy) -> None:
        """From now on steps wait for this one. The one before is over."""
        if self._handle is None:
            # A compiled step must not be traced into waiting, nor be compiled anew for each copy.
            hook = torch.compiler.disable(self._before_step)  # type: ignore[no-untyped-call]
            self._handle = register_optimizer_step_pre_hook(hook)
        self._copy = copy

    def wait(self) -> None:
        """Wait until live state may change. Raises nothing on account of the copy."""
        copy = self._copy
        if copy is not None:
            if os.getpid() == self._pid:  # in a forked child nobody runs it, and memory is its own
                copy.wait(self._timeout_s)
            if self._copy is copy:
                self._copy = None

    def close(self) -> None:
        """Wait, and take the hook away. Closing twice is fine."""
        try:
            self.wait()
        finally:
            if self._copy is not None:  # interrupted, and nobody waits from now on
                self._copy.give_up()
            handle, self._handle = self._handle, None
            if handle is not None:
                handle.remove()

    def _before_step(
        self, _optimizer: torch.optim.Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]
    ) -> None:
        if self._copy is not None:
            self.wait()


def stage_early(
    flat: FlatState,
    views: Sequence[torch.Tensor],
    state: Mapping[str, object],
    page_lock: PageLock | None = None,
) -> LateCopy | None:
    """Copy now what others than optimizers may change; return the rest, to be run behind. Local.

    Small CUDA tensors that must not be late are copied on the device, in the order of its stream, so that
    the host does not wait for what the device still has to do.

    Args:
        flat: What to copy.
        views: Where to, host memory.
        state: What `flat` was made of.
        page_lock: Of the memory of the views, if it is page-locked.

    Returns:
        The late copy; None if all has been copied.
    """
    pairs = pairs_of(flat, views)
    with torch.no_grad():
        are_late = _are_late(state, [tensor for _, tensor in pairs])
        late = [pair for pair, is_late in zip(pairs, are_late, strict=True) if is_late]
        now = [pair for pair, is_late in zip(pairs, are_late, strict=True) if not is_late]
        clones: list[Pair] = []
        if late:
            now, clones = _clone_small(now)
    if _may_be_arriving(pairs):
        await_offloading()
    copy = LateCopy([*late, *clones], page_lock) if late else None
    Copying(now, page_lock).run()
    return copy


def _clone_small(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Pairs to copy now, and pairs whose source is a copy on the device, which may be copied late."""
    on_device = [pair for pair in pairs if pair[1].is_cuda]
    if not on_device or sum(tensor.nbytes for _, tensor in on_device) > _MAX_CLONES_BYTES:
        return list(pairs), []
    try:
        clones = [(view, tensor.clone()) for view, tensor in on_device]
    except torch.OutOfMemoryError:
        return list(pairs), []
    return [pair for pair in pairs if not pair[1].is_cuda], clones


def _may_be_arriving(pairs: Sequence[Pair]) -> bool:
    """Whether a copy into a source may be under way that the host does not see: page-locked memory."""
    device = torch.accelerator.current_accelerator()
    if device is None or not torch.get_device_module(device).is_initialized():
        return False
    if device.type != "cuda":
        return True
    return any(tensor.is_pinned() for _, tensor in pairs if tensor.is_cpu)


Place = tuple[torch.device, int, torch.Size, tuple[int, ...], torch.dtype]


def _place(tensor: torch.Tensor) -> Place:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _are_late(state: Mapping[str, object], tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Whether nobody but an optimizer of the state writes to a tensor, as far as the state tells."""
    held = _held_memory(state)
    are_held = [(t.is_cpu or t.is_cuda) and _place(t) in held for t in tensors] if held else []
    if not any(are_held):
        return [False] * len(tensors)
    # Another name for a part of the same memory, a buffer say, is written to by others.
    storages = [_storage(tensor) for tensor in tensors]
    shared = {s for s, is_held in zip(storages, are_held, strict=True) if not is_held}
    return [is_held and s not in shared for s, is_held in zip(storages, are_held, strict=True)]


def _held_memory(state: Mapping[str, object]) -> set[Place]:
    held: set[Place] = set()
    for optimizer in _optimizers_of(state):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                entry = optimizer.state.get(parameter)
                values = entry.values() if isinstance(entry, dict) else ()
                held.update(
                    _place(local)
                    for value in (parameter, *values)
                    if isinstance(value, torch.Tensor)
                    and (local := dtensor.peek_local(value)).layout is torch.strided
                    and type(local) in (torch.Tensor, nn.Parameter)
                )
    return held


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _optimizers_of(state: Mapping[str, object]) -> Iterator[torch.optim.Optimizer]:
    """Optimizers in the state, also inside wrappers, whose `step` runs the global hooks."""
    seen: set[int] = set()
    stack: list[object] = list(state.values())
    while stack:
        value = stack.pop()
        kind = kind_of(value)
        if kind is Kind.CONTAINER:
            if id(value) not in seen:
                seen.add(id(value))
                stack.extend(child for _, child in items_of(value))
        elif kind is Kind.OPTIMIZER or kind is Kind.STATEFUL:
            for optimizer in (value, *_held_by(value)):
                if isinstance(optimizer, torch.optim.Optimizer) and id(optimizer) not in seen:
                    seen.add(id(optimizer))
                    if _runs_hooks(optimizer):
                        yield optimizer


def _held_by(wrapper: object) -> Iterator[object]:
    """Optimizers that an object keeps in its attributes, one by one or in a list or dict."""
    for value in getattr(wrapper, "__dict__", {}).values():
        inside = value.values() if type(value) is dict else value
        if isinstance(value, torch.optim.Optimizer):
            yield value
        elif type(value) in (dict, list, tuple) and isinstance(
            next(iter(inside), None), torch.optim.Optimizer
        ):
            yield from inside


def _runs_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch has wrapped the class's step, as Optimizer.__init__ does, so that it calls hooks."""
    step: Callable[..., object] = type(optimizer).step
    return bool(getattr(step, "hooked", False))
