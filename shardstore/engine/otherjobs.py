"""Two jobs on one root: their snapshots are never mixed, and each side says so once."""

from __future__ import annotations

from shardstore.engine.liveness import judge
from shardstore.engine.session import Session
from shardstore.errors import ShardStoreError

_REMEDY = (
    "Their snapshots are never mixed, but a restore takes the newest of both: give each job a root"
)


def find_other_jobs(session: Session) -> None:
    """At the first save, on rank 0: tell of earlier runs that are still alive, and spare them for good.

    That one ends later changes nothing: what it left is the result of another job.
    """
    catalog = session.catalog
    assert catalog is not None
    try:
        for run in catalog.tier.run_numbers():
            record = catalog.run_record(run) if run < session.run else None
            if record is None or record.nonce == session.nonce:
                continue  # nobody's, or a number that this run gave up for a higher one
            if judge(record, catalog.tier.location).liveness == "alive":
                session.other_runs.add(run)
                session.warn_once(
                    f"run {run}",
                    "another job works on %s: run %d, %s. This one deletes none of its snapshots. %s.",
                    catalog.tier.location, run, record.who, _REMEDY,
                )  # fmt: skip
    except (ShardStoreError, OSError) as error:
        session.warn("whether other jobs work on the root cannot be seen: %s", error)


def has_successor(session: Session) -> bool:
    """Whether a later run works on this root: then this one deletes nothing any more. On rank 0.

    Raises:
        TierError: The root cannot be read.
    """
    catalog = session.catalog
    assert catalog is not None
    later = [run for run in catalog.tier.run_numbers() if run > session.run > 0]
    if not later:
        return False
    record = catalog.run_record(max(later))
    session.warn_once(
        "successor",
        "another job has started on %s since: run %d, %s. This one, run %d, deletes nothing any more. %s.",
        catalog.tier.location, max(later), record.who if record else "of which no record is left",
        session.run, _REMEDY,
    )  # fmt: skip
    return True
