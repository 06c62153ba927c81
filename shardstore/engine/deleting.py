"""Delete the snapshots of one step from all tiers, by one joint decision."""

from __future__ import annotations

from typing import Final

import msgspec

from shardstore.engine.catalog import Catalog
from shardstore.engine.latepublish import whole_shards
from shardstore.engine.session import Failure, Session, failure_of
from shardstore.errors import CoordinationError, ShardStoreError, SnapshotNotFoundError
from shardstore.format.records import SnapshotId

_REASON: Final = "deleted by the user"


class _Request(msgspec.Struct, frozen=True):
    step: int
    ids: tuple[SnapshotId, ...]


class _Found(msgspec.Struct, frozen=True):
    ids: tuple[SnapshotId, ...] = ()
    failure: Failure | None = None


def delete_step(session: Session, step: int, *, name: str) -> None:
    """Delete every snapshot at one step, from all tiers; every rank calls it.

    Memory copies go first: if the ranks die in between, a restart finds the snapshot on the root, whole
    and still listed, never a deleted one in memory.

    Raises:
        SnapshotNotFoundError: No tier has that step.
        CoordinationError: Ranks named different steps, or storage failed on rank 0.
    """
    coordinator = session.coordinator
    near = set(session.memory.ids())
    if session.on_disk is not None:
        near |= set(session.on_disk.disk.ids())
    request = _Request(step, tuple(i for i in near if i.step == step))
    found = msgspec.json.decode(
        coordinator.gather_decide(
            f"{name}/find",
            msgspec.json.encode(request),
            lambda values: msgspec.json.encode(_find(session, values)),
            phase=f"deleting step {step}",
        ),
        type=_Found,
    )
    _raise_failure(found, step)
    if not found.ids:
        raise SnapshotNotFoundError(f"there is no snapshot at step {step} to delete", step=step)
    session.ops.point("delete near")
    for snapshot_id in found.ids:
        session.forget(snapshot_id)
    removed = msgspec.json.decode(
        coordinator.gather_decide(
            f"{name}/remove",
            b"",
            lambda _: msgspec.json.encode(_remove(session, found.ids)),
            phase=f"deleting step {step}",
        ),
        type=_Found,
    )
    _raise_failure(removed, step)


def _raise_failure(found: _Found, step: int) -> None:
    if found.failure is not None:
        raise CoordinationError(
            f"deleting step {step} failed: {found.failure.describe()}",
            failed_ranks=found.failure.failed_ranks,
            phase="delete",
        )


def _find(session: Session, values: list[bytes]) -> _Found:
    """On rank 0: what there is at that step in any tier."""
    requests = [msgspec.json.decode(value, type=_Request) for value in values]
    steps = sorted({request.step for request in requests})
    if len(steps) > 1:
        return _Found(failure=Failure(0, f"ranks asked to delete different steps: {steps}", (0,)))
    wanted = {i for request in requests for i in request.ids}
    try:
        if session.catalog is not None:
            on_root = [i for i in session.catalog.ids() if i.step == steps[0]]
            wanted |= {i for i in on_root if _is_restorable(session.catalog, i)}
    except (ShardStoreError, OSError) as error:
        return _Found(failure=failure_of(error, 0))
    return _Found(tuple(sorted(wanted, key=lambda i: i.order)))


def _is_restorable(catalog: Catalog, snapshot_id: SnapshotId) -> bool:
    """Whether it is listed, or what a start would commit after all."""
    if catalog.state(snapshot_id) != "torn":
        return catalog.is_listed(snapshot_id)
    try:
        return whole_shards(catalog, snapshot_id) is not None
    except ShardStoreError:
        return False


def _remove(session: Session, ids: tuple[SnapshotId, ...]) -> _Found:
    """On rank 0: close every register, then remove the bytes."""
    catalog = session.catalog
    if catalog is None:
        return _Found()
    try:
        session.ops.point("delete on root")
        with session.retention_lock:
            there = set(catalog.ids())
            for snapshot_id in ids:
                if snapshot_id not in there:
                    continue
                if catalog.state(snapshot_id) == "torn":
                    catalog.abort(snapshot_id, reason=_REASON, writer=session.writer)
                catalog.unlist(snapshot_id, reason=_REASON, writer=session.writer)
                catalog.try_remove(snapshot_id)
    except (ShardStoreError, OSError) as error:
        return _Found(failure=failure_of(error, 0))
    return _Found()
