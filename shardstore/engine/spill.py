"""One rank's shard onto the root, while its digests are still being taken."""

from __future__ import annotations

from shardstore.engine.catalog import Catalog
from shardstore.engine.progress import Work
from shardstore.engine.session import PendingSave, Session
from shardstore.tiers.base import ShardWriter
from shardstore.tiers.fileops import WRITE_BYTES


def write_shard(session: Session, catalog: Catalog, save: PendingSave) -> bool:
    """Write, make durable and publish this rank's file. Waits until the save is sealed here.

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
    tier, nbytes = catalog.tier, save.layout.nbytes
    writer = tier.create_shard(save.id, session.rank, nbytes)
    try:
        with session.progress.begin(
            "write", step=save.step, total_bytes=nbytes, tier=tier.name
        ) as work:
            if _copy(session, save, writer, work):
                writer.publish()
                work.complete()
                return True
    except BaseException:
        writer.discard()
        raise
    writer.discard()
    return False


def _copy(session: Session, save: PendingSave, writer: ShardWriter, work: Work) -> bool:
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
        save.written_bytes += len(part)
        work.advance(len(part))
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
