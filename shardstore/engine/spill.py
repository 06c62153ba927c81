"""One rank's shard onto the tiers beyond memory: the disk and the root."""

from __future__ import annotations

from collections.abc import Callable

from shardstore.engine.catalog import SealedShard, read_sealed_header
from shardstore.engine.session import PendingSave, Session
from shardstore.errors import TierError, TierFullError
from shardstore.format.records import SnapshotId
from shardstore.tiers.base import ShardReader, ShardWriter
from shardstore.tiers.fileops import WRITE_BYTES
from shardstore.tiers.transfer import Ring

Create = Callable[[SnapshotId, int], ShardWriter]
"""Begins this rank's file of a snapshot, of so many bytes, on one tier."""


def write_shard(session: Session, create: Create, save: PendingSave) -> bool:
    """Write, make durable and publish this rank's file, while its digests are still being taken.

    Waits until the save is sealed here.

    Returns:
        False if the save failed on this rank meanwhile: nothing is left of the file then.

    Raises:
        TierError: It cannot be written.
    """
    if save.streamed is not None:
        save.sealed.wait()
        if not save.is_sealed:
            return False  # discarded by who failed to seal it
        save.streamed.writer.publish()
        return True
    assert save.id is not None
    assert save.layout is not None
    writer = create(save.id, save.layout.nbytes)
    try:
        if _copy(session, save, writer):
            writer.publish()
            return True
    except BaseException:
        writer.discard()
        raise
    writer.discard()
    return False


def _copy(session: Session, save: PendingSave, writer: ShardWriter) -> bool:
    """Write the data at once, and the header when it is there.

    If the save fails, its slot may be free and in use again before all is written: what was written
    counts only if the slot is a sealed part of this snapshot afterwards.
    """
    slot, layout = save.slot, save.layout
    assert slot is not None
    assert layout is not None
    assert save.id is not None
    for start in range(layout.data_start, layout.nbytes, WRITE_BYTES):
        part = slot.view[start : min(start + WRITE_BYTES, layout.nbytes)]
        writer.write(part, start)
        session.coordinator.progress(len(part))
        part.release()
    save.sealed.wait()
    reader = session.memory.open_shard(save.id) if save.is_sealed else None
    if reader is None:
        return False
    with reader:
        header = memoryview(reader.read(0, layout.data_start))
        writer.write(header, 0)
        header.release()
    return True


def write_to_disk(session: Session, save: PendingSave) -> bool | None:
    """Write to the disk; where it has no room, what the root has as well goes first.

    Returns:
        True: it is there. False: the save failed on this rank meanwhile. None: it cannot be had there,
        and goes to the root directly.

    Raises:
        TierError: It cannot be written, and there is no root.
    """
    on_disk, catalog = session.on_disk, session.catalog
    assert on_disk is not None
    while True:
        try:
            return write_shard(session, on_disk.disk.create_shard, save)
        except TierError as error:
            is_full = isinstance(error, TierFullError)
            # A restore may be about to read what would go.
            can_evict = catalog is not None and is_full and not session.is_restoring
            if can_evict and catalog is not None and on_disk.make_room(catalog):
                continue
            if catalog is None:
                raise
            session.warn_once(
                "disk", "%s. The root gets it directly; a restart reads it from there", error
            )
            return None


def copy_sealed(session: Session, create: Create, snapshot_id: SnapshotId) -> SealedShard:
    """Copy this rank's sealed file one tier outward, from the nearest tier that has it.

    Raises:
        TierError: There is no copy any more, or it cannot be read or written.
        FormatError, CorruptSnapshotError: It is damaged.
    """
    with open_near(session, snapshot_id) as reader:
        sealed = read_sealed_header(reader)
        writer = create(snapshot_id, reader.nbytes)
        try:
            _pass_on(session, reader, writer)
            writer.publish()
        except BaseException:
            writer.discard()
            raise
    return sealed


def open_near(session: Session, snapshot_id: SnapshotId) -> ShardReader:
    """This rank's sealed file in memory, else on the disk.

    Raises:
        TierError: Neither has it, or it cannot be opened.
    """
    found: ShardReader | None = session.memory.open_shard(snapshot_id)
    if found is None and session.on_disk is not None:
        found = session.on_disk.disk.open_shard(snapshot_id)
    if found is None:
        raise TierError(
            f"rank {session.rank} has no copy of {snapshot_id} near it any more",
            tier="memory", key=snapshot_id.name, operation="spill",
        )  # fmt: skip
    return found


def _pass_on(session: Session, reader: ShardReader, writer: ShardWriter) -> None:
    def arrived(data: memoryview, start: int) -> None:
        for begin in range(0, len(data), WRITE_BYTES):
            part = data[begin : begin + WRITE_BYTES]
            writer.write(part, start + begin)
            session.coordinator.progress(len(part))
            part.release()

    def no_place(start: int, stop: int) -> memoryview:
        raise AssertionError(f"mapped memory needs no place for [{start}, {stop})")

    place = no_place if reader.is_mapped else Ring().place
    end = reader.stream(0, reader.nbytes, place, arrived)
    if end != reader.nbytes:
        raise TierError(
            f"{reader.source} ends after {end:,} of {reader.nbytes:,} bytes",
            tier=reader.tier, key=reader.source, operation="read",
        )  # fmt: skip
