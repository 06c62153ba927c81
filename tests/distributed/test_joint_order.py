"""Ranks that part ways for one call meet again; sub-groups; first saves of a failing run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from shardstore import CoordinationError, SaveFailedError, ShardStoreError, SnapshotNotFoundError
from tests.distributed.training import local_of
from tests.faults.scenario import Job, open_store
from tests.ranks import run_ranks


def _fsdp_in_subgroup(rank: int, folder: str) -> Any:
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    model = nn.Linear(5, 3)
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",)))
    store = open_store(folder, process_group=group)
    with torch.no_grad():
        for parameter in model.parameters():
            local_of(parameter).fill_(rank)
    store.save({"model": model}, step=1).wait(20)
    with torch.no_grad():
        for parameter in model.parameters():
            local_of(parameter).fill_(-1)
        store.restore({"model": model})
        with store.swapped({"model": model}, step=1):
            pass
        values = {float(v) for p in model.parameters() for v in local_of(p).reshape(-1)}
    store.close()
    return values


def test_a_sub_group_of_scattered_ranks_saves_its_own_meshes(folder: str) -> None:
    assert run_ranks(4, _fsdp_in_subgroup, folder) == [None, {1.0}, None, {3.0}]


def _bad_argument_on_one_rank(rank: int, folder: str) -> tuple[str, int]:
    store = open_store(folder, timeout_s=4.0)
    job = Job(rank)
    store.save(job.state, step=1).wait(20)
    with pytest.raises((ValueError, ShardStoreError)) as caught:
        store.restore(job.state, step="1" if rank else 1)  # type: ignore[arg-type]
    step = store.restore(job.state, step=1).step
    store.close()
    return str(caught.value), step


def test_a_bad_argument_on_one_rank_is_told_to_all_and_the_next_call_meets(folder: str) -> None:
    for text, step in run_ranks(2, _bad_argument_on_one_rank, folder):
        assert "rank 1" in text or "step must be an integer" in text
        assert step == 1


def _counts_part(rank: int, folder: str) -> list[int]:
    store = open_store(folder, timeout_s=2.0)
    job = Job(rank)
    if rank == 0:
        with pytest.raises(SaveFailedError):
            store.save(job.state, step=1).wait(20)
    dist.barrier()
    with pytest.raises(SnapshotNotFoundError):
        store.restore(job.state)
    for step in (2, 3, 4):
        try:
            store.save(job.state, step=step).wait(20)
        except SaveFailedError:
            pass  # the one that only rank 0 made is told once
    steps = [info.step for info in store.snapshots()]
    store._abandon("the test ends")
    return steps


def test_ranks_that_lost_count_agree_again_at_a_restore_even_if_it_finds_nothing(
    folder: str,
) -> None:
    for steps in run_ranks(2, _counts_part, folder):
        assert steps[-2:] == [3, 4]


def _first_save_then_raise(rank: int, folder: str) -> None:
    job = Job(rank)
    job.fill(1)
    with open_store(folder) as store:
        store.save(job.state, step=1)
        raise RuntimeError("training failed")


def _after(rank: int, folder: str) -> tuple[int, set[int]]:
    store = open_store(folder)
    job = Job(rank)
    step = store.restore(job.state).step
    store.close()
    return step, job.steps_seen()


def test_the_first_save_before_an_exception_is_there_for_the_restart(folder: str) -> None:
    with pytest.raises(Exception, match="training failed"):
        run_ranks(2, _first_save_then_raise, folder)
    assert run_ranks(2, _after, folder) == [(1, {1}), (1, {1})]


def _released_while_restoring(rank: int, folder: str) -> list[int]:
    store = open_store(folder, name="m", root="root", keep=1)
    job = Job(rank)
    found = []
    for step in range(1, 9):
        job.fill(step)
        store.save(job.state, step=step)
        job.fill(-1)
        found.append(store.restore(job.state).step)
        assert job.steps_seen() == {found[-1]}
    store.close()
    return found


def test_retention_takes_no_snapshot_from_under_a_restore(folder: str) -> None:
    first, second = run_ranks(2, _released_while_restoring, folder)
    assert first == second
    assert all(step - found <= 1 for step, found in enumerate(first, start=1))


def _dead_rank(rank: int, folder: str) -> list[str]:
    store = open_store(folder, timeout_s=1.0)
    job = Job(rank)
    store.save(job.state, step=1).wait(20)
    dist.barrier()
    texts = []
    if rank == 0:
        for step in (2, 3, 4):
            try:
                store.save(job.state, step=step)
                store._leaver.wait_outcomes(20.0)
            except (SaveFailedError, CoordinationError) as error:
                texts.append(str(error))
    store._abandon("the test ends")
    return texts


def test_with_a_rank_gone_a_later_save_raises_and_names_it(folder: str) -> None:
    texts = run_ranks(2, _dead_rank, folder)[0]
    assert texts
    assert "rank 1" in texts[0]
