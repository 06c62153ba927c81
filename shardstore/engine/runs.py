"""The run's number (P1): agreed at the first save, claimed on the root by rank 0, in the background."""

from __future__ import annotations

import threading
import time
from typing import Final

import msgspec

from shardstore.engine.session import Session
from shardstore.engine.transitions import tell
from shardstore.errors import TierError

_VISIBLE_WAIT_S: Final = 30.0
"""How long another host may take to show a new file (NFS attribute caches)."""


class RunNumber:
    """Knows the run's number, or takes part in agreeing on it."""

    def __init__(self, session: Session) -> None:
        """Nothing is agreed before the first save."""
        self._session = session
        self._run: int | None = None
        self._problem: TierError | None = None

    def ensure(self, count: int) -> int:
        """Take part in the agreement that save `count` needs. Every rank calls it for every save.

        Raises:
            TierError: This host does not see the root that rank 0 writes to.
            CoordinationError: The ranks could not agree.
        """
        if self._run is None:
            self._agree(count)
            self._check_shared()
        assert self._run is not None
        if self._problem is not None:
            raise self._problem
        return self._run

    def _agree(self, count: int) -> None:
        session = self._session
        highest = max(session.highest_adopted_run, 0)

        def claim(values: list[bytes]) -> bytes:
            lowest = 1 + max(msgspec.json.decode(value, type=int) for value in values)
            if session.catalog is None:
                return msgspec.json.encode(lowest)
            run = session.catalog.claim_run(
                lowest, nonce=session.nonce, host=session.host, boot_id=session.boot_id
            )
            return msgspec.json.encode(run)

        decided = session.coordinator.gather_decide(
            f"run/{count}",
            msgspec.json.encode(highest),
            claim,
            phase="agreeing on the run number at the first save",
        )
        self._run = msgspec.json.decode(decided, type=int)
        if session.catalog is not None and session.rank == 0:
            late = session.catalog.publish_late(before_run=self._run, writer=session.writer)
            for snapshot_id in late:
                text = "%s of an earlier run was whole and is committed now"
                tell(
                    session.rank, "committed", text, snapshot_id,
                    step=snapshot_id.step, snapshot_id=snapshot_id, tier="root",
                )  # fmt: skip

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
