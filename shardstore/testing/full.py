"""A root tier with little room."""

from __future__ import annotations

import errno
import os
import threading

from shardstore.errors import TierFullError
from shardstore.format.records import SnapshotId
from shardstore.testing.wrapped import WrappedTier, WrappedWriter
from shardstore.tiers.base import RootTier, ShardWriter


class FullTier(WrappedTier):
    """Holds at most `capacity_bytes`: beyond them it answers as a full disk does, and space comes back.

    Counted are shards, those being written with their whole size, registers and run records. What is
    deleted makes room at once; `capacity_bytes` may be changed at any time.

        with use_tier(lambda tier: FullTier(tier, capacity_bytes=1 << 20)):
            store = SnapshotStore(root, keep=1)
        with pytest.raises(SaveFailedError, match="ENOSPC"):
            store.save(state_of_two_mib, step=1).wait()
    """

    def __init__(self, inner: RootTier, *, capacity_bytes: int, code: int = errno.ENOSPC) -> None:
        """Around `inner`; `code` is what a full one says: ENOSPC, or EDQUOT for a quota."""
        super().__init__(inner)
        self.capacity_bytes = capacity_bytes
        self._code = code
        self._lock = threading.Lock()
        self._pending: dict[_FullWriter, int] = {}

    @property
    def used_bytes(self) -> int:
        """What is stored now, and what is being written."""
        with self._lock:
            total = sum(self._pending.values())
        for snapshot_id in self.inner.list_ids():
            total += len(self.inner.read_manifest(snapshot_id) or b"")
            for rank in self.inner.list_ranks(snapshot_id):
                with self.inner.open_shard(snapshot_id, rank) as reader:
                    total += reader.nbytes
        return total + sum(len(self.inner.read_run(run) or b"") for run in self.inner.run_numbers())

    def _take(self, operation: str, key: str, nbytes: int) -> None:
        free = self.capacity_bytes - self.used_bytes
        if nbytes <= free:
            return
        cause = OSError(self._code, os.strerror(self._code))
        raise TierFullError(
            f"{self.name}: {operation} {key} failed: {errno.errorcode[self._code]} ({cause.strerror}); "
            f"needed {nbytes:,} bytes, {max(0, free):,} are free",
            tier=self.name, key=key, operation=operation, needed_bytes=nbytes, free_bytes=max(0, free),
        ) from cause  # fmt: skip

    def create_shard(self, snapshot_id: SnapshotId, rank: int, nbytes: int) -> ShardWriter:
        """See RootTier; the whole file must fit."""
        self._take("write", f"{self.location}/{snapshot_id.name}", nbytes)
        writer = _FullWriter(self, self.inner.create_shard(snapshot_id, rank, nbytes))
        with self._lock:
            self._pending[writer] = nbytes
        return writer

    def forget(self, writer: _FullWriter) -> None:
        """A shard was published, and is counted where it is, or was given up."""
        with self._lock:
            self._pending.pop(writer, None)

    def create_manifest(
        self, snapshot_id: SnapshotId, data: bytes, *, make_folder: bool
    ) -> bytes | None:
        """See RootTier."""
        self._take("publish", f"{self.location}/{snapshot_id.name}", len(data))
        return super().create_manifest(snapshot_id, data, make_folder=make_folder)

    def replace_manifest(self, snapshot_id: SnapshotId, data: bytes) -> None:
        """See RootTier; the new one must fit beside the old one."""
        self._take("replace", f"{self.location}/{snapshot_id.name}", len(data))
        super().replace_manifest(snapshot_id, data)

    def claim_run(self, run: int, record: bytes) -> bool:
        """See RootTier."""
        self._take("create", self.location, len(record))
        return super().claim_run(run, record)


class _FullWriter(WrappedWriter):
    def __init__(self, tier: FullTier, inner: ShardWriter) -> None:
        super().__init__(tier, inner)
        self._full = tier

    def publish(self) -> None:
        super().publish()
        self._full.forget(self)

    def discard(self) -> None:
        super().discard()
        self._full.forget(self)
