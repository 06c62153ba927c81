"""Votes and verdicts of a restore, and the errors that every rank raises alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NoReturn

import msgspec

from shardstore.engine.choose import Candidate, Inventory, Skip
from shardstore.engine.session import Failure
from shardstore.errors import (
    CoordinationError,
    CorruptSnapshotError,
    FormatVersionError,
    ShardStoreError,
    SnapshotNotFoundError,
    StateMismatchError,
    TopologyMismatchError,
    UnsupportedStateError,
)
from shardstore.format.records import SnapshotId

_MAX_RANKS_SHOWN: Final = 4

Kind = Literal[
    "absent", "corrupt", "version", "mismatch", "topology", "unsupported", "coordination", "error"
]


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as ranks tell it to each other."""

    kind: Kind
    message: str
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    saved: str = ""
    current: str = ""
    path: str = ""
    type: str = ""
    tier: str | None = None
    file: str | None = None
    tensor: str | None = None
    failed_ranks: tuple[int, ...] = ()


class Ask(msgspec.Struct, frozen=True):
    """What one rank brings to a restore."""

    step: int | None
    required: bool
    partial: bool
    strict: bool
    fallback: bool
    count: int
    inventory: Inventory
    problem: Note | None = None
    """This rank cannot take part: say so before anything else."""

    @property
    def arguments(self) -> tuple[object, ...]:
        """What must be equal on all ranks."""
        return (self.step, self.required, self.partial, self.strict, self.fallback)


class Vote(msgspec.Struct, frozen=True):
    """What one rank says of a candidate."""

    tier: str = ""
    metadata: object = None
    damage: Note | None = None
    """Pass over it."""
    is_proven: bool = False
    """Bytes were read, and they are not those that were saved: more than a device that gives none."""
    refusal: Note | None = None
    """Raise on all ranks."""


class Verdict(msgspec.Struct, frozen=True):
    """What all ranks do next."""

    action: Literal["try", "apply", "absent", "raise"]
    candidate: Candidate | None = None
    note: Note | None = None
    skipped: tuple[Skip, ...] = ()
    tiers: dict[str, int] = {}
    """How many ranks read from which tier."""
    metadata: object = None
    count: int = 0
    """Save count that all ranks go on from."""
    passed_over: SnapshotId | None = None
    """Some rank could not read this one, just now."""
    is_proven: bool = False
    """It is damaged, and not merely out of reach."""


def note_of(error: BaseException, rank: int) -> Note:
    """Describe an exception of this rank so that the others can raise its like."""
    if isinstance(error, StateMismatchError):
        topology = isinstance(error, TopologyMismatchError)
        return Note(
            "topology" if topology else "mismatch",
            str(error),
            missing=error.missing,
            unexpected=error.unexpected,
            mismatched=error.mismatched,
            saved=error.saved if isinstance(error, TopologyMismatchError) else "",
            current=error.current if isinstance(error, TopologyMismatchError) else "",
        )
    if isinstance(error, UnsupportedStateError):
        return Note("unsupported", str(error), path=error.path, type=error.type)
    if isinstance(error, CorruptSnapshotError):
        return Note("corrupt", str(error), tier=error.tier, file=error.file, tensor=error.tensor)
    if isinstance(error, FormatVersionError):
        return Note("version", str(error))
    if isinstance(error, ShardStoreError):
        return Note("error", str(error), failed_ranks=(rank,))
    return Note("error", f"{type(error).__name__}: {error}", failed_ranks=(rank,))


def merge_notes(notes: Sequence[tuple[int, Note]]) -> Note:
    """One note out of those of several ranks; equal texts are said once."""
    kinds = {note.kind for _, note in notes}
    order: tuple[Kind, ...] = ("error", "unsupported", "version", "topology", "mismatch", "corrupt")
    kind = next(k for k in (*order, *kinds) if k in kinds)
    texts: dict[str, list[int]] = {}
    for rank, note in notes:
        texts.setdefault(note.message, []).append(rank)
    parts = [f"{_ranks(ranks)}: {text}" for text, ranks in texts.items()]
    shown = parts[:_MAX_RANKS_SHOWN]
    if parts[_MAX_RANKS_SHOWN:]:
        shown.append(f"and other texts on {len(parts) - _MAX_RANKS_SHOWN} more ranks")
    first = next(note for _, note in notes if note.kind == kind)
    return Note(
        kind,
        "\n".join(shown),
        missing=_union(note.missing for _, note in notes),
        unexpected=_union(note.unexpected for _, note in notes),
        mismatched=_union(note.mismatched for _, note in notes),
        saved=first.saved,
        current=first.current,
        path=first.path,
        type=first.type,
        tier=first.tier,
        file=first.file,
        tensor=first.tensor,
        failed_ranks=tuple(rank for rank, _ in notes),
    )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_RANKS_SHOWN]))
    more = f" and {len(ranks) - _MAX_RANKS_SHOWN} more" if ranks[_MAX_RANKS_SHOWN:] else ""
    return f"rank{'s' if ranks[1:] else ''} {shown}{more}"


def _union(groups: object) -> tuple[str, ...]:
    seen: dict[str, None] = {}
    for group in groups:  # type: ignore[attr-defined]
        seen.update(dict.fromkeys(group))
    return tuple(seen)


def raise_note(note: Note, *, step: int | None, cause: BaseException | None = None) -> NoReturn:
    """Raise the error that a note stands for."""
    raise _error_of(note, step) from cause


def _error_of(note: Note, step: int | None) -> ShardStoreError:
    if note.kind == "absent":
        return SnapshotNotFoundError(note.message, step=step)
    if note.kind == "corrupt":
        return CorruptSnapshotError(
            note.message, tier=note.tier, file=note.file, tensor=note.tensor
        )
    if note.kind == "version":
        return FormatVersionError(note.message)
    if note.kind == "unsupported":
        return UnsupportedStateError(note.message, path=note.path, type=note.type)
    differences = {
        "missing": note.missing,
        "unexpected": note.unexpected,
        "mismatched": note.mismatched,
    }
    if note.kind == "topology":
        return TopologyMismatchError(
            note.message, saved=note.saved, current=note.current, **differences
        )
    if note.kind == "mismatch":
        return StateMismatchError(note.message, **differences)
    return CoordinationError(note.message, failed_ranks=note.failed_ranks, phase="restore")


def failure_note(failure: Failure, message: str) -> Note:
    """A note that some rank failed."""
    return Note("coordination", message, failed_ranks=failure.failed_ranks or (failure.rank,))
