"""Every tier, and every wrapper that changes nothing by itself, passes the suite that is published."""

from __future__ import annotations

import math

from shardstore.format.records import SnapshotId
from shardstore.testing import (
    CrashingTier,
    FlippingTier,
    FullTier,
    ShardContract,
    SlowTier,
    TierContract,
    WrappedTier,
)
from shardstore.tiers.base import RootTier, ShardReader, ShardWriter
from shardstore.tiers.disk import DiskTier
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.localdisk import LocalDisk


class TestDiskTier(TierContract):
    def make_tier(self, ops: FileOps) -> RootTier:
        return DiskTier(str(self.folder), name="root", ops=ops)


class TestLocalDisk(ShardContract):
    """The tier between memory and the root: no registers, and a file for each rank's own."""

    def make_tier(self, ops: FileOps) -> LocalDisk:
        return LocalDisk(str(self.folder), rank=0, ops=ops)

    def create(
        self, tier: LocalDisk, snapshot_id: SnapshotId, rank: int, nbytes: int
    ) -> ShardWriter:
        assert rank == tier.rank
        return tier.create_shard(snapshot_id, nbytes)

    def open(self, tier: LocalDisk, snapshot_id: SnapshotId, rank: int) -> ShardReader | None:
        assert rank == tier.rank
        return tier.open_shard(snapshot_id)


class TestWrappedTier(TestDiskTier):
    def make_tier(self, ops: FileOps) -> RootTier:
        return WrappedTier(super().make_tier(ops))


class TestCrashingTierThatOnlyCounts(TestDiskTier):
    def make_tier(self, ops: FileOps) -> RootTier:
        return CrashingTier(super().make_tier(ops))


class TestSlowTierThatMayGo(TestDiskTier):
    def make_tier(self, ops: FileOps) -> RootTier:
        tier = SlowTier(super().make_tier(ops), latency_s=math.inf)
        tier.go.set()
        return tier


class TestFullTierWithRoom(TestDiskTier):
    def make_tier(self, ops: FileOps) -> RootTier:
        return FullTier(super().make_tier(ops), capacity_bytes=1 << 30)


class TestFlippingTierWithoutBits(TestDiskTier):
    def make_tier(self, ops: FileOps) -> RootTier:
        return FlippingTier(super().make_tier(ops))


class TestFlippingTierAtRestWithoutBits(TestDiskTier):
    def make_tier(self, ops: FileOps) -> RootTier:
        return FlippingTier(super().make_tier(ops), at_rest=True)
