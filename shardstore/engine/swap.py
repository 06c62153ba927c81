"""Make live state another step for a while, then exactly what it was."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardstore.engine.plan import ShardPlanner
from shardstore.engine.ranks import header_in_job
from shardstore.engine.session import Session
from shardstore.format.records import ShardHeader
from shardstore.format.shardfile import ShardLayout
from shardstore.state.flatten import flatten_state
from shardstore.state.guards import check_boundary
from shardstore.state.restore import match_state
from shardstore.state.staging import stage, views
from shardstore.tiers.slots import Slot


class PrivateCopy:
    """This rank's copy of live state, in memory that never gets a name: no listing or restart sees it."""

    def __init__(self, session: Session, state: Mapping[str, object]) -> None:
        """Copy now.

        Raises:
            UnsupportedStateError: Something in `state` cannot be stored.
            TierError: No memory.
        """
        self._session = session
        self._state = state
        check_boundary(state)
        flat = flatten_state(state, rank=session.rank)
        self._header: ShardHeader
        self._layout: ShardLayout
        self._header, self._layout = ShardPlanner(session).plan(flat)
        self._slot: Slot = session.memory.scratch(self._layout.nbytes)
        stage(flat, self._views())

    def _views(self) -> list[torch.Tensor]:
        header = self._header
        return views(self._slot.view, self._layout, header.table, header.pieces)

    def put_back(self) -> None:
        """Fill live state from the copy; local, no rank is asked."""
        session = self._session
        plan = match_state(
            self._state,
            header_in_job(self._header, session.coordinator.group_ranks),
            rank=session.rank,
            world_size=session.world_size,
            strict=False,  # what was added meanwhile stays; all that was there before is put back
            partial=True,
        )
        tensors = self._views()
        plan.prepare({index: tensors[index] for index in plan.needed})
        plan.apply()

    def close(self) -> None:
        """Give the memory back."""
        self._session.memory.abandon_slot(self._slot)
