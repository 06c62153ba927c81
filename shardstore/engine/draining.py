"""Wait for the outcomes of saves, and report how many bytes are still on their way."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from shardstore.engine.session import PendingSave, Session


def drain(session: Session, pending: Sequence[PendingSave], timeout_s: float | None) -> bool:
    """Wait until `pending`, oldest first, are settled; False if that took too long.

    A grace period that begins meanwhile ends the wait in time.
    """
    tier = session.outermost.tier if session.has_outer else "memory"
    total_bytes = sum(save.nbytes for save in pending)
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    with session.progress.begin(
        "drain", step=pending[-1].step, total_bytes=total_bytes, tier=tier
    ) as work:
        for save in pending:
            left = session.in_time(max(0.0, deadline - time.monotonic()))
            while not save.settled.wait(_finite(min(left, work.every_s))):
                left = session.in_time(max(0.0, deadline - time.monotonic()))
                if left == 0.0:
                    return False
                work.reach(sum(map(_done_bytes, pending)))
            work.reach(sum(map(_done_bytes, pending)))
        work.complete()
    return True


def _finite(seconds: float) -> float | None:
    return None if seconds == math.inf else seconds


def _done_bytes(save: PendingSave) -> int:
    """A failed save has nothing left to do either."""
    return save.nbytes if save.settled.is_set() else min(save.written_bytes, save.nbytes)
