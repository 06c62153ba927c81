"""Tiers that misbehave: a store over each of them does what its guarantees say."""

from __future__ import annotations

import errno
import itertools
import math
from functools import partial
from pathlib import Path

import pytest
import torch

from shardstore import (
    CorruptSnapshotError,
    SaveFailedError,
    ShardStoreError,
    SnapshotStore,
    TierFullError,
    list_snapshots,
)
from shardstore.format.records import SnapshotId
from shardstore.testing import (
    Crash,
    CrashingTier,
    FlippingTier,
    FullTier,
    SlowTier,
    run_rank_threads,
    use_tier,
)
from shardstore.testing.contract import content
from shardstore.tiers.base import RootTier
from shardstore.tiers.disk import DiskTier
from shardstore.tiers.fileops import FileOps

_ID = SnapshotId(1, 1, 1, "0123abcd")


def _state(step: int) -> dict[str, object]:
    return {"w": torch.full((3000,), float(step)), "progress": {"step": step}}


def _holds(state: dict[str, object], step: int) -> bool:
    tensor = state["w"]
    assert isinstance(tensor, torch.Tensor)
    return state["progress"] == {"step": step} and bool((tensor == step).all())


def _open(folder: str, memory: int | str = 0) -> SnapshotStore:
    memory_dir = Path(folder) / "memory"
    memory_dir.mkdir(exist_ok=True)
    root = Path(folder) / "root"
    return SnapshotStore(root, memory=memory, memory_dir=memory_dir, keep=1, timeout_s=10)


def _disk(folder: str) -> RootTier:
    return DiskTier(f"{folder}/root", name="root", ops=FileOps())


def test_a_store_over_a_root_that_stops_anywhere_leaves_the_old_or_the_new(folder: str) -> None:
    restored = []
    for at in itertools.count(1):
        fresh = f"{folder}/{at}"
        Path(fresh).mkdir()
        with _open(fresh) as store:
            store.save(_state(1), step=1)
        try:
            with use_tier(partial(CrashingTier, at=at)):
                store = _open(fresh)
            with store:
                store.save(_state(2), step=2).wait()
            break
        except (ShardStoreError, Crash):
            pass
        live = _state(9)
        with _open(fresh) as reopened:
            restored.append(reopened.restore(live).step)
        assert _holds(live, restored[-1])
    assert set(restored) == {1, 2}
    assert len(restored) > 10


def test_nothing_has_an_effect_after_a_crash(folder: str) -> None:
    tier = CrashingTier(_disk(folder), at=2)
    writer = tier.create_shard(_ID, 0, 1000)
    with pytest.raises(Crash, match="operation 2, write"):
        writer.write(memoryview(content(1000)), 0)
    assert tier.crashed.is_set()
    for dead in (writer.discard, writer.publish, lambda: tier.remove_shard(_ID, 0), tier.list_ids):
        with pytest.raises(Crash):
            dead()
    (left,) = (Path(folder) / "root" / _ID.name).iterdir()
    assert left.name == "rank-00000.safetensors.tmp"
    assert left.read_bytes() == content(1000)[:500] + bytes(500), (
        "half of the write had come through"
    )


def test_saving_does_not_wait_for_a_slow_root(folder: str) -> None:
    tiers: list[SlowTier] = []

    def wrap(tier: RootTier) -> RootTier:
        tiers.append(SlowTier(tier))
        return tiers[-1]

    with use_tier(wrap):
        store = _open(folder, memory="1MiB")
    tiers[0].latency_s = math.inf
    handle = store.save(_state(1), step=1)
    assert tiers[0].waiting.wait(10)
    assert not handle.committed.done()
    tiers[0].go.set()
    assert handle.wait(10) is not None
    store.close()


def test_a_slow_tier_takes_as_long_as_its_bytes(folder: str) -> None:
    tier = SlowTier(_disk(folder), bytes_per_s=1e6)
    tier.go.set()
    writer = tier.create_shard(_ID, 0, 2000)
    writer.write(memoryview(content(2000)), 0)
    writer.publish()
    with tier.open_shard(_ID, 0) as reader:
        reader.read(0, 500)
    assert tier.asked_s == pytest.approx(0.0025)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_root_fails_the_save_and_keeps_the_old_one_and_its_space(
    folder: str, code: int
) -> None:
    tiers: list[FullTier] = []

    def wrap(tier: RootTier) -> RootTier:
        tiers.append(FullTier(tier, capacity_bytes=1 << 20, code=code))
        return tiers[-1]

    with use_tier(wrap):
        store = _open(folder)
    store.save(_state(1), step=1).wait()
    used = tiers[0].used_bytes
    tiers[0].capacity_bytes = used + 100
    with pytest.raises(SaveFailedError, match=errno.errorcode[code]):
        store.save(_state(2), step=2).wait()
    assert [info.step for info in store.snapshots()] == [1]
    assert tiers[0].used_bytes <= used + 100
    tiers[0].capacity_bytes = 1 << 20
    with pytest.raises(SaveFailedError):
        store.save(_state(3), step=3)  # taken, and says what became of step 2
    store.drain()
    live = _state(9)
    assert store.restore(live).step == 3
    assert _holds(live, 3)
    store.close()


