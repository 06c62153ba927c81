"""Write to the root what no replica stores for this rank, once it is known that the replicas are equal.

The data is on its way while that is agreed on; the header, and with it the file, waits for the answer. A
rank that gets none, or whose replicas differ, writes its whole file instead, which needs nobody's consent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from shardstore.engine.progress import Work
from shardstore.engine.rootfile import PORTION_BYTES
from shardstore.engine.session import PendingSave, Session, Target
from shardstore.errors import TierError
from shardstore.tiers.base import ShardReader, ShardWriter
from shardstore.tiers.pages import private_pages
from shardstore.tiers.transfer import Ring

WHOLE: Final = b"1"
"""What a rank posts when its file is durable: the one that it posted as sealed."""
SHARED: Final = b"shared"
"""Or the one that leaves pieces to replicas."""


def is_for_root(session: Session, target: Target, save: PendingSave) -> bool:
    """Whether the file may leave pieces to replicas: only where all ranks read it."""
    is_root = session.catalog is not None and target.tier == session.catalog.tier.name
    return is_root and save.form is not None


def write_shared(
    session: Session, target: Target, save: PendingSave, on_disk: ShardReader | None = None
) -> bool | None:
    """Write, make durable and publish this rank's file on the root.

    Args:
        session: Of this rank.
        target: The root.
        save: Staged; sealed if there is `on_disk`.
        on_disk: The whole file, where memory may not have it any more.

    Returns:
        True: it is there. False: the save failed meanwhile. None: the whole file must be written.
        Nothing is left of the file in the latter two.

    Raises:
        TierError: It cannot be read or written.
    """
    form = save.form
    assert form is not None
    assert save.id is not None
    writer = target.create(save.id, form.layout.nbytes)
    try:
        with session.progress.begin(
            "write", step=save.step, total_bytes=form.layout.nbytes, tier=target.tier
        ) as work:
            if on_disk is None:
                _write_data(session, save, writer, work, _from_slot(save))
            else:
                _write_data(session, save, writer, work, _from_near(session, save, on_disk))
            written = _finish(session, save, writer, is_on_disk=on_disk is not None)
            if written:
                work.complete()
                return True
    except BaseException:
        writer.discard()
        raise
    writer.discard()
    save.written_bytes = 0
    return written


def _write_data(
    session: Session,
    save: PendingSave,
    writer: ShardWriter,
    work: Work,
    take: Callable[[int, memoryview], None],
) -> None:
    form = save.form
    assert form is not None
    assert save.id is not None
    start, end = form.layout.data_start, form.layout.nbytes
    if start == end:
        return
    buffer = private_pages(min(PORTION_BYTES, end - start))
    for begin in range(start, end, PORTION_BYTES):
        save.held_s += session.urgency.give_way(save.id)
        part = form.gather(begin, min(begin + PORTION_BYTES, end), buffer, take)
        writer.write(part, begin)
        session.coordinator.progress(len(part))
        save.written_bytes += len(part)
        work.advance(len(part))
        part.release()


def _from_slot(save: PendingSave) -> Callable[[int, memoryview], None]:
    slot = save.slot
    assert slot is not None

    def take(start: int, into: memoryview) -> None:
        into[:] = slot.view[start : start + len(into)]

    return take


def _from_near(
    session: Session, save: PendingSave, on_disk: ShardReader
) -> Callable[[int, memoryview], None]:
    """From memory as long as that has it, else from the disk."""
    snapshot_id, ring = save.id, Ring()
    assert snapshot_id is not None

    def take(start: int, into: memoryview) -> None:
        reader = session.memory.open_shard(snapshot_id)
        if reader is not None:
            with reader:
                into[:] = reader.read(start, start + len(into))
            return

        def arrived(data: memoryview, at: int) -> None:
            into[at - start : at - start + len(data)] = data

        stop = start + len(into)
        end = on_disk.stream(start, stop, ring.place, arrived)
        if end != stop:
            raise short(on_disk, end)

    return take


def _finish(
    session: Session, save: PendingSave, writer: ShardWriter, *, is_on_disk: bool
) -> bool | None:
    save.sealed.wait()
    if not save.is_sealed:
        return False
    save.joint.wait()
    completion = save.completion
    if completion is not None and completion.failure is not None:
        return False
    is_equal = completion is not None and session.rank not in completion.diverged_ranks
    if not is_equal or save.shared_header is None:
        return None
    assert save.id is not None
    save.held_s += session.urgency.give_way(save.id)
    if not is_on_disk:
        # The slot of a save that failed may have been in use again before all was read.
        reader = session.memory.open_shard(save.id)
        if reader is None:
            return False
        with reader:
            pass
    writer.write(memoryview(save.shared_header), 0)
    writer.publish()
    save.is_shared = True
    return True


def short(reader: ShardReader, end: int) -> TierError:
    """The error of a file that ends at `end`, while it is copied."""
    return TierError(
        f"{reader.source} ends after {end:,} of {reader.nbytes:,} bytes",
        tier=reader.tier, key=reader.source, operation="read",
    )  # fmt: skip
