"""After a start: what the ranks agreed on, applied to what this rank found near it (P3, adoption)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shardstore.engine.listing import SnapshotInfo
from shardstore.engine.marking import mark_near
from shardstore.engine.session import Session
from shardstore.engine.transitions import of_memory
from shardstore.errors import ShardStoreError
from shardstore.format.gist import Gist
from shardstore.format.records import SnapshotId
from shardstore.tiers.adoption import Adopted
from shardstore.tiers.slots import Slot


class Near(msgspec.Struct, frozen=True):
    """What rank 0 told all ranks of what they can read in memory and on their disks."""

    newest: SnapshotId | None = None
    """The newest restorable one, from whichever tiers: nobody may give up its part of it."""
    whole: tuple[SnapshotId, ...] = ()
    """Every rank of this topology can read these in memory or on its disk."""
    on_disks: tuple[SnapshotId, ...] = ()
    """Every rank has these on its disk."""
    pinned: tuple[SnapshotId, ...] = ()
    """Some rank has a pin beside its copy."""
    damaged: tuple[SnapshotId, ...] = ()
    """Some rank has a mark beside its copy that it was found damaged."""
    unread: tuple[SnapshotId, ...] = ()
    """Some rank could not read its file on the disk, which says nothing of what is in it."""


def protect(
    session: Session, adopted: Adopted, gists: Mapping[SnapshotId, Gist], near: Near
) -> None:
    """Take over what was found: the agreed newest is protected before any slot is reused.

    Args:
        session: Of this rank.
        adopted: Its memory of dead runs.
        gists: Its files on the disk.
        near: The agreement.
    """
    memory = session.memory
    session.pinned |= set(near.pinned)
    session.damaged |= set(near.damaged)
    memory.set_newest_complete(near.newest)
    memory.adopt(adopted.slots)
    whole, on_disks = set(near.whole), set(near.on_disks)
    session.on_disks |= on_disks
    catalog = session.catalog
    session.has_only_near = any(
        catalog is None or catalog.state(snapshot_id) != "committed"
        for snapshot_id in whole - on_disks
    )
    for slot in adopted.slots:
        if slot.id is not None and slot.id in adopted.headers:
            _judge(session, slot, adopted, near, whole, on_disks)
    for snapshot_id, gist in gists.items():
        session.adopted_world_sizes[snapshot_id] = gist.world_size
        if snapshot_id in whole and snapshot_id not in session.complete:
            session.complete[snapshot_id] = _info_of_file(snapshot_id, gist)
    _clear_disk(session, near, whole)
    for snapshot_id in near.pinned:  # a rank may have died while they were pinned
        mark_near(session, snapshot_id, "pinned")
    if session.catalog is None:
        # A crash may have come between "complete" and what it releases.
        for old in session.released_near():
            session.forget(old)


def _judge(
    session: Session,
    slot: Slot,
    adopted: Adopted,
    near: Near,
    whole: set[SnapshotId],
    on_disks: set[SnapshotId],
) -> None:
    """P3's rule for one adopted slot."""
    memory, catalog = session.memory, session.catalog
    assert slot.id is not None
    header = adopted.headers[slot.id][0]
    of_memory(session, "adopted", slot.id, slot.nbytes)
    session.adopted_world_sizes[slot.id] = header.world_size
    is_newest = slot.id == near.newest
    on_root = catalog.state(slot.id) if catalog is not None else "torn"
    is_further_out = on_root == "committed" or slot.id in on_disks
    if on_root == "aborted":
        # Retired now: once the register is gone, a later start would take the copy for whole.
        memory.mark_failed(slot.id)
    elif slot.id in whole:
        session.complete[slot.id] = SnapshotInfo(
            step=header.step,
            id=slot.id.name,
            tiers=("memory",),
            nbytes=slot.nbytes,
            created=header.created,
            pinned=False,
            metadata=header.metadata,
        )
        is_needed = is_newest or slot.id in session.pinned
        superseded = catalog is not None and header.persist and not is_needed
        if is_further_out or superseded:
            slot.is_safe = True
    elif (
        header.world_size != session.world_size
        or is_further_out
        or slot.id in session.marked
        or slot.id in near.unread
    ):
        # Further out, or of use for telling what is missing, or another rank may be able to read its
        # own part later: goes when room is needed.
        slot.is_safe = True
    elif not is_newest:
        slot.is_failed = True


def _info_of_file(snapshot_id: SnapshotId, gist: Gist) -> SnapshotInfo:
    return SnapshotInfo(
        step=gist.step,
        id=snapshot_id.name,
        tiers=("disk",),
        nbytes=gist.nbytes,
        created=gist.created,
        pinned=False,
        metadata=gist.metadata,
    )


def _clear_disk(session: Session, near: Near, whole: set[SnapshotId]) -> None:
    if session.on_disk is None:
        return
    try:
        session.on_disk.clear_leftovers(
            session.catalog,
            newest=near.newest,
            whole=whole | session.pinned,
            unread=near.unread,
            world_size=session.world_size,
        )
    except (ShardStoreError, OSError) as error:
        session.warn("leftovers of earlier runs stay on the disk: %s", error)
