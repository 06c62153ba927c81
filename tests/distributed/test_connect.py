"""Connecting: sub-groups, a rank that never comes, training collectives at the same time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardstore import CoordinationTimeoutError, SnapshotStore
from tests.faults.scenario import open_store
from tests.ranks import run_ranks


def _subgroup(rank: int, folder: str) -> tuple[str, list[float]]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = rank % 2
    store = open_store(
        folder, name=f"group-{mine}", root=f"root-{mine}", process_group=groups[mine]
    )
    state = {"w": torch.full((2,), float(rank))}
    store.save(state, step=1).wait(20)
    state["w"].fill_(-1)
    report = store.restore(state)
    store.close()
    return report.tier, state["w"].tolist()


def test_stores_of_two_sub_groups_are_independent(folder: str) -> None:
    results = run_ranks(4, _subgroup, folder)
    assert results == [("memory (2 ranks)", [float(r)] * 2) for r in range(4)]


def _one_never_opens(rank: int, folder: str) -> str:
    elsewhere = dist.new_group()
    text = ""
    if rank == 0:
        with pytest.raises(CoordinationTimeoutError) as caught:
            open_store(folder, timeout_s=1.0)
        text = str(caught.value)
    dist.barrier(elsewhere)  # where rank 1 is meanwhile
    return text


def test_a_rank_that_never_opens_the_store_does_not_hang_the_others(folder: str) -> None:
    assert "every rank of the group must open it" in run_ranks(2, _one_never_opens, folder)[0]


def _collectives_meanwhile(rank: int, folder: str) -> float:
    store = open_store(folder, keep=2)
    state = {"w": torch.zeros(50_000)}
    value = torch.ones(1000)
    for step in range(30):
        store.save(state, step=step)
        dist.all_reduce(value)
        value /= dist.get_world_size()
    store.drain()
    total = float(value.sum())
    assert [info.step for info in store.snapshots()][-1] == 29
    store.close()
    return total


def test_training_collectives_run_while_snapshots_are_written(folder: str) -> None:
    assert run_ranks(2, _collectives_meanwhile, folder) == [1000.0, 1000.0]


def _world_of_one(rank: int) -> Any:
    group = dist.new_group([0])
    if rank == 0:
        with SnapshotStore(memory="1MiB", process_group=group) as store:
            store.save({"w": torch.ones(3)}, step=1).wait(5)
            return store.restore({"w": torch.zeros(3)}).step
    return None


def test_a_group_of_one_needs_no_other_rank() -> None:
    assert run_ranks(2, _world_of_one) == [1, None]
