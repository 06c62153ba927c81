"""The numbers of one store, put together."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shardstore.engine.session import PendingSave, Session
from shardstore.engine.stats import StoreStats


def stats_of(session: Session, pending: Sequence[PendingSave]) -> StoreStats:
    """Read the meter, the memory tier and what is on its way."""
    meter, now = session.meter, time.monotonic()
    waiting = [save for save in pending if not save.committed.done()]
    return StoreStats(
        num_saves=meter.number("saves"),
        num_committed=meter.number("committed"),
        num_failed=meter.number("failed"),
        num_skipped=meter.number("skipped"),
        num_streamed=meter.number("streamed"),
        num_spilled=meter.number("spilled"),
        num_pending=len(waiting),
        save_blocked_s=meter.save_blocked_s,
        durable_lag_s=max((now - save.started for save in waiting), default=0.0),
        stage=meter.phase("stage"),
        digest=meter.phase("digest"),
        write=meter.phase("write"),
        commit=meter.phase("commit"),
        memory_used_bytes=session.memory.used_bytes,
        memory_budget_bytes=session.memory.budget_bytes,
    )
