"""Which ranks hold a module, as a process group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardstore.errors import CoordinationError
from shardstore.state.dtensor import reshard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def group_holding(module: object) -> ProcessGroup | None:
    """The group of a module's mesh, if that has one axis and a part of the job; None: all ranks.

    Reshards FSDP2 modules left gathered, whose parameters would have no mesh. Local.

    Raises:
        CoordinationError: This rank is not in that mesh.
    """
    if not (isinstance(module, nn.Module) and dist.is_available() and dist.is_initialized()):
        return None
    reshard(module)
    tensors = (*module.parameters(), *module.buffers())
    meshes = {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    ranks = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    whole = [mesh for mesh in meshes if mesh.ndim == 1 and mesh.size() == len(ranks)]
    if not whole or len(ranks) == dist.get_world_size():
        return None
    if dist.get_rank() not in ranks:
        raise CoordinationError(
            f"this rank is not in the module's mesh of ranks {sorted(ranks)}: call on those only, or give "
            "process_group=torch.distributed.group.WORLD on every rank",
            phase="choosing a process group",
        )
    return whole[0].get_group()
