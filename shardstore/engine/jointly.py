"""Change live state on all ranks or on none: prepare, vote, apply, meet again."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shardstore.cluster.coordination import Coordinator
from shardstore.engine.verdicts import Note, merge_notes, note_of, raise_note
from shardstore.errors import CoordinationError, CoordinationTimeoutError
from shardstore.state.restore import RestorePlan


def apply_jointly(
    prepare: Callable[[], RestorePlan],
    coordinator: Coordinator,
    name: str,
    *,
    what: str,
    timeout_s: float,
) -> None:
    """Apply one prepared plan per rank; every rank calls it.

    Args:
        prepare: Compares, allocates and decodes; touches nothing live. What it raises on one rank is
            raised on all.
        coordinator: Of this rank.
        name: Used once; equal on all ranks.
        what: What the ranks are doing, for messages.
        timeout_s: Longest wait without progress, before and after the copy.

    Raises:
        ShardStoreError: `prepare` failed somewhere: the like of its error. Live state is unchanged.
        CoordinationTimeoutError: A rank is missing. Before the copy, live state is unchanged.
        CoordinationError: Copying failed somewhere: live state is partly applied.
    """
    plan: RestorePlan | None = None
    error: BaseException | None = None
    try:
        try:
            plan = prepare()
        except BaseException as raised:  # noqa: BLE001 - every rank must hear of it
            error = raised
        phase = f"{what}: comparing"
        note = _meet(coordinator, f"{name}/prepared", error, phase, timeout_s, is_filled=False)
        if note is not None:
            raise_note(note, step=None, cause=error)
        assert plan is not None
        try:
            plan.apply()
        except BaseException as raised:  # noqa: BLE001 - every rank must hear of it
            error = raised
        phase = f"{what}: the barrier after copying"
        note = _meet(coordinator, f"{name}/applied", error, phase, timeout_s, is_filled=True)
        if note is not None:
            raise CoordinationError(
                f"{what} failed while live state was being filled: it is partly applied and must not be "
                f"used. First cause, {note.message}",
                failed_ranks=note.failed_ranks,
                phase=phase,
            ) from error
    finally:
        del plan, error  # a traceback must not keep live tensors alive


def meet_after_copying(
    coordinator: Coordinator,
    name: str,
    value: bytes,
    decide: Callable[[list[bytes]], bytes],
    *,
    phase: str,
    timeout_s: float | None = None,
) -> bytes:
    """The barrier after live state was filled: if it fails, the error says that it was.

    Raises:
        CoordinationError: Of the same class as the barrier's.
    """
    told = "live state is filled on this rank, but it is not known whether it is on all: do not train on it. "
    try:
        return coordinator.gather_decide(name, value, decide, phase=phase, timeout_s=timeout_s)
    except CoordinationTimeoutError as error:
        raise CoordinationTimeoutError(
            told + error.message,
            missing_ranks=error.missing_ranks,
            failed_ranks=error.failed_ranks,
            phase=phase,
        ) from error
    except CoordinationError as error:
        raise CoordinationError(
            told + error.message, failed_ranks=error.failed_ranks, phase=phase
        ) from error


def _meet(
    coordinator: Coordinator,
    name: str,
    error: BaseException | None,
    phase: str,
    timeout_s: float,
    *,
    is_filled: bool,
) -> Note | None:
    """Hear what failed on any rank. An interrupt of this rank goes on once the others know."""

    def merge(values: list[bytes]) -> bytes:
        notes = [msgspec.json.decode(value, type=Note | None) for value in values]
        found = [(rank, note) for rank, note in enumerate(notes) if note is not None]
        return msgspec.json.encode(merge_notes(found) if found else None)

    mine = None if error is None else note_of(error, coordinator.rank)
    value = msgspec.json.encode(mine)
    if is_filled:
        decided = meet_after_copying(
            coordinator, name, value, merge, phase=phase, timeout_s=timeout_s
        )
    else:
        decided = coordinator.gather_decide(name, value, merge, phase=phase, timeout_s=timeout_s)
    if error is not None and not isinstance(error, Exception):
        raise error
    return msgspec.json.decode(decided, type=Note | None)
