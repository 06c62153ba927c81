"""The numbers that a store gives of itself."""

from __future__ import annotations

import threading

import msgspec
import pytest
import torch

from shardstore import SaveFailedError, StoreStats
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
