"""A root tier in which bits turn over."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Literal, NamedTuple

from shardstore.format.records import SnapshotId
from shardstore.testing.wrapped import WrappedReader, WrappedTier, WrappedWriter
from shardstore.tiers.base import RootTier, ShardReader, ShardWriter


class Flip(NamedTuple):
    """One bit that was turned over."""

    id: SnapshotId
    rank: int | None
    """None: in the register."""
    bit: int
    """Counted from the file's first byte, each byte's lowest first."""


class FlippingTier(WrappedTier):
    """Turns bits over, always the same ones of a file: as it is read, or (`at_rest`) as it is written.

    Whatever the bits, a restore must say that the snapshot is damaged, or restore what was saved.

        with use_tier(lambda tier: FlippingTier(tier, num_random=1, seed=7)):
            store = SnapshotStore(root, memory=0)
        with pytest.raises(CorruptSnapshotError):
            store.restore(state)
    """

    def __init__(
        self,
        inner: RootTier,
        *,
        bits: Iterable[int] = (),
        num_random: int = 0,
        seed: int = 0,
        at_rest: bool = False,
        of: Literal["shards", "registers"] = "shards",
        ranks: Collection[int] | None = None,
    ) -> None:
        """Around `inner`.

        Args:
            inner: Keeps what is stored.
            bits: Bits of each file to turn over, from its first byte on; those beyond its end do nothing.
            num_random: How many more, anywhere in the file.
            seed: Decides which ones, with the file's step, save and rank.
            at_rest: Damage what is written, and read it as it is.
            of: Which files.
            ranks: Whose shards; None: all ranks'.
        """
        super().__init__(inner)
        self.flipped: set[Flip] = set()
        """What was turned over so far."""
        self._bits = tuple(bits)
        self._num_random = num_random
        self._seed = seed
        self._at_rest = at_rest
        self._of = of
        self._ranks = ranks
        self._lock = threading.Lock()

    def flip(
        self, snapshot_id: SnapshotId, rank: int | None, nbytes: int, data: memoryview, start: int
    ) -> None:
        """Turn over, in place, those bits of `data`, the bytes from `start` on of a file of `nbytes`."""
        if (rank is None) != (self._of == "registers"):
            return
        if rank is not None and self._ranks is not None and rank not in self._ranks:
            return
        chance = self._chance(snapshot_id, rank)
        chosen = {*self._bits, *(chance.randrange(8 * nbytes) for _ in range(self._num_random))}
        for bit in chosen:
            at = bit // 8 - start
            if 0 <= at < len(data):
                data[at] ^= 1 << bit % 8
                with self._lock:
                    self.flipped.add(Flip(snapshot_id, rank, bit))

    def _chance(self, snapshot_id: SnapshotId, rank: int | None) -> random.Random:
        """Equal for two runs of one test, whose nonces differ."""
        seed = f"{self._seed}/{snapshot_id.step}/{snapshot_id.count}/{rank}"
        return random.Random(seed)  # noqa: S311 - not for secrets

    def create_shard(self, snapshot_id: SnapshotId, rank: int, nbytes: int) -> ShardWriter:
        """See RootTier."""
        inner = self.inner.create_shard(snapshot_id, rank, nbytes)
        if not self._at_rest:
            return inner

        def flip(data: memoryview, start: int) -> None:
            self.flip(snapshot_id, rank, nbytes, data, start)

        return _FlippingWriter(self, inner, flip)

    def open_shard(self, snapshot_id: SnapshotId, rank: int) -> ShardReader:
        """See RootTier."""
        inner = self.inner.open_shard(snapshot_id, rank)
        if self._at_rest:
            return inner

        def flip(data: memoryview, start: int) -> None:
            self.flip(snapshot_id, rank, inner.nbytes, data, start)

        return _FlippingReader(self, inner, flip)

    def read_manifest(self, snapshot_id: SnapshotId) -> bytes | None:
        """See RootTier."""
        data = self.inner.read_manifest(snapshot_id)
        return data if data is None or self._at_rest else self._flipped(snapshot_id, data)

    def create_manifest(
        self, snapshot_id: SnapshotId, data: bytes, *, make_folder: bool
    ) -> bytes | None:
        """See RootTier."""
        written = self._flipped(snapshot_id, data) if self._at_rest else data
        stored = self.inner.create_manifest(snapshot_id, written, make_folder=make_folder)
        return data if stored == written else stored

    def _flipped(self, snapshot_id: SnapshotId, data: bytes) -> bytes:
        copy = bytearray(data)
        self.flip(snapshot_id, None, len(data), memoryview(copy), 0)
        return bytes(copy)


_Flip = Callable[[memoryview, int], None]


class _FlippingWriter(WrappedWriter):
    def __init__(self, tier: WrappedTier, inner: ShardWriter, flip: _Flip) -> None:
        super().__init__(tier, inner)
        self._flip = flip

    def write(self, data: memoryview, offset: int) -> None:
        copy = memoryview(bytearray(data))
        self._flip(copy, offset)
        super().write(copy, offset)


class _FlippingReader(WrappedReader):
    def __init__(self, tier: WrappedTier, inner: ShardReader, flip: _Flip) -> None:
        super().__init__(tier, inner)
        self._flip = flip

    def read(self, start: int, stop: int) -> memoryview | bytes:
        copy = bytearray(super().read(start, stop))
        self._flip(memoryview(copy), start)
        return bytes(copy)

    def stream(
        self,
        start: int,
        stop: int,
        place: Callable[[int, int], memoryview],
        arrived: Callable[[memoryview, int], None],
    ) -> int:
        def arrived_flipped(data: memoryview, begin: int) -> None:
            # In place: whoever reads keeps the memory that it gave, not what it is handed.
            self._flip(data, begin)
            arrived(data, begin)

        return super().stream(start, stop, place, arrived_flipped)
