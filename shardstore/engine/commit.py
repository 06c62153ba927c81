"""The outcome of a save beyond memory: the register on the root, then one write-once key (P2, P4).

Where there is only a disk beyond memory, the key alone is the outcome.
"""

from __future__ import annotations

import msgspec

from shardstore.cluster.coordination import Stopped
from shardstore.engine.diverged import warn_of_divergence
from shardstore.engine.entries import collect_entries
from shardstore.engine.otherjobs import has_successor
from shardstore.engine.pruning import find_removable, take_off
from shardstore.engine.sealed import SealedShard, manifest_of
from shardstore.engine.session import Completion, Failure, PendingSave, Session, failure_of
from shardstore.engine.spillonce import SHARED
from shardstore.errors import (
    CoordinationTimeoutError,
    ShardStoreError,
)
from shardstore.format.records import SnapshotId


class Outcome(msgspec.Struct, frozen=True):
    """What became of a save, equal on all ranks."""

    failure: Failure | None = None
    """None: committed."""
    nbytes: int = 0
    """Of all ranks' shards."""
    metadata: object = None
    """Rank 0's."""
    released: tuple[SnapshotId, ...] = ()
    """Older snapshots that retention has taken off the list."""


def fail_key(save: PendingSave) -> str:
    """Where the first rank that fails says so."""
    return f"fail/{save.count}"


def agree_complete(session: Session, save: PendingSave) -> Completion:
    """Wait until all ranks have sealed; every rank gets the same answer.

    Raises:
        CoordinationError: The store is unreachable: the answer is unknown.
    """
    key = f"complete/{save.count}"
    try:
        if session.rank == 0:
            name = str(save.count)
            found = collect_entries(session, name, what=save.label, stop=fail_key(save))
            save.shards = found.shards or None
            diverged = {rank for groups in found.diverged for ranks in groups for rank in ranks}
            save.diverged = found.diverged
            session.ops.point("post complete")
            completion = Completion(found.failure, found.in_memory, tuple(sorted(diverged)))
            return _obey(session, key, completion)
        heard = session.coordinator.wait(
            [key], phase=f"{save.label}: waiting for all ranks to seal", ranks=[0]
        )
    except CoordinationTimeoutError as error:
        if not error.missing_ranks:
            raise
        return _obey(session, key, Completion(failure_of(error, session.rank)))
    assert not isinstance(heard, Stopped)
    return msgspec.json.decode(heard[0], type=Completion)


def _obey(session: Session, key: str, proposal: Completion) -> Completion:
    stored = session.coordinator.propose(key, msgspec.json.encode(proposal))
    return msgspec.json.decode(stored, type=Completion)


def commit_on_rank_0(session: Session, save: PendingSave) -> Outcome:
    """Wait for all shards to be durable, publish, and decide the outcome. Whoever comes first does it.

    Raises:
        CoordinationError: The outcome could not be told (the store is gone).
    """
    with save.committing:
        if save.outcome is None:
            save.outcome = _commit(session, save)
        return save.outcome


def _commit(session: Session, save: PendingSave) -> Outcome:
    assert save.completion is not None
    failure = save.completion.failure or _wait_durable(session, save)
    outcome = _publish(session, save) if failure is None else Outcome(failure)
    if outcome.failure is not None and not _close_register(session, save, outcome.failure):
        outcome = _committed(save)
    if outcome.failure is None:
        _warn_if_replaced(session, save)
        warn_of_divergence(session, save)
        outcome = msgspec.structs.replace(outcome, released=_release_old(session, save))
    return _decide(session, save, outcome)


def _warn_if_replaced(session: Session, save: PendingSave) -> None:
    """Say once that this is another folder than the one that the run began with."""
    if session.own_catalog is None or save.id is None:
        return
    try:
        is_same = session.own_catalog.sees_run(save.id.run, session.nonce)
    except ShardStoreError:
        return  # nothing is known
    if not is_same:
        session.warn_once(
            "replaced",
            "%s is not what it was when this run began: it was emptied, or its file system was unmounted. "
            "Saves go to what is there now; snapshots from before are not in it",
            session.own_catalog.tier.location,
        )


def _release_old(session: Session, save: PendingSave) -> tuple[SnapshotId, ...]:
    """Retention, first half: take old snapshots off the list, now that a successor is on it."""
    if session.keep is None:
        return ()
    if session.catalog is None:
        return tuple(session.released_near(*([save.id] if save.id is not None else [])))
    with session.retention_lock:
        if session.is_restoring:
            return ()  # the next commit does it
        try:
            if has_successor(session):
                return ()
            removable = find_removable(
                session.catalog,
                session.keep,
                damaged=session.damaged,
                spare_runs=session.other_runs,
            )
        except (ShardStoreError, OSError) as error:
            session.warn("which snapshots are old cannot be seen, it is tried again: %s", error)
            return ()
        return tuple(
            register.id
            for register in removable
            if register.id not in session.pinned and _take_off(session, register.id)
        )


