"""One rank's shard onto the tiers beyond memory: the disk and the root."""

from __future__ import annotations

from shardstore.engine.progress import Work
from shardstore.engine.sealed import SealedShard, read_sealed_header
from shardstore.engine.session import PendingSave, Session, Target
from shardstore.engine.spillonce import is_for_root, short, write_shared
from shardstore.errors import TierError, TierFullError
from shardstore.format.records import SnapshotId
from shardstore.tiers.base import ShardWriter
from shardstore.tiers.fileops import CHUNK_BYTES, WRITE_BYTES
from shardstore.tiers.transfer import Ring


def write_shard(session: Session, target: Target, save: PendingSave) -> bool:
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
        save.written_bytes = save.nbytes
        return True
    assert save.id is not None
    assert save.layout is not None
    if is_for_root(session, target, save):
        written = write_shared(session, target, save)
        if written is not None:
            return written
    writer = target.create(save.id, save.nbytes)
    is_last = target.tier == session.outermost.tier
    try:
        with _work(session, target, save.step, save.nbytes) as work:
            if _copy(session, save, writer, work, is_last=is_last):
                writer.publish()
                work.complete()
                return True
    except BaseException:
        writer.discard()
        raise
    writer.discard()
    return False


def _work(session: Session, target: Target, step: int, nbytes: int) -> Work:
    return session.progress.begin("write", step=step, total_bytes=nbytes, tier=target.tier)


def _copy(
    session: Session, save: PendingSave, writer: ShardWriter, work: Work, *, is_last: bool
) -> bool:
    """Write the data at once, and the header when it is there.

    If the save fails, its slot may be free and in use again before all is written: what was written
    counts only if the slot is a sealed part of this snapshot afterwards.
    """
    slot, layout = save.slot, save.layout
    assert slot is not None
    assert layout is not None
    assert save.id is not None
    for start in range(layout.data_start, layout.nbytes, WRITE_BYTES):
        save.held_s += session.urgency.give_way(save.id)
        part = slot.view[start : min(start + WRITE_BYTES, layout.nbytes)]
        writer.write(part, start)
        session.coordinator.progress(len(part))
        save.written_bytes += len(part) * is_last
        work.advance(len(part))
        part.release()
    save.sealed.wait()
    save.held_s += session.urgency.give_way(save.id)
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
    target = Target("disk", on_disk.disk.create_shard)
    while True:
        try:
            return write_shard(session, target, save)
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


def pass_on(session: Session, target: Target, save: PendingSave) -> bool:
    """Copy this rank's file from the disk to the root: by way of memory, as long as that still has it.

    Memory is not held meanwhile, however long the root takes: a piece is copied before it is written.

    Returns:
        False if the save failed meanwhile: nothing is left of the file on the root then.

    Raises:
        TierError: The disk has no file any more, or it cannot be read or written.
    """
    snapshot_id = save.id
    assert snapshot_id is not None
    assert session.on_disk is not None
    on_disk = session.on_disk.disk.open_shard(snapshot_id)
    if on_disk is None:
        raise _gone(session, snapshot_id)
    ring = Ring()
    with on_disk:
        if is_for_root(session, target, save):
            written = write_shared(session, target, save, on_disk)
            if written is not None:
                return written
        writer = target.create(snapshot_id, on_disk.nbytes)
        try:
            with _work(session, target, save.step, on_disk.nbytes) as work:

                def arrived(data: memoryview, start: int) -> None:
                    save.held_s += session.urgency.give_way(snapshot_id)
                    writer.write(data, start)
                    session.coordinator.progress(len(data))
                    work.advance(len(data))
                    save.written_bytes += len(data)

                start = 0
                while start < on_disk.nbytes:
                    place = ring.place(start, min(start + CHUNK_BYTES, on_disk.nbytes))
                    if not _take_from_memory(session, snapshot_id, start, place):
                        break
                    arrived(place, start)
                    start += len(place)
                end = on_disk.stream(start, on_disk.nbytes, ring.place, arrived)
                if end != on_disk.nbytes:
                    raise short(on_disk, end)
                writer.publish()
                work.complete()
        except BaseException:
            writer.discard()
            raise
    return True


def _take_from_memory(
    session: Session, snapshot_id: SnapshotId, start: int, place: memoryview
) -> bool:
    reader = session.memory.open_shard(snapshot_id)
    if reader is None:
        return False
    with reader:
        place[:] = reader.read(start, start + len(place))
    return True


def copy_sealed(session: Session, target: Target, snapshot_id: SnapshotId) -> SealedShard:
    """Copy this rank's sealed file from memory to a tier beyond it.

    Raises:
        TierError: Memory has it no more, or it cannot be written.
        FormatError, CorruptSnapshotError: It is damaged.
    """
    reader = session.memory.open_shard(snapshot_id)
    if reader is None:
        raise _gone(session, snapshot_id)
    with reader:
        sealed = read_sealed_header(reader)
        writer = target.create(snapshot_id, reader.nbytes)
        try:
            with _work(session, target, snapshot_id.step, reader.nbytes) as work:
                for start in range(0, reader.nbytes, WRITE_BYTES):
                    session.urgency.give_way(snapshot_id, is_kept=True)
                    part = reader.read(start, min(start + WRITE_BYTES, reader.nbytes))
                    writer.write(part, start)
                    session.coordinator.progress(len(part))
                    work.advance(len(part))
                    part.release()
                writer.publish()
                work.complete()
        except BaseException:
            writer.discard()
            raise
    return sealed


def _gone(session: Session, snapshot_id: SnapshotId) -> TierError:
    return TierError(
        f"rank {session.rank} has no copy of {snapshot_id} near it any more",
        tier="memory", key=snapshot_id.name, operation="spill",
    )  # fmt: skip
