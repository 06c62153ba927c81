"""This rank's copy of live state in ordinary host memory, and the plan of the way back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shardstore.engine.plan import plan_header
from shardstore.format.layout import plan_layout
from shardstore.format.records import ShardHeader
from shardstore.state.flatten import flatten_state
from shardstore.state.guards import check_boundary
from shardstore.state.restore import RestorePlan, match_state
from shardstore.state.staging import stage, views


@dataclass(frozen=True, slots=True)
class HostCopy:
    """What the state was. Aliases nothing live; good for any number of ways back; one buffer."""

    header: ShardHeader
    tensors: tuple[torch.Tensor, ...]
    """Parallel to the table; empty for aliases. They keep the buffer alive."""

    @classmethod
    def take(cls, state: Mapping[str, object], *, rank: int, world_size: int) -> HostCopy:
        """Copy now. Local to this rank.

        Raises:
            UnsupportedStateError: Something in `state` cannot be stored, or a step is under way.
        """
        check_boundary(state)
        flat = flatten_state(state, rank=rank)
        layout = plan_layout(flat.table, flat.pieces, header_nbytes=0)
        # Not a bytearray, which would write zeros first.
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8).numpy().data
        tensors = views(buffer, layout, flat.table, flat.pieces)
        stage(flat, tensors)
        return cls(plan_header(flat, rank=rank, world_size=world_size), tuple(tensors))

    def plan_back(self, state: Mapping[str, object], *, rank: int, world_size: int) -> RestorePlan:
        """Compare with the live state and prepare; touches nothing live. Local to this rank.

        Raises:
            TopologyMismatchError: Saved on other ranks or meshes; lists all other differences too.
            StateMismatchError: Lists all differences.
            UnsupportedStateError: A step is under way.
        """
        check_boundary(state)
        plan = match_state(state, self.header, rank=rank, world_size=world_size)
        plan.prepare({index: self.tensors[index] for index in plan.needed})
        return plan
