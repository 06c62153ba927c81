"""verl's FSDP2 helpers: shards to CPU and back, under the names that its workers call.

`fsdp2_sharded_save_to_cpu(model)` copies this rank's parameters and persistent buffers to host memory and
returns `(cpu_sharded_state, target_spec)`; `fsdp2_sharded_load_from_cpu` copies them back into the live
model, on all ranks or on none. Nothing is written to disk. `SnapshotStore.swapped` does the same with names
for versions, and takes optimizers along.

Weights alone are rolled back here: the next optimizer step goes on from the optimizer's own masters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

import msgspec
import torch
import torch.distributed as dist

from shardstore.cluster.connect import connect
from shardstore.cluster.coordination import Coordinator
from shardstore.engine.plan import plan_header
from shardstore.engine.verdicts import Note, merge_notes, note_of, raise_note
from shardstore.errors import StateMismatchError
from shardstore.format.records import Mesh, Placement, ShardHeader
from shardstore.format.shardfile import header_nbytes, plan_layout
from shardstore.state.flatten import flatten_state
from shardstore.state.restore import match_state
from shardstore.state.staging import stage, views

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_TIMEOUT_S: Final = 600.0
_NAME: Final = "model"

_coordinators: Final[dict[int, tuple[object, Coordinator, Iterator[int]]]] = {}


class TensorSpec(msgspec.Struct, frozen=True):
    """Layout of one tensor: what the live one must have to take the copy."""

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

    Good for any number of loads. Its memory goes with the object.
    """

    def __init__(self, header: ShardHeader, tensors: list[torch.Tensor]) -> None:
        """Made by `fsdp2_sharded_save_to_cpu`."""
        self.header = header
        self.tensors = tensors
        self._rows = {".".join(row.path[1:]): i for i, row in enumerate(header.table)}

    def __getitem__(self, name: str) -> tuple[torch.Tensor, TensorSpec | None]:
        row = self.header.table[self._rows[name]]
        tensor = self.tensors[self._rows[name] if row.alias_of is None else row.alias_of]
        if row.placements is None or row.mesh is None:
            return tensor, None
        mesh = self.header.meshes[row.mesh]
        return tensor, TensorSpec(row.dtype, row.shape, row.placements, mesh)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def fsdp2_sharded_save_to_cpu(
    model: torch.nn.Module, *, process_group: ProcessGroup | None = None
) -> tuple[CpuShardedState, TargetSpec]:
    """Copy this rank's shards to host memory. Local: asks no other rank.

    Gathered FSDP2 modules are resharded first. Persistent buffers come along; tied parameters are copied once.

    Raises:
        UnsupportedStateError: A parameter or buffer cannot be copied as bytes; the text names it.
    """
    rank, world_size = _place(process_group)
    flat = flatten_state({_NAME: model}, rank=rank)
    header = plan_header(flat, rank=rank, world_size=world_size)
    layout = plan_layout(flat.table, flat.pieces, header_nbytes(header))
    buffer = bytearray(layout.nbytes)
    tensors = views(memoryview(buffer), layout, flat.table, flat.pieces)
    stage(flat, tensors)
    spec = TargetSpec(world_size, flat.meshes, header.table_digest)
    return CpuShardedState(header, tensors), spec


def fsdp2_sharded_load_from_cpu(
    model: torch.nn.Module,
    cpu_sharded_state: CpuShardedState,
    target_spec: TargetSpec,
    *,
    process_group: ProcessGroup | None = None,
) -> None:
    """Copy the shards back into the live model, in place; every rank calls it.

    All ranks compare names, shapes, dtypes, placements and meshes with the live model and vote before any
    tensor is touched, then copy, then meet again.

    Raises:
        StateMismatchError, TopologyMismatchError: Some rank's model differs; the same on every rank.
        CoordinationError: Another rank failed or is missing; the text names it.
    """
    coordinator, number = _coordinator(process_group)
    problem, plan, cause = None, None, None
    try:
        _check_spec(cpu_sharded_state, target_spec)
        plan = match_state(
            {_NAME: model},
            cpu_sharded_state.header,
            rank=coordinator.rank,
            world_size=coordinator.world_size,
        )
        plan.prepare({index: cpu_sharded_state.tensors[index] for index in plan.needed})
    except Exception as error:  # noqa: BLE001 - every rank must hear of it
        problem, cause = note_of(error, coordinator.rank), error
    _vote(coordinator, f"verl/{number}/verify", problem, cause)
    try:
        assert plan is not None
        plan.apply()
    except Exception as error:  # noqa: BLE001 - every rank must hear of it
        problem, cause = note_of(error, coordinator.rank), error
    _vote(coordinator, f"verl/{number}/applied", problem, cause)


def _vote(
    coordinator: Coordinator, name: str, problem: Note | None, cause: BaseException | None
) -> None:
    """Meet all ranks; raise everywhere if one has a problem."""

    def merge(values: list[bytes]) -> bytes:
        notes = [msgspec.json.decode(value, type=Note | None) for value in values]
        found = [(rank, note) for rank, note in enumerate(notes) if note is not None]
        return msgspec.json.encode(merge_notes(found) if found else None)

    decided = coordinator.gather_decide(
        name, msgspec.json.encode(problem), merge, phase="loading shards from CPU"
    )
    note = msgspec.json.decode(decided, type=Note | None)
    if note is not None:
        raise_note(note, step=None, cause=cause)


def _check_spec(state: object, spec: object) -> None:
    if not isinstance(state, CpuShardedState) or not isinstance(spec, TargetSpec):
        raise StateMismatchError(
            "cpu_sharded_state and target_spec must be the pair that fsdp2_sharded_save_to_cpu returned, "
            f"got {type(state).__name__} and {type(spec).__name__}"
        )
    if spec.table_digest != state.header.table_digest or spec.meshes != state.header.meshes:
        raise StateMismatchError("target_spec belongs to another copy than cpu_sharded_state")


def _place(process_group: ProcessGroup | None) -> tuple[int, int]:
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(process_group), dist.get_world_size(process_group)


def _coordinator(process_group: ProcessGroup | None) -> tuple[Coordinator, int]:
    """One coordinator per process group, kept for all later loads, and the number of this load."""
    initialised = dist.is_available() and dist.is_initialized()
    group = process_group or (dist.group.WORLD if initialised else None)
    known = _coordinators.get(id(group))
    if known is None or known[0] is not group:
        coordinator = connect(process_group, timeout_s=_TIMEOUT_S)
        known = _coordinators[id(group)] = (group, coordinator, itertools.count())
    return known[1], next(known[2])
