"""The run's number (P1): agreed at the first save, claimed on the root by rank 0, in the background."""

from __future__ import annotations

import copy
import threading
import time
from typing import Final

import msgspec

from shardstore.engine.latepublish import publish_late
from shardstore.engine.liveness import RunRecord, entered, record_of_this
from shardstore.engine.marking import keep_pins
from shardstore.engine.otherjobs import find_other_jobs
from shardstore.engine.session import Session
from shardstore.engine.transitions import tell
from shardstore.errors import TierError, without_frames
from shardstore.format.records import SnapshotId

_VISIBLE_WAIT_S: Final = 30.0
"""How long another host may take to show a new file (NFS attribute caches)."""


class _Card(msgspec.Struct, frozen=True):
    """What a rank brings to the agreement."""

    highest_run: int
    held: tuple[SnapshotId, ...]
    """What it has in memory and on its disk."""


class RunNumber:
    """Knows the run's number, or takes part in agreeing on it."""

    def __init__(self, session: Session) -> None:
        """Nothing is agreed before the first save."""
        self._session = session
        self._run: int | None = None
        self._problem: TierError | None = None
        self._failed: tuple[int, Exception] | None = None
        """The last save for which there was no agreement, and why."""

    def ensure(self, count: int) -> int:
        """Take part in the agreement that save `count` needs. Every rank calls it for every save.

        Again for the same save is the same answer.

        Raises:
            TierError: This host does not see the root that rank 0 writes to.
            CoordinationError: The ranks could not agree.
        """
        if self._run is None:
            if self._failed is not None and self._failed[0] == count:
                raise self._failed[1]  # the others have only one agreement for each save
            try:
                self._agree(count)
            except Exception as error:
                self._failed = count, without_frames(copy.copy(error))
                raise
            self._check_shared()
        assert self._run is not None
        if self._problem is not None:
            raise self._problem
        return self._run

    def _agree(self, count: int) -> None:
        session = self._session
        near = {*session.memory.ids()}
        if session.on_disk is not None:
            near |= {*session.on_disk.disk.ids()}
        card = _Card(max(session.highest_adopted_run, 0), tuple(near))

        def claim(values: list[bytes]) -> bytes:
            cards = [msgspec.json.decode(value, type=_Card) for value in values]
            session.held |= {i for card in cards for i in card.held}
            lowest = 1 + max(card.highest_run for card in cards)
            if session.catalog is None:
                return msgspec.json.encode(lowest)
            return msgspec.json.encode(session.catalog.claim_run(lowest, self._record))

        decided = session.coordinator.gather_decide(
            f"run/{count}",
            msgspec.json.encode(card),
            claim,
            phase="agreeing on the run number at the first save",
        )
        self._run = session.run = msgspec.json.decode(decided, type=int)
        if session.catalog is not None and session.rank == 0:
            entered(session.nonce)
            find_other_jobs(session)
            keep_pins(session)
            session.ops.point("publish late")
            late = publish_late(session.catalog, before_run=self._run, writer=session.writer)
            for snapshot_id in late:
                text = "%s of an earlier run was whole and is committed now"
                tell(
                    session.rank, "committed", text, snapshot_id,
                    step=snapshot_id.step, snapshot_id=snapshot_id, tier="root",
                )  # fmt: skip

    def _record(self) -> RunRecord:
        session = self._session
        assert session.catalog is not None
        return record_of_this(
            nonce=session.nonce,
            host=session.host,
            boot_id=session.boot_id,
            started=time.time(),
            location=session.catalog.tier.location,
            memory=session.memory.folder or "",
            others=session.world_size - len(session.local_ranks),
            disk=session.on_disk.disk.location if session.on_disk is not None else "",
            is_exclusive=session.catalog.is_exclusive,
        )

    def _check_shared(self) -> None:
        session = self._session
        if session.catalog is None or self._run is None:
            return
        deadline = time.monotonic() + min(_VISIBLE_WAIT_S, session.timeout_s / 2)
        pause = threading.Event()
        delay_s = 0.01
        while not session.catalog.sees_run(self._run, session.nonce):
            if time.monotonic() >= deadline:
                location = session.catalog.tier.location
                self._problem = TierError(
                    f"root: {location} on host {session.host} (rank {session.rank}) is not the "
                    f"folder that rank 0 writes to: it does not show run {self._run}. Give a root that all "
                    "hosts share, or a remote URL.",
                    tier="root", key=location, operation="share",
                )  # fmt: skip
                return
            pause.wait(delay_s)
            delay_s = min(1.0, delay_s * 2)
