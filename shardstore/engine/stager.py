"""The part of a save that training waits for: flatten, lay out, reserve a slot, copy."""

from __future__ import annotations

import time
from collections.abc import Mapping

from shardstore.engine.plan import check_metadata, check_step, plan_shard
from shardstore.engine.session import PendingSave, Session
from shardstore.state.flatten import flatten_state
from shardstore.state.guards import check_boundary
from shardstore.state.staging import stage, views
from shardstore.tiers.fileops import FileOps


class Stager:
    """Copies live state into slots. Belongs to the thread that saves."""

    def __init__(self, session: Session, ops: FileOps) -> None:
        """Nothing is reserved yet."""
        self._session = session
        self._ops = ops
        self._room = 0

    def stage(
        self, save: PendingSave, state: Mapping[str, object], *, step: int, metadata: object
    ) -> None:
        """Fill `save` up to a staged slot.

        Raises:
            ValueError, UnsupportedStateError, TierFullError: See `SnapshotStore.save`.
        """
        session = self._session
        save.step = check_step(step)
        save.metadata = check_metadata(metadata)
        check_boundary(state)
        flat = flatten_state(state, rank=session.rank)
        save.header, save.layout = plan_shard(
            session,
            flat,
            step=save.step,
            count=save.count,
            persist=save.persist,
            created=save.created,
            metadata=save.metadata,
            room=self._room,
        )
        self._room = save.layout.data_start
        slot = session.memory.reserve(save.layout.nbytes, timeout_s=session.timeout_s)
        save.slot = slot
        self._ops.point("stage")
        key = (save.layout, flat.table)
        if not isinstance(slot.views, tuple) or slot.views[0] != key:
            tensors = views(slot.view, save.layout, save.header.table, save.header.pieces)
            slot.views = (key, tensors)
        stage(flat, slot.views[1])
        self._ops.point("staged")

    def warm_up(self, state: Mapping[str, object]) -> None:
        """Get memory for saves of `state` now, and wait for it."""
        session = self._session
        flat = flatten_state(state, rank=session.rank)
        _, layout = plan_shard(
            session,
            flat,
            step=0,
            count=1,
            persist=True,
            created=time.time(),
            metadata=None,
            room=self._room,
        )
        self._room = layout.data_start
        session.memory.prepare(layout.nbytes, count=2)
        session.memory.wait_prepared(session.timeout_s)