def _take_off(session: Session, snapshot_id: SnapshotId) -> bool:
    assert session.catalog is not None
    try:
        return take_off(session.catalog, snapshot_id, writer=session.writer)
    except (ShardStoreError, OSError) as error:
        session.warn("an old snapshot could not be deleted, it is tried again: %s", error)
        return False


def _wait_durable(session: Session, save: PendingSave) -> Failure | None:
    ranks = list(range(session.world_size))
    try:
        heard = session.coordinator.wait(
            [f"durable/{save.count}/{rank}" for rank in ranks],
            phase=f"{save.label}: waiting for all ranks to write",
            ranks=ranks,
            stop=fail_key(save),
        )
    except CoordinationTimeoutError as error:
        return failure_of(error, session.rank)
    if isinstance(heard, Stopped):
        return msgspec.json.decode(heard.value, type=Failure)
    save.shared_ranks = frozenset(rank for rank, said in enumerate(heard) if said == SHARED)
    return None


def _on_root(save: PendingSave) -> dict[int, SealedShard]:
    """The files as the ranks have written them."""
    return {
        rank: shard.shared if rank in save.shared_ranks and shard.shared is not None else shard
        for rank, shard in (save.shards or {}).items()
    }


def _publish(session: Session, save: PendingSave) -> Outcome:
    assert save.shards is not None
    if session.catalog is None:
        return _committed(save)  # on the disks of all ranks
    try:
        session.ops.point("publish")
        is_exclusive = session.catalog.is_exclusive
        manifest = manifest_of(_on_root(save), writer=session.writer, is_exclusive=is_exclusive)
        if session.catalog.publish(manifest):
            return _committed(save)
    except (ShardStoreError, OSError) as error:
        if not session.catalog.is_exclusive:
            raise  # it may still arrive, over whatever would close the register: the outcome is unknown
        return Outcome(failure_of(error, session.rank))
    return Outcome(Failure(session.rank, "another process closed this attempt as aborted"))


def _close_register(session: Session, save: PendingSave, failure: Failure) -> bool:
    """Make sure that nobody commits a failed attempt later; False if it was committed already.

    Raises:
        TierError: It cannot be found out whether it is.
    """
    if save.id is None or session.catalog is None:
        return True
    try:
        return session.catalog.abort(save.id, reason=failure.describe(), writer=session.writer)
    except (ShardStoreError, OSError) as error:
        # In doubt: the register itself is the answer. If it cannot be read either, this raises, the
        # outcome is unknown here, and nobody removes a byte.
        state = session.catalog.settled_state(save.id)
        if state == "committed":
            return False
        if state == "torn" and session.rank != 0:
            raise  # rank 0 may still publish it
        session.warn("%s could not be closed as aborted: %s", save.id, error)
        return True


def _committed(save: PendingSave) -> Outcome:
    nbytes = sum(shard.nbytes for shard in _on_root(save).values())
    return Outcome(nbytes=nbytes, metadata=save.metadata)


def _decide(session: Session, save: PendingSave, outcome: Outcome) -> Outcome:
    """Write the outcome once and obey what is stored."""
    key = f"outcome/{save.count}"
    session.ops.point("post outcome")
    stored = session.coordinator.propose(key, msgspec.json.encode(outcome))
    return msgspec.json.decode(stored, type=Outcome)


def settle_elsewhere(session: Session, save: PendingSave) -> Outcome:
    """Wait for rank 0's decision; at the deadline close the register and decide oneself.

    Raises:
        CoordinationError: The store is unreachable, or the register that counts cannot be seen from here:
            the outcome is unknown.
    """
    try:
        heard = session.coordinator.wait(
            [f"outcome/{save.count}"], phase=f"{save.label}: waiting for the commit", ranks=[0]
        )
    except CoordinationTimeoutError as error:
        if not error.missing_ranks:
            raise
        if session.catalog is not None and not session.catalog.is_exclusive:
            raise  # nothing keeps rank 0 from committing after this rank closed the register
        if session.classes:
            # Rank 0 may have committed on its own root, which this rank does not see: nothing is aborted.
            raise
        failure = failure_of(error, session.rank)
        if not _close_register(session, save, failure):
            return _decide(session, save, Outcome())
        return _decide(session, save, Outcome(failure))
    assert not isinstance(heard, Stopped)
    return msgspec.json.decode(heard[0], type=Outcome)
