"""What a live tensor is: dtype, global shape, placement and this rank's local memory, or a refusal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardstore.errors import UnsupportedStateError
from shardstore.format.dtypes import DTYPES
from shardstore.format.records import Placement
from shardstore.state import dtensor

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)
}
"""Torch's dtypes by name: those that this torch has and the format stores."""

_DTYPE_NAMES: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_PLAIN_TYPES: Final[set[type]] = {
    torch.Tensor,
    nn.Parameter,
    getattr(nn, "Buffer", nn.Parameter),
}


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A live tensor as this rank sees it. `local` is detached and aliases the live memory."""

    dtype: str
    shape: tuple[int, ...]
    placements: tuple[Placement, ...] | None
    mesh: DeviceMesh | None
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: torch.Tensor


class SpecCache(dict[object, tuple[tuple[int, ...], tuple[int, ...]]]):
    """Pieces by (mesh, placements, shape), for one walk: thousands of tensors share a few."""


def type_name(value: object) -> str:
    """Qualified class name for messages."""
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}" if cls.__module__ != "builtins" else cls.__name__


def refuse(path: tuple[str, ...], value: object, why: str) -> NoReturn:
    """Raise the error for a value that cannot be stored; `why` ends with the remedy."""
    where = ".".join(path)
    kind = type_name(value)
    raise UnsupportedStateError(f"cannot store {where!r} ({kind}): {why}", path=where, type=kind)


def is_stored_type(tensor: torch.Tensor) -> bool:
    """True if the tensor's class is one that is stored: subclasses would lose their meaning."""
    return type(tensor) in _PLAIN_TYPES or dtensor.is_dtensor(tensor) or dtensor.is_async(tensor)


def describe(tensor: torch.Tensor, path: tuple[str, ...], cache: SpecCache) -> LiveTensor:
    """Read what a tensor is, without copying. Call under no_grad.

    Raises:
        UnsupportedStateError: sparse, nested, quantized, meta or lazy tensors, subclasses, partial
            DTensors, and dtypes that the format does not have.
    """
    if type(tensor) in _PLAIN_TYPES:
        local = tensor.detach()
    elif isinstance(tensor, DTensor) and dtensor.is_dtensor(tensor):
        return _describe_dtensor(tensor, path, cache)
    elif dtensor.is_async(tensor):
        local = dtensor.waited(tensor).detach()
    else:
        _refuse_type(tensor, path)
    _check_local(tensor, local, path)
    shape = tuple(local.shape)
    return LiveTensor(
        _dtype_name(tensor, local, path), shape, None, None, (0,) * len(shape), shape, local
    )


def _describe_dtensor(tensor: DTensor, path: tuple[str, ...], cache: SpecCache) -> LiveTensor:
    placements = dtensor.placements_of(tensor)
    for placement in placements:
        if placement.type not in dtensor.PLACEMENT_TYPES:
            refuse(
                path,
                tensor,
                f"its placement {placement.type} is not a finished value on this rank: "
                "redistribute it to Shard or Replicate first",
            )
    local = dtensor.local_of(tensor)
    if type(local) not in _PLAIN_TYPES:
        refuse(
            path,
            tensor,
            f"its local tensor is a {type_name(local)}, and a subclass's meaning would be lost: "
            "store the plain tensors that it is made of",
        )
    local = local.detach()
    _check_local(tensor, local, path)
    mesh = tensor.device_mesh
    shape = tuple(tensor.shape)
    spec = (id(mesh), placements, shape)
    piece = cache.get(spec)
    if piece is None:
        chunk = dtensor.chunk_of(tensor)
        if chunk is None:
            refuse(path, tensor, "its local tensor is several pieces: store them separately")
        piece = cache[spec] = chunk
    offsets, sizes = piece
    if tuple(local.shape) != sizes:
        if mesh.get_coordinate() is not None:
            refuse(
                path,
                tensor,
                f"its local tensor has shape {tuple(local.shape)} where the global shape {shape} "
                f"with {[p.type for p in placements]} asks for {sizes}: give from_local the "
                "global shape and stride",
            )
        local = local.new_zeros(sizes)  # outside the mesh: nothing, in as many dims
    return LiveTensor(
        _dtype_name(tensor, local, path), shape, placements, mesh, offsets, sizes, local
    )


def _check_local(tensor: torch.Tensor, local: torch.Tensor, path: tuple[str, ...]) -> None:
    if local.layout is not torch.strided or local.is_nested:
        kind = "nested" if local.is_nested else str(local.layout).removeprefix("torch.")
        refuse(path, tensor, f"{kind} tensors are not stored: give its dense parts instead")
    if local.device.type == "meta":
        refuse(path, tensor, "it is on the meta device and has no bytes: materialise it first")


def _dtype_name(tensor: torch.Tensor, local: torch.Tensor, path: tuple[str, ...]) -> str:
    name = _DTYPE_NAMES.get(local.dtype)
    if name is None:
        what = str(local.dtype).removeprefix("torch.")
        if local.is_quantized:
            refuse(
                path, tensor, f"quantized dtype {what}: store int_repr() with scale and zero point"
            )
        refuse(path, tensor, f"dtype {what} is not stored: view it as uint8")
    return name


def _refuse_type(tensor: torch.Tensor, path: tuple[str, ...]) -> NoReturn:
    if isinstance(
        tensor, torch.nn.parameter.UninitializedParameter | torch.nn.parameter.UninitializedBuffer
    ):
        refuse(path, tensor, "it is uninitialized: run one forward of the lazy module first")
    refuse(
        path,
        tensor,
        "a tensor subclass's meaning would be lost: store the plain tensors that it is made of, "
        "or wrap it in an object with state_dict and load_state_dict",
    )
