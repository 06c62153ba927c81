"""Write to the root what no replica stores for this rank, once it is known that the replicas are equal.

The data is on its way while that is agreed on; the header, and with it the file, waits for the answer. A
rank that gets none, or whose replicas differ, writes its whole file instead, which needs nobody's consent.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from shardstore.engine.pieces import num_bytes_with_header, write_pieces
from shardstore.engine.progress import Work
from shardstore.engine.rootfile import SharedForm, Take
from shardstore.engine.session import PendingSave, Session, Target
from shardstore.errors import TierError
from shardstore.tiers.base import ShardReader, ShardWriter
from shardstore.tiers.pages import private_pages

_READ_BYTES: Final = 4 << 20

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
            written = _Sending(session, save, form, writer, work).send(on_disk)
            if written:
                writer.publish()
                save.is_shared = True
                work.complete()
                return True
    except BaseException:
        writer.discard()
        raise
    writer.discard()
    save.written_bytes = 0
    return written


class _Sending:
    """One file on its way: what needs no header at once, the rest once replicas are known to be equal."""

    def __init__(
        self, session: Session, save: PendingSave, form: SharedForm, writer: ShardWriter, work: Work
    ) -> None:
        """Nothing is written yet."""
        self._session = session
        self._save = save
        self._form = form
        self._writer = writer
        self._work = work
        self._buffers: deque[memoryview] = deque()
        """One for each thread that writes."""

    def send(self, on_disk: ShardReader | None) -> bool | None:
        """Write all of it; True, or what `write_shared` returns for what is not to be published."""
        save, writer, layout = self._save, self._writer, self._form.layout
        first = num_bytes_with_header(writer, layout.data_start, layout.nbytes)
        if on_disk is None:
            assert save.slot is not None
            take = _from_memory(save.slot.view)
        else:
            take = _from_near(self._session, save, on_disk)
        self._write(first, layout.nbytes, b"", take)
        is_equal = self._are_replicas_equal()
        header = save.shared_header
        if not is_equal or header is None:
            return False if is_equal is False else None
        if on_disk is not None:
            self._write(0, first, header, take)
            return True
        # The slot of a save that failed may have been in use again before all was read.
        assert save.id is not None
        reader = self._session.memory.open_shard(save.id)
        if reader is None:
            return False
        with reader:
            self._write(0, first, header, _from_memory(reader.read(0, reader.nbytes)))
        return True

    def _are_replicas_equal(self) -> bool | None:
        """False: the save failed. None: they are not, or nobody can say so."""
        save = self._save
        save.sealed.wait()
        if not save.is_sealed:
            return False
        save.joint.wait()
        if save.completion is None:
            return None
        if save.completion.failure is not None:
            return False
        return True if self._session.rank not in save.completion.diverged_ranks else None

    def _write(self, start: int, stop: int, header: bytes, take: Take) -> None:
        session, save, layout = self._session, self._save, self._form.layout
        writer, buffers = self._writer, self._buffers
        snapshot_id = save.id
        assert snapshot_id is not None

        def give_way() -> None:
            save.held_s += session.urgency.give_way(snapshot_id)

        def write(begin: int, end: int) -> None:
            nbytes = end - begin
            buffer = buffers.pop() if buffers else None
            if buffer is None or len(buffer) < nbytes:
                buffer = private_pages(max(nbytes, 1))
            part = buffer[:nbytes]
            num_of_header = min(max(0, layout.data_start - begin), nbytes)
            part[:num_of_header] = header[begin : begin + num_of_header]
            data = part[num_of_header:]
            self._form.gather(begin + num_of_header, end, data, take)
            writer.write(part, begin)
            session.coordinator.progress(nbytes)
            save.count_written(len(data))
            self._work.advance(len(data))
            buffers.append(buffer)

        write_pieces(writer, start, stop, write, give_way)


def _from_memory(view: memoryview) -> Take:
    def take(start: int, into: memoryview) -> None:
        into[:] = view[start : start + len(into)]

    return take


def _from_near(session: Session, save: PendingSave, on_disk: ShardReader) -> Take:
    """From memory as long as that has it, else from the disk."""
    snapshot_id = save.id
    assert snapshot_id is not None

    def take(start: int, into: memoryview) -> None:
        reader = session.memory.open_shard(snapshot_id)
        if reader is not None:
            with reader:
                into[:] = reader.read(start, start + len(into))
            return
        for begin in range(start, start + len(into), _READ_BYTES):
            end = min(begin + _READ_BYTES, start + len(into))
            data = on_disk.read(begin, end)
            if len(data) != end - begin:
                raise short(on_disk, begin + len(data))
            into[begin - start : end - start] = data

    return take


def short(reader: ShardReader, end: int) -> TierError:
    """The error of a file that ends at `end`, while it is copied."""
    return TierError(
        f"{reader.source} ends after {end:,} of {reader.nbytes:,} bytes",
        tier=reader.tier, key=reader.source, operation="read",
    )  # fmt: skip
