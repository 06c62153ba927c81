"""One rank's shard onto the tiers beyond memory: the disk and the root."""

from __future__ import annotations

from collections.abc import Callable

from shardstore.engine.pieces import num_bytes_with_header, write_pieces
from shardstore.engine.progress import Work
from shardstore.engine.sealed import SealedShard, read_sealed_header
from shardstore.engine.session import PendingSave, Session, Target
from shardstore.engine.spillonce import is_for_root, short, write_shared
from shardstore.errors import TierError, TierFullError
from shardstore.format.records import SnapshotId
from shardstore.tiers.base import ShardReader, ShardWriter
from shardstore.tiers.fileops import CHUNK_BYTES
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
    snapshot_id = save.id
    view = slot.view

    def give_way() -> None:
        save.held_s += session.urgency.give_way(snapshot_id)

    def written(num_bytes: int) -> None:
        session.coordinator.progress(num_bytes)
        save.count_written(num_bytes * is_last)
        work.advance(num_bytes)

    def write(start: int, stop: int) -> None:
        part = view[start:stop]
        writer.write(part, start)
        written(len(part))
        part.release()

    first = num_bytes_with_header(writer, layout.data_start, layout.nbytes)
    write_pieces(writer, first, layout.nbytes, write, give_way)
    save.sealed.wait()
    reader = session.memory.open_shard(save.id) if save.is_sealed else None
    if reader is None:
        return False
    with reader:

        def write_sealed(start: int, stop: int) -> None:
            part = memoryview(reader.read(start, stop))
            writer.write(part, start)
            written(max(0, stop - max(start, layout.data_start)))
            part.release()

        write_pieces(writer, 0, first, write_sealed, give_way)
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
    with on_disk:
        if is_for_root(session, target, save):
            written = write_shared(session, target, save, on_disk)
            if written is not None:
                return written
        writer = target.create(snapshot_id, on_disk.nbytes)
        try:
            with _work(session, target, save.step, on_disk.nbytes) as work:

                def give_way() -> None:
                    save.held_s += session.urgency.give_way(snapshot_id)

                def sent(num_bytes: int) -> None:
                    session.coordinator.progress(num_bytes)
                    work.advance(num_bytes)
                    save.count_written(num_bytes)

                if writer.num_parallel > 1:
                    _pass_pieces(session, snapshot_id, on_disk, writer, sent, give_way)
                else:
                    _pass_in_order(session, snapshot_id, on_disk, writer, sent, give_way)
                writer.publish()
                work.complete()
        except BaseException:
            writer.discard()
            raise
    return True


def _pass_in_order(
    session: Session,
    snapshot_id: SnapshotId,
    on_disk: ShardReader,
    writer: ShardWriter,
    sent: Callable[[int], None],
    give_way: Callable[[], None],
) -> None:
    """Piece by piece, the disk read ahead."""
    ring = Ring()

    def arrived(data: memoryview, start: int) -> None:
        give_way()
        writer.write(data, start)
        sent(len(data))

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


def _pass_pieces(
    session: Session,
    snapshot_id: SnapshotId,
    on_disk: ShardReader,
    writer: ShardWriter,
    sent: Callable[[int], None],
    give_way: Callable[[], None],
) -> None:
    """Several pieces at a time, each read by who sends it."""

    def send(start: int, stop: int) -> None:
        piece = memoryview(bytearray(stop - start))
        if not _take_from_memory(session, snapshot_id, start, piece):
            piece = memoryview(on_disk.read(start, stop))
            if len(piece) != stop - start:
                raise short(on_disk, start + len(piece))
        writer.write(piece, start)
        sent(len(piece))

    write_pieces(writer, 0, on_disk.nbytes, send, give_way)


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

                def write(start: int, stop: int) -> None:
                    part = reader.read(start, stop)
                    writer.write(part, start)
                    session.coordinator.progress(len(part))
                    work.advance(len(part))
                    part.release()

                write_pieces(
                    writer, 0, reader.nbytes, write,
                    lambda: session.urgency.give_way(snapshot_id, is_kept=True),
                )  # fmt: skip
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
