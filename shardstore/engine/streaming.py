"""Save a state that memory has no room for: through two buffers, straight into the root's file, or the disk's.

The copy of live state goes as fast as that takes it, and `save` returns when all bytes are on their
way to the device; what is left for the background is to make them durable and to commit.
"""

from __future__ import annotations

import itertools
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import msgspec
import torch

from shardstore.engine.progress import Work
from shardstore.engine.session import Session, Target
from shardstore.engine.spans import SpanDigests
from shardstore.errors import TierError
from shardstore.format.records import ShardHeader, SnapshotId, TensorPiece
from shardstore.format.shardfile import ShardLayout, encode_header
from shardstore.state.flatten import FlatState
from shardstore.state.portions import PortionReader
from shardstore.tiers.base import ShardWriter
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.limits import buffer_bytes
from shardstore.tiers.pages import private_pages

BUFFER_BYTES: Final = 64 << 20
_NUM_BUFFERS: Final = 2


class Streamed(msgspec.Struct, frozen=True):
    """A shard that is in its file beyond memory, under a temp name, whole but not durable yet."""

    header: ShardHeader
    """With all digests."""
    data: bytes
    """The header as it is in the file."""
    writer: ShardWriter
    tier: str
    """Where: the disk, or the outermost tier."""


class Streamer:
    """Owns the buffers, which it keeps. Belongs to the thread that saves."""

    def __init__(self, session: Session, ops: FileOps) -> None:
        """Reserve nothing before the first use; `ops` tells what memory is left by then."""
        self._session = session
        self._ops = ops
        self._buffers: list[memoryview] = []

    def stream(
        self, flat: FlatState, header: ShardHeader, layout: ShardLayout, snapshot_id: SnapshotId
    ) -> Streamed:
        """Write this rank's file; live state may change once this returns.

        Raises:
            TierError: The root cannot be written to; nothing is left of the file then.
        """
        session = self._session
        target, writer = self._begin(snapshot_id, layout.nbytes)
        try:
            nbytes = layout.nbytes - layout.data_start
            reporter, step = session.progress, snapshot_id.step
            with reporter.begin("save", step=step, total_bytes=nbytes, tier=target.tier) as work:
                pieces = self._write_data(flat, layout, writer, work)
                work.complete()
            header = msgspec.structs.replace(header, run=snapshot_id.run, pieces=pieces)
            data = encode_header(header, layout)
            writer.write(memoryview(data), 0)
        except BaseException:
            writer.discard()
            raise
        return Streamed(header, data, writer, target.tier)

    def _begin(self, snapshot_id: SnapshotId, nbytes: int) -> tuple[Target, ShardWriter]:
        """The disk, where the root is slower than that and takes it from there; else the outermost tier."""
        session = self._session
        if session.catalog is not None and session.catalog.tier.keeps_index and session.on_disk:
            target = Target("disk", session.on_disk.disk.create_shard)
            try:
                return target, target.create(snapshot_id, nbytes)
            except TierError as error:
                session.warn_once("disk", "%s. The root gets it directly", error)
        target = session.outermost
        writer = target.create(snapshot_id, nbytes)
        if writer.is_in_order:
            raise TierError(
                f"{target.tier}: this storage takes files only from front to back, and a state that does not "
                "fit in memory is written header last. Raise memory=, or give a disk= to stream it to",
                tier=target.tier, key=snapshot_id.name, operation="stream",
            )  # fmt: skip
        return target, writer

    def _write_data(
        self, flat: FlatState, layout: ShardLayout, writer: ShardWriter, work: Work
    ) -> tuple[TensorPiece, ...]:
        pieces = list(flat.pieces)

        def finished(row: int, digest: str) -> None:
            pieces[row] = msgspec.structs.replace(pieces[row], digest=digest)

        progress = self._session.coordinator.progress
        owners = [row for row, piece in enumerate(pieces) if piece.key]
        digests = SpanDigests(layout.spans, owners, finished, progress)
        reader = PortionReader(flat, layout)
        buffers = self._reserved()
        step = len(buffers[0])
        turns = itertools.cycle(buffers)
        under_way: deque[Future[None]] = deque()
        # A file on a disk is written by one thread; parts of an object go on while the next come.
        num_writes = 1 if writer.num_parallel == 1 else len(buffers)
        with ThreadPoolExecutor(num_writes, thread_name_prefix="shardstore-stream") as pool:
            start = layout.data_start
            while start < layout.nbytes:
                stop = min(start + step, layout.nbytes)
                if writer.is_aligned and stop < layout.nbytes:
                    stop -= stop % writer.piece_bytes if stop - start > writer.piece_bytes else 0
                if len(under_way) == len(buffers):
                    under_way.popleft().result()  # of the buffer that is filled next
                part = next(turns)[: stop - start]
                reader.copy(start, stop, torch.frombuffer(part, dtype=torch.uint8))
                digests.feed(part, start)
                under_way.append(pool.submit(self._write, writer, part, start, work))
                start = stop
            for write in under_way:
                write.result()
        digests.finish()
        return tuple(pieces)

    def _write(self, writer: ShardWriter, part: memoryview, start: int, work: Work) -> None:
        writer.write(part, start)
        self._session.coordinator.progress(len(part))
        work.advance(len(part))

    def close(self) -> None:
        """Give the buffers back: the store that is closed may be kept for long, or be part of a cycle."""
        self._buffers = []

    def _reserved(self) -> list[memoryview]:
        if not self._buffers:
            nbytes = buffer_bytes(
                BUFFER_BYTES, self._ops, num_local_ranks=len(self._session.local_ranks)
            )
            self._buffers = [private_pages(nbytes) for _ in range(_NUM_BUFFERS)]
        return self._buffers
