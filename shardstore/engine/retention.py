"""Which committed snapshots may go: a pure function of what storage lists."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from shardstore.errors import shown
from shardstore.format.numbers import whole_number
from shardstore.format.records import SnapshotId

_MOST: Final = 1 << 63


class Keep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, repr_omit_defaults=True):
    """Which snapshots to keep: the newest ones, and now and then one for good.

    Kept are the newest `last`, of every step that `every_steps` divides the newest snapshot, and all
    pinned ones. Newest is the order in which they were saved, never the step or a time. Damaged
    snapshots and those saved with `persist=False` do not count, and never make a good one go.
    """

    last: int
    """How many of the newest to keep, at least 1."""
    every_steps: int | None = None
    """Also keep steps that are a multiple of this, 0 among them; None: no others."""

    def __post_init__(self) -> None:
        """Check, and take whole numbers of any library as integers.

        Raises:
            ValueError: Not a positive count. 0 would delete the only good snapshot.
        """
        _force(self, "last", _count(self.last, what="last"))
        if self.every_steps is not None:
            _force(self, "every_steps", _count(self.every_steps, what="every_steps"))


def _force(keep: Keep, name: str, value: int) -> None:
    msgspec.structs.force_setattr(keep, name, value)


def _count(value: object, *, what: str) -> int:
    number = whole_number(value)
    if number is None or not 1 <= number < _MOST:
        raise ValueError(f"Keep({what}=...) must be a count of at least 1, got {shown(value)}")
    return number


def check_keep(keep: object) -> Keep | None:
    """Validate `keep`: None deletes nothing, a count is `Keep(last=count)`.

    Raises:
        ValueError: Neither of these. 0 would delete the only good snapshot.
    """
    if keep is None or isinstance(keep, Keep):
        return keep
    number = whole_number(keep)
    if number is None or not 1 <= number < _MOST:
        raise ValueError(
            "keep must be None (delete nothing), a count of at least 1, or Keep(last=, every_steps=), "
            f"got {shown(keep)}"
        )
    return Keep(last=number)


def plan_deletions(
    snapshots: Iterable[SnapshotId],
    keep: Keep | None,
    *,
    pinned: Collection[SnapshotId] = (),
    damaged: Collection[SnapshotId] = (),
) -> list[SnapshotId]:
    """Which snapshots `keep` lets go, oldest first.

    Ordered by (run, count, nonce), never by time, step or text. Damaged ones do not count. They go
    when they would go if they were whole as well: so a mark, right or wrong, only ever adds to what
    is kept. Call it after a commit only: then the newest is good. What is left is never empty, and
    has a good one if there was one.

    Args:
        snapshots: Committed ones that retention counts: without those of `persist=False`.
        keep: The policy.
        pinned: Never go. They count like others.
        damaged: Found damaged.
    """
    if keep is None:
        return []
    ordered = sorted(set(snapshots), key=lambda i: i.order)
    good = [i for i in ordered if i not in damaged]
    kept = {*pinned, *_kept(good, keep), *_kept(ordered, keep)}
    return [i for i in ordered if i not in kept]


def _kept(ordered: list[SnapshotId], keep: Keep) -> set[SnapshotId]:
    kept = set(ordered[-keep.last :])
    if keep.every_steps is not None:
        newest_of_step = {i.step: i for i in ordered if i.step % keep.every_steps == 0}
        kept.update(newest_of_step.values())
    return kept
