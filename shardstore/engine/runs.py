"""The run's number (P1): agreed at the first save, claimed on the root, in the background."""

from __future__ import annotations

import copy
import time

import msgspec

from shardstore.engine.catalog import Catalog
from shardstore.engine.joining import (
    agree_on_roots,
    complete_commits,
)
from shardstore.engine.latepublish import publish_late
from shardstore.engine.liveness import RootClass, RunRecord, entered, record_of_this
from shardstore.engine.marking import keep_pins
from shardstore.engine.otherjobs import find_other_jobs
from shardstore.engine.session import Session
from shardstore.engine.transitions import tell
from shardstore.engine.waiting import VISIBLE_WAIT_S, wait_until
from shardstore.errors import ShardStoreError, TierError, without_frames
from shardstore.format.records import SnapshotId


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
        decided = session.coordinator.gather_decide(
            f"run/{count}",
            msgspec.json.encode(card),
            self._claim,
            phase="agreeing on the run number at the first save",
        )
        run = lowest = msgspec.json.decode(decided, type=int)
        if session.catalog is not None and (self._is_private or not self._is_shared(run, count)):
            run = agree_on_roots(
                session, f"roots/{count}", highest_run=lowest - 1, record=self._record
            )
        self._run = session.run = run
        if session.catalog is not None and session.rank == 0:
            entered(session.nonce)
            self._settle(session.catalog)

    @property
    def _is_private(self) -> bool:
        """Whether it is known before that hosts have roots of their own; equal on all ranks."""
        session = self._session
        return session.world_size > 1 and (session.shared is False or bool(session.classes))

    def _claim(self, values: list[bytes]) -> bytes:
        """On rank 0: claim a number, unless the first ranks of several roots are to do so together."""
        session = self._session
        cards = [msgspec.json.decode(value, type=_Card) for value in values]
        session.held |= {i for card in cards for i in card.held}
        lowest = 1 + max(card.highest_run for card in cards)
        if session.catalog is None or self._is_private:
            return msgspec.json.encode(lowest)
        return msgspec.json.encode(
            session.catalog.claim_run(lowest, lambda: self._record((), session.rank))
        )

    def _settle(self, catalog: Catalog) -> None:
        """On rank 0: what earlier runs left half done."""
        session = self._session
        for snapshot_id in complete_commits(catalog, warn=session.warn):
            self._tell(
                snapshot_id, "%s of an earlier run was committed on some hosts, and is on all now"
            )
        find_other_jobs(session)
        keep_pins(session)
        session.ops.point("publish late")
        for snapshot_id in publish_late(catalog, before_run=session.run, writer=session.writer):
            self._tell(snapshot_id, "%s of an earlier run was whole and is committed now")

    def _tell(self, snapshot_id: SnapshotId, text: str) -> None:
        tell(
            self._session.rank, "committed", text, snapshot_id,
            step=snapshot_id.step, snapshot_id=snapshot_id, tier="root",
        )  # fmt: skip

    def _record(self, roots: tuple[RootClass, ...], first_rank: int) -> RunRecord:
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
            roots=roots,
            first_rank=first_rank,
        )

    def _is_shared(self, run: int, count: int) -> bool:
        """Whether all ranks see the root that rank 0 writes to; a rank that does not, where it has to, is told.

        Raises:
            TierError, CoordinationError: It cannot be found out.
        """
        session = self._session
        catalog = session.catalog
        assert catalog is not None
        must = session.shared is True or session.is_one_folder or catalog.tier.is_shared is True
        if must or session.world_size == 1:
            if not self._sees(run):
                self._problem = self._not_shared(run)
            return True
        sees, error = False, None
        try:
            sees = self._sees(run)
        except ShardStoreError as raised:
            error = raised
        decided = session.coordinator.gather_decide(
            f"shared/{count}",
            msgspec.json.encode((sees, str(error or ""))),
            _all_see,
            phase="finding out whether hosts share the root",
        )
        return msgspec.json.decode(decided, type=bool)

    def _sees(self, run: int) -> bool:
        session = self._session
        catalog = session.catalog
        assert catalog is not None
        patience_s = min(VISIBLE_WAIT_S, session.timeout_s / 2)
        return wait_until(lambda: catalog.sees_run(run, session.nonce), patience_s)

    def _not_shared(self, run: int) -> TierError:
        session = self._session
        assert session.catalog is not None
        location = session.catalog.tier.location
        return TierError(
            f"root: {location} on host {session.host} (rank {session.rank}) is not the "
            f"folder that rank 0 writes to: it does not show run {run}. Give a root that all "
            "hosts share, or a remote URL.",
            tier="root", key=location, operation="share",
        )  # fmt: skip


def _all_see(values: list[bytes]) -> bytes:
    found = [msgspec.json.decode(value, type=tuple[bool, str]) for value in values]
    for rank, (_, problem) in enumerate(found):
        if problem:
            raise TierError(f"rank {rank}: {problem}", tier="root", operation="share")
    return msgspec.json.encode(all(sees for sees, _ in found))
