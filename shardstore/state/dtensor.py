"""DTensor and FSDP2 facts, with every difference between torch versions in this one file.

Only public surface of torch 2.6 and later is used: `to_local`, `__create_chunk_list__` (documented
for checkpoints), `device_mesh`, `placements`, `DeviceMesh.mesh/mesh_dim_names/get_coordinate` and
`FSDPModule.reshard`. Placements are told apart by class name: whether `_StridedShard` is a `Shard`
or equal to one changed between versions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardstore.format.records import Mesh, Placement

PLACEMENT_TYPES: Final = frozenset({"Replicate", "Shard", "_StridedShard"})


def is_dtensor(tensor: torch.Tensor) -> bool:
    """True for DTensors, also when they are parameters; false for subclasses of DTensor."""
    return type(tensor) is DTensor


def local_of(tensor: DTensor) -> torch.Tensor:
    """This rank's local tensor, aliasing the DTensor's memory, with pending collectives waited for.

    Must run under no_grad: with grad mode on, `to_local` gives a view that refuses in-place writes.
    """
    return waited(tensor.to_local())


def peek_local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor on this rank, without asking whether it may be stored.

    A DTensor's own attribute where there is one: `to_local` makes a new tensor at each call.
    """
    if type(tensor) is DTensor:
        local = getattr(tensor, "_local_tensor", None)
        return local if isinstance(local, torch.Tensor) else local_of(tensor)
    return tensor


def peek_spec(tensor: torch.Tensor) -> object:
    """The object that says how a DTensor lies on its mesh; None for plain tensors."""
    return getattr(tensor, "_spec", None) if type(tensor) is DTensor else None


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or the result of an asynchronous collective, waited for."""
    if type(tensor) is AsyncCollectiveTensor:
        result: torch.Tensor = tensor.wait()
        return result
    return tensor


def is_async(tensor: torch.Tensor) -> bool:
    """True for the result of an asynchronous collective that was not used yet."""
    return type(tensor) is AsyncCollectiveTensor


def placements_of(tensor: DTensor) -> tuple[Placement, ...]:
    """Records of the placements, one per mesh axis; kinds are not judged here."""
    return tuple(
        Placement(type(p).__name__, getattr(p, "dim", None), getattr(p, "split_factor", None))
        for p in tensor.placements
    )


def chunk_of(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offsets and sizes of this rank's piece in the global tensor; None if there are several.

    A rank outside the mesh has offsets and sizes of 0.
    """
    if tensor.device_mesh.get_coordinate() is None:
        zeros = (0,) * tensor.ndim
        return zeros, zeros
    chunks: list[Any] = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    if len(chunks) != 1:
        return None
    offsets = tuple(int(offset) for offset in chunks[0].offsets)
    sizes = tuple(int(size) for size in chunks[0].sizes)
    return offsets, sizes


def mesh_record(mesh: DeviceMesh) -> Mesh:
    """The record of a mesh, as this rank sees it."""
    names = mesh.mesh_dim_names
    return Mesh(
        shape=tuple(int(size) for size in mesh.shape),
        axis_names=None if names is None else tuple(names),
        device_type=mesh.device_type,
        ranks=tuple(int(rank) for rank in mesh.mesh.flatten().tolist()),
    )


def coordinate_of(mesh: DeviceMesh) -> tuple[int, ...] | None:
    """This rank's coordinate in a mesh, None if it is not part of it."""
    coordinate = mesh.get_coordinate()
    return None if coordinate is None else tuple(int(index) for index in coordinate)


def build_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    like: torch.Tensor | None = None,
) -> DTensor:
    """Wrap a local tensor without communication.

    `like`, if it has the same global shape, mesh and placements, decides where a local tensor may
    sit that is not on the mesh's own device type (CPU offload).
    """
    if (
        like is not None
        and isinstance(like, DTensor)
        and local.device.type != mesh.device_type
        and tuple(like.shape) == shape
        and like.device_mesh == mesh
        and placements_of(like) == placements
    ):
        empty = torch.empty_like(like, dtype=local.dtype, requires_grad=False)
        if isinstance(empty, DTensor) and local_of(empty).device == local.device:
            local_of(empty).copy_(local)
            return empty
    return DTensor.from_local(
        local,
        mesh,
        [_placement(placement) for placement in placements],
        run_check=False,
        shape=torch.Size(shape),
        stride=_contiguous_strides(shape),
    )


def _placement(record: Placement) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    if record.type == "Replicate":
        return Replicate()
    if record.type == "Shard":
        return Shard(record.dim or 0)
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(record.dim or 0, split_factor=record.split_factor or 1)


def _contiguous_strides(shape: Iterable[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def reshard(module: nn.Module) -> None:
    """Bring FSDP2 modules that a forward left gathered back to their sharded parameters.

    While gathered, the module's parameters are full copies and writes to the sharded ones would be
    ignored by the next forward. Does nothing, and imports nothing, where FSDP2 is not in use.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    fsdp_module = getattr(fsdp, "FSDPModule", None)
    if fsdp_module is None:
        return
    for child in module.modules():
        if isinstance(child, fsdp_module):
            if _has_pending_gather(child):
                child.unshard()  # waits for what was begun: else the next forward would use its result
            child.reshard()


def _has_pending_gather(module: Any) -> bool:
    """Whether an `unshard(async_op=True)` was not waited for. There is no public question."""
    state = module._get_fsdp_state()  # noqa: SLF001
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return any(getattr(group, "_all_gather_result", None) is not None for group in groups)
