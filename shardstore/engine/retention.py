"""Which committed snapshots may go: a pure function of what storage lists."""

from __future__ import annotations

from collections.abc import Iterable

from shardstore.errors import shown
from shardstore.format.numbers import whole_number
from shardstore.format.records import SnapshotId


def check_keep(keep: object) -> int | None:
    """Validate `keep`: None deletes nothing.

    Raises:
        ValueError: Not a positive count. 0 would delete the only good snapshot.
    """
    if keep is None:
        return None
    number = whole_number(keep)
    if number is None or not 1 <= number < 1 << 63:
        raise ValueError(
            f"keep must be None (delete nothing) or a count of at least 1, got {shown(keep)}"
        )
    return number


def plan_deletions(committed: Iterable[SnapshotId], keep: int | None) -> list[SnapshotId]:
    """Snapshots beyond the newest `keep`, oldest first.

    Ordered by (run, count), never by time, step or text. Call it after a commit only: then the newest
    is good, and what is left is never empty.
    """
    if keep is None:
        return []
    ordered = sorted(set(committed), key=lambda snapshot_id: snapshot_id.order)
    return ordered[:-keep]
