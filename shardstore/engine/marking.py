"""Marks beside snapshots: pins, by one joint decision, and damage, once it is proven."""

from __future__ import annotations

from typing import Final

import msgspec

from shardstore.engine.listing import list_session
from shardstore.engine.session import Failure, Session, failure_of
from shardstore.errors import CoordinationError, ShardStoreError, SnapshotNotFoundError
from shardstore.format.marks import Mark
from shardstore.format.records import SnapshotId

_NO_FAILURE: Final = b"null"


class _Found(msgspec.Struct, frozen=True):
    ids: tuple[SnapshotId, ...] = ()
    near: tuple[SnapshotId, ...] = ()
    """Those that are not on the root: each rank marks its own copy."""
    failure: Failure | None = None


def pin_step(session: Session, step: int, *, name: str, on: bool) -> None:
    """Pin, or unpin, every snapshot at one step; every rank calls it.

    If the ranks die in between, it is pinned: one pin beside any rank's copy is enough.

    Raises:
        SnapshotNotFoundError: No tier has that step.
        CoordinationError: Ranks named different steps, or a mark could not be written or removed.
    """
    verb = "pin" if on else "unpin"
    phase = f"{verb}ning step {step}"
    found = msgspec.json.decode(
        session.coordinator.gather_decide(
            f"{name}/find",
            msgspec.json.encode((step, on)),
            lambda values: msgspec.json.encode(_find(session, values)),
            phase=phase,
        ),
        type=_Found,
    )
    _raise_failure(found.failure, phase)
    if not found.ids:
        raise SnapshotNotFoundError(f"there is no snapshot at step {step} to {verb}", step=step)
    failure = _mark_own(session, found, on=on)
    decided = session.coordinator.gather_decide(
        f"{name}/mark",
        msgspec.json.encode(failure),
        lambda values: next((value for value in values if value != _NO_FAILURE), _NO_FAILURE),
        phase=phase,
    )
    _raise_failure(msgspec.json.decode(decided, type=Failure | None), phase)


def _raise_failure(failure: Failure | None, phase: str) -> None:
    if failure is not None:
        raise CoordinationError(
            f"{phase} failed: {failure.describe()}", failed_ranks=failure.failed_ranks, phase=phase
        )


def _find(session: Session, values: list[bytes]) -> _Found:
    """On rank 0: what is listed at that step; what is on the root is marked there at once."""
    asked = [msgspec.json.decode(value, type=tuple[int, bool]) for value in values]
    if any(ask != asked[0] for ask in asked):
        steps = sorted({f"{'pin' if on else 'unpin'} {step}" for step, on in asked})
        return _Found(failure=Failure(0, f"ranks asked for different things: {steps}", (0,)))
    step, on = asked[0]
    catalog = session.catalog
    try:
        ids = {SnapshotId.parse(info.id) for info in list_session(session) if info.step == step}
        listed = {i for i in ids if i is not None}
        on_root: set[SnapshotId] = set()
        if catalog is not None:
            with session.retention_lock:
                on_root = {i for i in catalog.ids() if i.step == step and catalog.is_listed(i)}
                for snapshot_id in on_root:
                    (catalog.pin if on else catalog.unpin)(snapshot_id)
    except (ShardStoreError, OSError) as error:
        return _Found(failure=failure_of(error, 0))
    near = listed - on_root
    return _Found(_sorted(listed | on_root), _sorted(near))


def _sorted(ids: set[SnapshotId]) -> tuple[SnapshotId, ...]:
    return tuple(sorted(ids, key=lambda i: i.order))


def _mark_own(session: Session, found: _Found, *, on: bool) -> Failure | None:
    """This rank's part: marks beside its own copies of what is not on the root."""
    failure = None
    for snapshot_id in found.near if on else found.ids:
        try:
            for tier in (session.memory, session.on_disk.disk if session.on_disk else None):
                if tier is not None and on:
                    tier.put_mark(snapshot_id, "pinned")
                elif tier is not None:
                    tier.drop_mark(snapshot_id, "pinned")
        except ShardStoreError as error:
            failure = failure_of(error, session.rank)
        with session.lock:
            (session.pinned.add if on else session.pinned.discard)(snapshot_id)
    return failure


def mark_near(session: Session, snapshot_id: SnapshotId, mark: Mark) -> None:
    """Put a mark beside this rank's own copies; that there is none is fine, and failing is told."""
    for tier in (session.memory, session.on_disk.disk if session.on_disk else None):
        try:
            if tier is not None:
                tier.put_mark(snapshot_id, mark)
        except ShardStoreError as error:
            session.warn("%s", error)


def keep_pins(session: Session, snapshot_id: SnapshotId | None = None) -> None:
    """On rank 0, before something is committed: what is pinned near the ranks is to be pinned on the root.

    Args:
        session: Of rank 0.
        snapshot_id: What is about to be committed; None: whatever is torn there.
    """
    catalog = session.catalog
    if catalog is None:
        return
    try:
        for pinned in sorted(session.pinned, key=lambda i: i.order):
            wanted = snapshot_id is None or pinned == snapshot_id
            if wanted and catalog.tier.list_ranks(pinned):
                catalog.tier.put_mark(pinned, "pinned")
    except (ShardStoreError, OSError) as error:
        session.warn("a pinned snapshot may not be pinned on the root: %s", error)


def mark_damage(session: Session) -> None:
    """Say beside what was found damaged that it was, now that this run writes to its tiers anyhow."""
    with session.lock:
        ids, session.unmarked = session.unmarked, set()
    for snapshot_id in ids:
        try:
            if session.catalog is None:
                mark_near(session, snapshot_id, "damaged")
            elif session.rank == 0:
                session.catalog.mark_damaged(snapshot_id)
        except (ShardStoreError, OSError) as error:
            session.warn("%s was found damaged, and cannot be marked: %s", snapshot_id, error)