def test_deleting_makes_room_on_a_full_tier(folder: str) -> None:
    tier = FullTier(_disk(folder), capacity_bytes=2500)

    def put(count: int) -> SnapshotId:
        snapshot_id = SnapshotId(count, 1, count, "0123abcd")
        writer = tier.create_shard(snapshot_id, 0, 1000)
        writer.write(memoryview(content(1000)), 0)
        writer.publish()
        return snapshot_id

    first = put(1)
    pending = tier.create_shard(SnapshotId(9, 1, 9, "0123abcd"), 0, 1000)
    with pytest.raises(TierFullError) as caught:
        put(2)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (1000, 500)
    pending.discard()
    put(2)
    tier.remove(first)
    put(3)
    assert tier.used_bytes == 2000


@pytest.mark.parametrize("of", ["shards", "registers"])
@pytest.mark.parametrize("at_rest", [False, True])
def test_flipped_bits_are_never_restored_as_values(folder: str, of: str, at_rest: bool) -> None:
    flipping: list[FlippingTier] = []

    def wrap(tier: RootTier) -> RootTier:
        flipping.append(FlippingTier(tier, num_random=1, seed=seed, at_rest=at_rest, of=of))  # type: ignore[arg-type]
        return flipping[-1]

    damaged = 0
    for seed in range(24):
        root = f"{folder}/{seed}"
        Path(root).mkdir()
        with use_tier(wrap):
            store = _open(root)
        store.save(_state(1), step=1).wait()
        live = _state(9)
        try:
            report = store.restore(live, required=False)
        except CorruptSnapshotError:
            damaged += 1
            assert _holds(live, 9), "live state was touched"
        else:
            assert _holds(live, 1 if report else 9)
        assert flipping[-1].flipped
        store.take_leave("the test ends")
    assert damaged >= (24 if of == "shards" else 1)


def test_flips_of_chosen_ranks_leave_the_other_ranks_alone(folder: str) -> None:
    tier = FlippingTier(_disk(folder), bits=(8 * 3 + 1,), ranks=(1,))
    for rank in (0, 1):
        writer = tier.create_shard(_ID, rank, 10)
        writer.write(memoryview(content(10)), 0)
        writer.publish()
    got = {}
    for rank in (0, 1):
        with tier.open_shard(_ID, rank) as reader:
            got[rank] = bytes(reader.read(0, 10))
    assert got[0] == content(10)
    assert got[1] == content(10)[:3] + bytes([content(10)[3] ^ 2]) + content(10)[4:]


def test_ranks_may_be_threads_of_one_process(folder: str) -> None:
    def life(rank: object) -> tuple[int | None, float]:
        number = rank.rank  # type: ignore[attr-defined]
        store = SnapshotStore(
            f"{folder}/root", memory="1MiB", memory_dir=folder, process_group=rank, timeout_s=10  # type: ignore[arg-type]
        )  # fmt: skip
        live = {"w": torch.full((4,), 10.0 + number)}
        report = store.restore(live, required=False)
        if report is None:
            assert store.save(live, step=5).wait() is not None
        store.close()
        return (report.step if report else None), float(live["w"][0])

    assert run_rank_threads(3, life) == [(None, 10.0), (None, 11.0), (None, 12.0)]
    assert [info.step for info in list_snapshots(f"{folder}/root")] == [5]
    assert run_rank_threads(3, life) == [(5, 10.0), (5, 11.0), (5, 12.0)]


def test_a_flip_anywhere_in_the_header_is_damage_and_no_failure_of_ranks(folder: str) -> None:
    with _open(folder) as store:
        store.save(_state(1), step=1)
    for byte in range(0, 900, 29):
        with use_tier(partial(FlippingTier, bits=(8 * byte + byte % 8,))):
            reader = _open(folder)
        live = _state(9)
        with pytest.raises(CorruptSnapshotError):
            reader.restore(live)
        assert _holds(live, 9)
        reader.close()
