"""verl's FSDP2 helpers: shards to CPU and back, under the names that its workers call.

`fsdp2_sharded_save_to_cpu(model)` copies this rank's parameters and persistent buffers to host memory and
returns `(cpu_sharded_state, target_spec)`; `fsdp2_sharded_load_from_cpu` copies them back into the live
model, on all ranks or on none. Nothing is written to disk. `SnapshotStore.swapped` does the same with
steps for names, and takes optimizers along.

Weights alone are rolled back here: the next optimizer step goes on from the optimizer's own masters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

import msgspec
import torch
import torch.distributed as dist

from shardstore.cluster.shared import coordinator_of
from shardstore.engine.hostcopy import HostCopy
from shardstore.engine.jointly import apply_jointly
from shardstore.errors import StateMismatchError
from shardstore.format.records import Mesh, Placement
from shardstore.state.groups import group_holding
from shardstore.state.restore import RestorePlan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NAME: Final = "model"


class TensorSpec(msgspec.Struct, frozen=True):
    """Layout of one DTensor: what the live one must have to take the copy."""

    dtype: str
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    mesh: Mesh


class TargetSpec(msgspec.Struct, frozen=True):
    """Layout of the whole copy; stands where verl passes one DTensorSpec for all parameters."""

    world_size: int
    meshes: tuple[Mesh, ...]
    table_digest: str


class CpuShardedState(Mapping[str, tuple[torch.Tensor, TensorSpec | None]]):
    """This rank's copy: name to (CPU tensor, spec, or None for a plain tensor). Never aliases the model.

    Good for any number of loads. Tied tensors have all their names and one memory, which goes with
    the object.
    """

    def __init__(self, copy: HostCopy) -> None:
        """Made by `fsdp2_sharded_save_to_cpu`."""
        self.copy = copy
        self._rows = {".".join(row.path[1:]): i for i, row in enumerate(copy.header.table)}

    def __getitem__(self, name: str) -> tuple[torch.Tensor, TensorSpec | None]:
        header, index = self.copy.header, self._rows[name]
        row = header.table[index]
        tensor = self.copy.tensors[index if row.alias_of is None else row.alias_of]
        if row.placements is None or row.mesh is None:
            return tensor, None
        return tensor, TensorSpec(row.dtype, row.shape, row.placements, header.meshes[row.mesh])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        nbytes = sum(tensor.nbytes for tensor in self.copy.tensors)
        return f"CpuShardedState({len(self)} tensors, {nbytes:,} bytes)"


def fsdp2_sharded_save_to_cpu(model: torch.nn.Module) -> tuple[CpuShardedState, TargetSpec]:
    """Copy this rank's shards to host memory. Local: asks no other rank.

    Gathered FSDP2 modules are resharded first. Persistent buffers come along; tied tensors are copied
    once.

    Raises:
        UnsupportedStateError: A tensor cannot be copied as bytes, or a forward or backward is under
            way; the text names it.
    """
    rank, world_size = _place()
    copy = HostCopy.take({_NAME: model}, rank=rank, world_size=world_size)
    spec = TargetSpec(world_size, copy.header.meshes, copy.header.table_digest)
    return CpuShardedState(copy), spec


def fsdp2_sharded_load_from_cpu(
    model: torch.nn.Module,
    cpu_sharded_state: CpuShardedState,
    target_spec: TargetSpec,
    *,
    process_group: ProcessGroup | None = None,
    timeout_s: float = 600.0,
) -> None:
    """Copy the shards back into the live model, in place; every rank of the group calls it.

    All ranks compare names, shapes, dtypes, placements and meshes with the live model and vote before
    any tensor is touched, then copy, then meet again. Messages number ranks as the group does.

    Args:
        model: The live model.
        cpu_sharded_state: From `fsdp2_sharded_save_to_cpu`.
        target_spec: From the same call.
        process_group: Ranks that load together. Default: the group of the model's mesh if that has one
            axis and covers a part of the job, else all ranks.
        timeout_s: Longest wait for a rank that makes no progress.

    Raises:
        StateMismatchError, TopologyMismatchError: Some rank's model differs; lists everything that does,
            the same on every rank. No rank's model was touched.
        CoordinationError: Another rank failed or is missing; the text names it and the cause.
    """

    def prepare() -> RestorePlan:
        _check_pair(cpu_sharded_state, target_spec)
        rank, world_size = _place()
        return cpu_sharded_state.copy.plan_back({_NAME: model}, rank=rank, world_size=world_size)

    group = group_holding(model) if process_group is None else process_group
    coordinator, number = coordinator_of(group, timeout_s=timeout_s)
    what = "loading shards from CPU"
    apply_jointly(prepare, coordinator, f"verl/{number}", what=what, timeout_s=timeout_s)


def _check_pair(state: object, spec: object) -> None:
    if not isinstance(state, CpuShardedState) or not isinstance(spec, TargetSpec):
        raise StateMismatchError(
            "cpu_sharded_state and target_spec must be the pair that fsdp2_sharded_save_to_cpu returned, "
            f"got {type(state).__name__} and {type(spec).__name__}"
        )
    header = state.copy.header
    if spec != TargetSpec(header.world_size, header.meshes, header.table_digest):
        raise StateMismatchError("target_spec belongs to another copy than cpu_sharded_state")


def _place() -> tuple[int, int]:
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()
