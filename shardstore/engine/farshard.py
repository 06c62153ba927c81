"""One rank's file on the root of another host, as rank 0 reads it: for headers (P4, private roots)."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Final

import msgspec

from shardstore.engine.peers import Peers, Question
from shardstore.format.records import SnapshotId

_MAX_PART_NBYTES: Final = 4 << 20
"""That another host sends at once."""


class FarShard:
    """A shard on another host's root, part by part over the key-value store: for headers."""

    def __init__(self, peers: Peers, first: int, snapshot_id: SnapshotId, rank: int) -> None:
        """Ask for its size; `first` is the first rank of that root.

        Raises:
            TierError: It is not there, or that host does not answer.
        """
        self._peers, self._first = peers, first
        self._id, self._rank = snapshot_id, rank
        self.tier = "root"
        self.source = f"rank {rank} of {snapshot_id} on host {peers.classes[first].host}"
        self.is_mapped = False
        self.may_differ_again = False
        self.chunk_bytes = _MAX_PART_NBYTES
        self.num_places = 1
        self.nbytes = self._read(0, 8)[0]

    def _read(self, start: int, stop: int) -> tuple[int, bytes]:
        question = Question("read", id=self._id, rank=self._rank, start=start, stop=stop)
        answers = self._peers.must(question, whom=[self._first])
        return msgspec.msgpack.decode(answers[self._first], type=tuple[int, bytes])

    def read(self, start: int, stop: int) -> bytes:
        """See ShardReader."""
        parts = bytearray()
        for at in range(start, stop, _MAX_PART_NBYTES):
            parts += self._read(at, min(stop, at + _MAX_PART_NBYTES))[1]
        return bytes(parts)

    def forget(self) -> None:
        """Nothing is kept."""

    def stream(
        self,
        start: int,
        stop: int,
        place: Callable[[int, int], memoryview],  # noqa: ARG002 - of the protocol
        arrived: Callable[[memoryview, int], None],
    ) -> int:
        """See ShardReader."""
        end = min(stop, self.nbytes)
        for at in range(start, end, _MAX_PART_NBYTES):
            arrived(memoryview(self.read(at, min(end, at + _MAX_PART_NBYTES))), at)
        return end

    def __enter__(self) -> FarShard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass
