"""Check the bytes of a shard file against its header, as they come: in file order, in any portions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from shardstore.engine.sealed import SealedShard
from shardstore.engine.spans import SpanDigests
from shardstore.errors import CorruptSnapshotError
from shardstore.format.records import Manifest, NearCopy
from shardstore.tiers.base import ShardReader


class Verifier:
    """Compares the digests of the needed tensors of one file with what was saved."""

    def __init__(
        self,
        sealed: SealedShard,
        needed: Iterable[int],
        reader: ShardReader,
        progress: Callable[[int], None],
    ) -> None:
        """Expect the bytes of `needed` (rows of the table, no aliases)."""
        layout = sealed.layout
        assert layout is not None
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
        if actual == saved:
            return
        name = ".".join(self._header.table[row].path)
        reader = self._reader
        raise CorruptSnapshotError(
            f"{reader.source}: tensor {name} of rank {self._header.rank} is damaged: its bytes have "
            f"digest {actual}, {saved} were saved",
            tier=reader.tier, file=reader.source, tensor=name, expected=saved, actual=actual,
        )  # fmt: skip

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
