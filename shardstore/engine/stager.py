"""The part of a save that training waits for: flatten, lay out, reserve a slot, copy."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import torch

from shardstore.engine.plan import ShardPlanner, check_metadata, check_step
from shardstore.engine.session import PendingSave, Session, failure_of
from shardstore.engine.streaming import Streamer
from shardstore.engine.transitions import of_memory
from shardstore.errors import CoordinationError, TierError, TierFullError
from shardstore.format.records import SnapshotId, TensorPiece, TensorRow
from shardstore.format.shardfile import ShardLayout
from shardstore.state.flatten import FlatState, flatten_state
from shardstore.state.guards import check_boundary
from shardstore.state.overlap import stage_early
from shardstore.state.pinning import PageLock, PageLocks
from shardstore.state.quiet import without_gc
from shardstore.state.recorder import Memory
from shardstore.state.staging import stage, views
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.limits import TMPFS_REMEDY
from shardstore.tiers.slots import Slot

_WARM_SLOTS: Final = 2


@dataclass(frozen=True, slots=True)
class SlotViews:
    """Typed tensors over a slot, kept with it from save to save."""

    layout: ShardLayout
    table: tuple[TensorRow, ...]
    pieces: tuple[TensorPiece, ...]
    tensors: list[torch.Tensor]
    page_lock: PageLock | None
    """Of the slot's memory; it goes with the slot, and stays when the layout changes."""

    def fit(self, layout: ShardLayout, flat: FlatState) -> bool:
        """Whether they are the views of this file; at once where the structure is unchanged."""
        mine, theirs = (self.layout, self.table, self.pieces), (layout, flat.table, flat.pieces)
        return all(map(operator.is_, mine, theirs)) or mine == theirs


