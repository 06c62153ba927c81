"""A root tier that stops at a chosen operation, as if the process had ended there."""

from __future__ import annotations

import threading

from shardstore.format.records import SnapshotId
from shardstore.testing.wrapped import WrappedTier, WrappedWriter
from shardstore.tiers.base import RootTier, ShardWriter


class Crash(Exception):  # noqa: N818 - it is no error of anybody
    """The process is dead, as far as storage can tell: nothing that it does from now on has an effect.

    No OSError and no ShardStoreError: nothing takes it for a disk that failed.
    """


class CrashingTier(WrappedTier):
    """Does `at - 1` operations; that one and every later one raise Crash, so that not even clean-up works.

    Cut off at a `write`, the first half of its bytes is in the file. What is on storage then is what a
    process leaves that ends there, and a store opened anew over the plain tier shows what a restart
    finds. The crashed store itself fails its saves and can be left at once: no thread waits for a dead
    one. Its memory tier is not wrapped and does clean up; for that as well, see `run_forked`.

        for at in itertools.count(1):
            root = tmp_path / str(at)
            SnapshotStore(root, memory=0).save(state, step=1).wait()
            try:
                with use_tier(lambda tier: CrashingTier(tier, at=at)):
                    store = SnapshotStore(root, memory=0)
                with store:
                    store.save(state, step=2).wait()
                break                                  # it was never reached: all were tried
            except (ShardStoreError, Crash):
                pass
            assert SnapshotStore(root, memory=0).restore(state).step in (1, 2)
    """

    def __init__(self, inner: RootTier, *, at: int | None = None) -> None:
        """Around `inner`; with `at` None it only counts."""
        super().__init__(inner)
        self.operations: list[str] = []
        """Names of all operations so far, in order, without those after the crash."""
        self.crashed = threading.Event()
        """Set at the crash: what waits for this store will wait in vain."""
        self._at = at
        self._lock = threading.Lock()

    def enter(self, operation: str, nbytes: int = 0) -> None:
        """Count; raises Crash at the chosen operation and ever after."""
        del nbytes
        with self._lock:
            if not self.crashed.is_set():
                self.operations.append(operation)
                if len(self.operations) != self._at:
                    return
                self.crashed.set()
        raise Crash(f"at operation {self._at}, {self.operations[-1]}; this one was {operation}")

    def create_shard(self, snapshot_id: SnapshotId, rank: int, nbytes: int) -> ShardWriter:
        """See RootTier."""
        self.enter("create_shard")
        return _CrashingWriter(self, self.inner.create_shard(snapshot_id, rank, nbytes))


class _CrashingWriter(WrappedWriter):
    def __init__(self, tier: CrashingTier, inner: ShardWriter) -> None:
        super().__init__(tier, inner)
        self._crashed = tier.crashed

    def write(self, data: memoryview, offset: int) -> None:
        was_dead = self._crashed.is_set()
        try:
            super().write(data, offset)
        except Crash:
            if not was_dead:
                self.inner.write(data[: len(data) // 2], offset)
            raise
