"""Check the bytes of a shard file against its header, as they come: in file order, in any portions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import xxhash

from shardstore.engine.sealed import SealedShard
from shardstore.engine.spans import SpanDigests
from shardstore.errors import CorruptSnapshotError
from shardstore.format.records import Manifest, NearCopy
from shardstore.tiers.base import ShardReader

_LOG: Final = logging.getLogger("shardstore")


class Verifier:
    """Compares the digests of the needed tensors of one file with what was saved."""

    def __init__(
        self,
        sealed: SealedShard,
        needed: Iterable[int],
        reader: ShardReader,
        progress: Callable[[int], None],
        replace: Callable[[memoryview, int], None] = lambda _data, _start: None,
    ) -> None:
        """Expect the bytes of `needed` (rows of the table, no aliases).

        Args:
            sealed: The file's header.
            needed: Rows.
            reader: Of the file.
            progress: Called with numbers of bytes.
            replace: Takes bytes and their offset that were read again, in place of what came before.
        """
        layout = sealed.layout
        assert layout is not None
        self._spans = layout.spans
        self._replace = replace
        self._header = sealed.header
        self._reader = reader
        self._digests = SpanDigests(layout.spans, needed, self._check, progress)

    def feed(self, data: memoryview, start: int) -> None:
        """Take the bytes of the file from `start` on; portions come in order and skip only what is not needed.

        Raises:
            CorruptSnapshotError: A tensor does not have the digest it was saved with.
        """
        self._digests.feed(data, start)

    def _check(self, row: int, actual: str) -> None:
        saved = self._header.pieces[row].digest
        if actual == saved or (self._reader.may_differ_again and self._read_again(row) == saved):
            return
        name = ".".join(self._header.table[row].path)
        reader = self._reader
        raise CorruptSnapshotError(
            f"{reader.source}: tensor {name} of rank {self._header.rank} is damaged: its bytes have "
            f"digest {actual}, {saved} were saved",
            tier=reader.tier, file=reader.source, tensor=name, expected=saved, actual=actual,
        )  # fmt: skip

    def _read_again(self, row: int) -> str:
        return read_again(self._reader, *self._spans[row], self._replace)

    def finish(self) -> None:
        """All bytes have come.

        Raises:
            CorruptSnapshotError: They have not: the file is truncated.
        """
        row = self._digests.finish()
        if row is not None:
            name = ".".join(self._header.table[row].path)
            raise CorruptSnapshotError(
                f"{self._reader.source} is truncated: tensor {name} is not whole",
                tier=self._reader.tier, file=self._reader.source, tensor=name,
            )  # fmt: skip


def read_again(
    reader: ShardReader,
    start: int,
    stop: int,
    replace: Callable[[memoryview, int], None] = lambda _data, _start: None,
) -> str:
    """Read bytes once more, past whatever changed them on the way; returns the digest they have now.

    Args:
        reader: Of the file.
        start: First byte.
        stop: End of the range.
        replace: Called with the bytes and their offset, in order.

    Raises:
        TierError: They cannot be read.
    """
    _LOG.warning("%s: bytes %d to %d came damaged, and are read again", reader.source, start, stop)
    digest = xxhash.xxh3_128()
    for begin in range(start, stop, reader.chunk_bytes):
        data = memoryview(reader.read(begin, min(begin + reader.chunk_bytes, stop)))
        digest.update(data)
        replace(data, begin)
    return digest.hexdigest()


def check_listed(manifest: Manifest, sealed: SealedShard, reader: ShardReader) -> None:
    """Check that the manifest lists this very file, and says of it what the file itself says.

    Raises:
        CorruptSnapshotError: It does not.
    """
    header, entry = sealed.header, manifest.shards[sealed.header.rank]
    listed = (entry.header_digest, entry.nbytes, entry.table, manifest.world_size)
    if isinstance(entry.near, NearCopy) and header.sharing is msgspec.UNSET:
        listed = (entry.near.header_digest, entry.near.nbytes, *listed[2:])
    found = (sealed.digest, reader.nbytes, header.table_digest, header.world_size)
    if listed != found:
        labels = ("header digest", "bytes", "table digest", "world size")
        differing = ", ".join(
            f"{label} {is_} instead of {want}"
            for label, is_, want in zip(labels, found, listed, strict=True)
            if is_ != want
        )
        raise CorruptSnapshotError(
            f"{reader.source} is not the file that the manifest lists: {differing}",
            tier=reader.tier, file=reader.source,
            expected=listed[0], actual=sealed.digest,
        )  # fmt: skip
