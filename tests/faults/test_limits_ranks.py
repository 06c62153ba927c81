"""A memory limit on one rank of two: that rank streams, the snapshot is one, and nobody fails."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from shardstore import SaveFailedError, SnapshotStore, TierFullError
from shardstore.tiers.fileops import use_ops
from tests.cases.bits import Outcomes
from tests.faults.scenario import Job, open_store
from tests.store.limited_ops import MIB, LimitedOps


def _ops(rank: int) -> LimitedOps:
    return LimitedOps(150 * MIB if rank == 1 else 1 << 40, use=100 * MIB)


def one_is_limited(rank: int, folder: str) -> list[Any]:
    found: list[Any] = []
    job = Job(rank)
    for memory in ("1GiB", "auto"):
        with use_ops(_ops(rank)):
            store = open_store(folder, memory=memory, root=f"root-{memory}")
        for step in (1, 2, 3):
            job.fill(step)
            store.save(job.state, step=step)
        store.drain()
        for step in (3, 1, 2):
            job.fill(-1)
            assert store.restore(job.state, step=step).step == step
            assert job.steps_seen() == {step}
        found.append((store.stats().num_streamed, [info.step for info in store.snapshots()]))
        store.close(keep_memory=True)
        again = open_store(folder, root=f"root-{memory}")
        job.fill(-1)
        found.append((again.restore(job.state).step, job.steps_seen()))
        again.close()
    return found


def one_is_limited_without_a_root(rank: int, folder: str) -> dict[str, Any]:
    ops = _ops(rank)
    with use_ops(ops):
        store = SnapshotStore(name="alone", memory="1GiB", memory_dir=folder, timeout_s=20.0)
    state = {"w": torch.full((MIB,), 1.0)}
    mine = ""
    try:
        store.save(state, step=1).wait(20)
    except (TierFullError, SaveFailedError) as error:
        mine = f"{type(error).__name__}: {error}"
    with suppress(SaveFailedError):  # on both, because one of them has raised nothing yet
        store.drain()
    listed = [info.step for info in store.snapshots()]
    torch.distributed.barrier()
    ops.use = 0
    ops.limit = 1 << 40
    state["w"].fill_(2)
    store.save(state, step=2).wait(20)
    state["w"].fill_(-1)
    restored = store.restore(state).step
    same = set(state["w"].unique().tolist())  # type: ignore[no-untyped-call]
    store.close()
    return {"mine": mine, "listed": listed, "restored": restored, "same": same}


@pytest.fixture(scope="module")
def outcomes() -> Iterator[Outcomes]:
    with tempfile.TemporaryDirectory(prefix="shardstore-test-", dir="/dev/shm") as folder:
        yield Outcomes(2, folder, one_is_limited, one_is_limited_without_a_root, timeout_s=100.0)


def test_the_limited_rank_streams_and_every_step_comes_back_on_both(outcomes: Outcomes) -> None:
    free, limited = outcomes.of(one_is_limited)
    assert [found[0] for found in free[::2]] == [0, 0]
    assert [found[0] for found in limited[::2]] == [3, 3]
    for found in (free, limited):
        assert [steps for _, steps in found[::2]] == [[1, 2, 3]] * 2
        assert found[1::2] == [(3, {3})] * 2


def test_without_a_root_that_save_fails_on_both_and_the_next_one_works(outcomes: Outcomes) -> None:
    free, limited = outcomes.of(one_is_limited_without_a_root)
    assert limited["mine"].startswith("TierFullError: memory: no room")
    assert free["mine"].startswith("SaveFailedError: the save of step 1 failed")
    for found in (free, limited):
        assert "resources.limits.memory" in found["mine"]
        assert (found["listed"], found["restored"], found["same"]) == ([], 2, {2})