class Stager:
    """Copies live state into slots. Belongs to the thread that saves."""

    def __init__(
        self,
        session: Session,
        ops: FileOps,
        *,
        on_full: str,
        number: Callable[[PendingSave], SnapshotId],
    ) -> None:
        """Nothing is reserved yet.

        Args:
            session: This rank's session.
            ops: System calls.
            on_full: What to do where no memory is free: "wait", "skip", or "direct" to the root.
            number: Gives a save its id, for what is written to the root at once.
        """
        self._session = session
        self._ops = ops
        self._on_full = on_full
        self._number = number
        self._streamer = Streamer(session, ops)
        self._has_told = False
        self._memory = Memory()
        self._planner = ShardPlanner(session)
        self._page_locks = PageLocks()

    def stage(
        self,
        save: PendingSave,
        state: Mapping[str, object],
        *,
        step: int,
        metadata: object,
        overlap: bool = False,
    ) -> None:
        """Fill `save` up to a staged slot, or a file on the root; or mark it as skipped or broken.

        With `overlap` some of it may be left to `save.late`, unless the state is streamed.

        Raises:
            ValueError, UnsupportedStateError, TierFullError: See `SnapshotStore.save`.
        """
        session = self._session
        save.step = check_step(step)
        save.metadata = check_metadata(metadata)
        check_boundary(state)
        with without_gc():
            flat = flatten_state(state, rank=session.rank, memory=self._memory)
            save.header, save.layout = self._planner.plan(
                flat,
                step=save.step,
                count=save.count,
                persist=save.persist,
                created=save.created,
                metadata=save.metadata,
            )
        save.slot = slot = self._reserve(save, save.layout.nbytes)
        for snapshot_id, nbytes in session.memory.take_evicted():
            of_memory(session, "evicted", snapshot_id, nbytes)
        if save.broken is not None:
            return
        self._ops.point("stage")
        if slot is None:
            self._stream(save, flat)
            return
        started = time.perf_counter()
        with without_gc():
            known = self._views(slot, save.layout, flat)
            if overlap:
                save.late = stage_early(flat, known.tensors, state, known.page_lock)
            else:
                stage(flat, known.tensors, known.page_lock)
        nbytes = save.layout.nbytes - (save.late.nbytes if save.late is not None else 0)
        session.meter.add("stage", nbytes, time.perf_counter() - started)
        self._ops.point("staged")

    def _views(self, slot: Slot, layout: ShardLayout, flat: FlatState) -> SlotViews:
        """The slot's own views, made anew where they do not fit."""
        known = slot.views if isinstance(slot.views, SlotViews) else None
        if known is None or not known.fit(layout, flat):
            page_lock = self._lock_pages(slot, flat)
            tensors = views(slot.view, layout, flat.table, flat.pieces)
            slot.views = known = SlotViews(layout, flat.table, flat.pieces, tensors, page_lock)
        return known

    def _lock_pages(self, slot: Slot, flat: FlatState) -> PageLock | None:
        """What holds the slot's memory page-locked already, or does from now on for CUDA tensors."""
        if isinstance(slot.views, SlotViews) and slot.views.page_lock is not None:
            return slot.views.page_lock
        device = next((tensor.device for tensor in flat.tensors if tensor.is_cuda), None)
        return None if device is None else self._page_locks.lock(slot.view, device)

    def _reserve(self, save: PendingSave, nbytes: int) -> Slot | None:
        """A slot, or None if the state is to be streamed to the root."""
        memory, on_full = self._session.memory, self._on_full
        can_stream = self._session.has_outer and save.persist
        timeout_s = self._session.timeout_s if on_full == "wait" else 0.0
        try:
            slot = memory.reserve(
                nbytes,
                kept=not save.persist,
                timeout_s=timeout_s,
                is_hopeless=lambda: self._session.is_root_failing,
            )
        except TierFullError:
            if on_full == "skip" or (on_full == "wait" and self._session.is_root_failing):
                full = failure_of(memory.full(nbytes), self._session.rank)
                save.broken = msgspec.structs.replace(full, is_skip=True)
                return None
            if on_full == "wait" or not can_stream:
                raise
            return None
        if slot is None and not can_stream:
            raise memory.full(nbytes)
        is_wanted = memory.budget_bytes > 0 or memory.budget_from
        if slot is None and nbytes > memory.budget_bytes and is_wanted and not self._has_told:
            self._has_told = True
            self._session.warn(
                "a state of %s bytes does not fit the memory budget of %s: save streams it to the root, "
                "at the root's speed, and a restart reads it from there.%s",
                f"{nbytes:,}", f"{memory.budget_bytes:,}",
                memory.budget_from or f" Raise memory=. {TMPFS_REMEDY}",
            )  # fmt: skip
        return slot

    def _stream(self, save: PendingSave, flat: FlatState) -> None:
        """Write to the root now. What goes wrong there is told as if it had happened behind `save`.

        One rank's disk must not make `save` raise on that rank alone, with the others in a collective.
        """
        assert save.header is not None
        assert save.layout is not None
        try:
            save.id = self._number(save)
            with self._session.meter.measure("stage", save.layout.nbytes):
                save.streamed = self._streamer.stream(flat, save.header, save.layout, save.id)
            self._session.meter.count("streamed")
        except (TierError, CoordinationError) as error:
            save.broken = failure_of(error, self._session.rank)
        self._ops.point("staged")

    def close(self) -> None:
        """Give buffers back; nothing is staged any more."""
        self._streamer.close()

    def warm_up(self, state: Mapping[str, object]) -> int:
        """Get memory for saves of `state` now, and wait for it; returns how many bytes one takes."""
        session = self._session
        flat = flatten_state(state, rank=session.rank, memory=self._memory)
        _, layout = self._planner.plan(flat, count=1, persist=True, created=time.time())
        session.memory.prepare(layout.nbytes, count=_WARM_SLOTS)
        session.memory.wait_prepared(session.timeout_s)
        if any(tensor.is_cuda for tensor in flat.tensors):
            taken = [session.memory.try_scratch(layout.nbytes) for _ in range(_WARM_SLOTS)]
            for slot in taken:
                if slot is not None:
                    self._views(slot, layout, flat)  # page-locks it, which is slow as well
                    session.memory.abandon_slot(slot)
        return layout.nbytes
