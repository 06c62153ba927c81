"""The numbers that a store gives of itself."""

from __future__ import annotations

import json
import threading

import msgspec
import pytest
import torch

from shardstore import SaveFailedError, SaveTimings, StateMismatchError, StoreStats
from shardstore.tiers.fileops import use_ops
from tests.faults.breaking_ops import WatchedOps, hold_at, raise_at
from tests.store.conftest import OpenStore

MIB = 1 << 20


def test_saves_are_counted_and_timed(open_store: OpenStore) -> None:
    reached, go = threading.Event(), threading.Event()
    ops = WatchedOps(hold_at("point:spill", reached, go))
    with use_ops(ops):
        store = open_store(memory="20MiB")
    state = {"w": torch.zeros(MIB)}
    fresh = store.stats()
    assert isinstance(fresh, StoreStats)
    assert (fresh.num_saves, fresh.save_blocked_s, fresh.stage.gb_per_s) == (0, 0, 0)
    ops.arm()
    handle = store.save(state, step=1)
    assert reached.wait(20)
    before = store.stats()
    assert (before.num_saves, before.num_committed, before.num_pending) == (1, 0, 1)
    assert before.durable_lag_s > 0
    go.set()
    handle.wait(20)
    store.save(state, step=2).wait(20)
    after = store.stats()
    assert (after.num_saves, after.num_committed, after.num_pending) == (2, 2, 0)
    assert (after.num_failed, after.num_skipped, after.num_streamed) == (0, 0, 0)
    assert after.durable_lag_s == 0
    assert 0 < after.save_blocked_s < 20
    for phase in (after.stage, after.digest, after.write, after.commit):
        assert phase.count == 2
        assert 8 * MIB <= phase.nbytes < 9 * MIB
        assert phase.seconds > 0
        assert phase.gb_per_s > 0
    assert 8 * MIB < after.memory_used_bytes <= after.memory_budget_bytes == 20 * MIB
    plain = msgspec.to_builtins(after)
    assert plain["stage"]["count"] == 2


def test_failures_skips_and_streams_are_counted(open_store: OpenStore) -> None:
    ops = WatchedOps(raise_at("write_at", OSError(5, "broken")))
    with use_ops(ops):
        store = open_store(memory=0)
    state = {"w": torch.zeros(MIB)}
    ops.arm()
    with pytest.raises(SaveFailedError):
        store.save(state, step=1).wait(20)
    with pytest.raises(SaveFailedError):
        store.save(state, step=2)
    store.drain()
    found = store.stats()
    assert (found.num_saves, found.num_failed, found.num_committed) == (2, 1, 1)
    assert found.num_streamed == 1
    assert found.memory_used_bytes == 0


def test_restores_and_the_peak_of_memory_are_counted(open_store: OpenStore) -> None:
    store = open_store(memory="40MiB", keep=1)
    state = {"w": torch.zeros(MIB)}
    assert store.stats().restore.count == 0
    store.save(state, step=1).wait(20)
    store.drain()
    report = store.restore(state)
    with store.swapped(state):
        pass
    found = store.stats()
    assert (found.restore.count, found.restore.nbytes) == (2, 2 * 4 * MIB)
    assert found.restore.seconds > report.duration_s
    peak = found.memory_peak_bytes
    assert found.memory_used_bytes <= peak <= 40 * MIB
    for step in range(2, 6):  # ten times as small: what was large is given back
        store.save({"w": torch.zeros(MIB // 10)}, step=step).wait(20)
        store.drain()
    store.warmup({"w": torch.zeros(8 * MIB)})
    last = store.stats()
    assert last.memory_peak_bytes >= max(peak, last.memory_used_bytes)
    store.close()
    assert store.stats().memory_used_bytes == 0
    assert store.stats().memory_peak_bytes == last.memory_peak_bytes, "a peak does not fall"


def test_a_failed_restore_is_not_counted(open_store: OpenStore) -> None:
    store = open_store()
    assert store.restore({"w": torch.zeros(4)}, required=False) is None
    store.save({"w": torch.zeros(4)}, step=1).wait(20)
    with pytest.raises(StateMismatchError):
        store.restore({"w": torch.zeros(5)})
    assert store.stats().restore.count == 0


def test_the_flat_dict_holds_plain_numbers_under_stable_names(open_store: OpenStore) -> None:
    store = open_store()
    keys = set(store.stats().as_dict())
    store.save({"w": torch.zeros(MIB)}, step=1).wait(20)
    flat = store.stats().as_dict()
    assert set(flat) == keys
    assert all(type(value) in (int, float) for value in flat.values())
    assert json.loads(json.dumps(flat)) == flat
    assert flat["num_committed"] == flat["stage_count"] == 1
    assert flat["stage_nbytes"] > 4 * MIB
    assert flat["stage_gb_per_s"] > 0
    phases = {f"{p}_gb_per_s" for p in ("stage", "digest", "write", "commit", "restore")}
    assert phases < keys
    assert set(store.stats().as_dict("shardstore/")) == {f"shardstore/{key}" for key in keys}


def test_a_handle_knows_what_its_save_has_cost_so_far(open_store: OpenStore) -> None:
    reached, go = threading.Event(), threading.Event()
    ops = WatchedOps(hold_at("point:post durable", reached, go))
    with use_ops(ops):
        store = open_store()
    ops.arm()
    handle = store.save({"w": torch.zeros(MIB)}, step=1)
    assert handle.timings.staged_s is not None
    assert handle.timings.committed_s is None
    assert reached.wait(20)
    written = handle.timings
    assert isinstance(written, SaveTimings)
    assert written.sealed_s is not None
    assert written.written_s is not None
    assert written.committed_s is None
    go.set()
    info = handle.wait(20)
    assert info is not None
    asked: list[SaveTimings] = []
    thread = threading.Thread(target=lambda: asked.append(handle.timings))
    thread.start()
    thread.join(20)
    (last,) = asked
    assert last.nbytes == info.nbytes
    assert None not in msgspec.to_builtins(last).values()
    assert last.staged_s is not None
    assert last.committed_s is not None
    assert 0 < last.staged_s <= written.sealed_s <= written.written_s <= last.committed_s < 20


def test_a_memory_snapshot_is_never_written_and_a_failed_one_never_committed(
    open_store: OpenStore,
) -> None:
    ops = WatchedOps(raise_at("write_at", OSError(5, "broken")))
    with use_ops(ops):
        store = open_store()
    kept = store.save({"w": torch.zeros(4)}, step=1, persist=False)
    kept.wait(20)
    assert kept.timings.written_s is None
    assert kept.timings.committed_s is not None
    ops.arm()
    broken = store.save({"w": torch.zeros(4)}, step=2)
    with pytest.raises(SaveFailedError):
        broken.wait(20)
    assert broken.timings.written_s is None
    assert broken.timings.committed_s is None
    with pytest.raises(SaveFailedError):
        store.drain()
