"""Marks beside a snapshot: empty files whose names say something of it that its bytes do not."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

Mark: TypeAlias = Literal["pinned", "damaged"]
"""pinned: never deleted by policy. damaged: found damaged once, so retention does not count it."""

MARKS: Final[tuple[Mark, ...]] = ("pinned", "damaged")


def mark_file(mark: Mark, rank: int | None = None) -> str:
    """Name of a mark: of a snapshot on the root, or of one rank's copy near it."""
    return mark if rank is None else f"rank-{rank:05d}.{mark}"
