"""What this rank can restore from near it: memory and its disk."""

from __future__ import annotations

from shardstore.engine.choose import Holding, Inventory
from shardstore.engine.session import Session
from shardstore.errors import CorruptSnapshotError, FormatError
from shardstore.format.records import SnapshotId


def take_inventory(session: Session, step: int | None) -> Inventory:
    """What this rank can offer from memory and its disk, headers checked; of one step, if given."""
    readable: list[SnapshotId] = []
    for snapshot_id in session.memory.ids():
        if step is not None and snapshot_id.step != step:
            continue
        try:
            session.memory.check_header(snapshot_id)
        except (FormatError, CorruptSnapshotError) as error:
            session.warn("%s", error)
            continue
        readable.append(snapshot_id)
    if session.on_disk is not None:
        readable += [i for i in session.on_disk.gists(step) if i not in readable]
    holdings = tuple(
        Holding(
            snapshot_id,
            session.adopted_world_sizes.get(snapshot_id, session.world_size),
            is_complete=snapshot_id in session.complete or snapshot_id in session.marked,
        )
        for snapshot_id in readable
    )
    return Inventory(holdings, tuple(session.marked), tuple(session.aborted))
