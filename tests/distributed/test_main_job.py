"""The main job: train, save, SIGKILL every rank, restart, restore, train on, bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.training import Training, local_of
from tests.faults.scenario import open_store, share_pids
from tests.ranks import RanksFailedError, run_ranks

NUM_STEPS = 8
SAVED_AFTER = 4


def _uninterrupted(rank: int) -> tuple[list[str], list[bytes]]:
    training = Training(rank)
    losses = [training.step() for _ in range(NUM_STEPS)]
    return losses, training.fingerprint()


def _train_and_die(rank: int, folder: str) -> None:
    pids = share_pids(rank, folder)
    store = open_store(folder)
    training = Training(rank)
    for step in range(SAVED_AFTER):
        training.step()
        if step in (1, SAVED_AFTER - 1):
            store.save(training.state, step=step).wait(20)
    training.step()  # lost
    dist.barrier()
    if rank == 0:
        for pid in reversed(pids):
            os.kill(pid, signal.SIGKILL)
    signal.pause()


def _restart(rank: int, folder: str, times: int) -> dict[str, Any]:
    store = open_store(folder)
    training = Training(rank, seed=5)  # everything differs until the restore
    for _ in range(2):
        training.step()
    parameters = list(training.model.parameters())
    with torch.no_grad():
        pointers = [local_of(p).data_ptr() for p in parameters]
    counts = [sys.getrefcount(p) for p in parameters]
    reports = [store.restore(training.state) for _ in range(times)]
    after = list(training.model.parameters())
    with torch.no_grad():
        same_pointers = pointers == [local_of(p).data_ptr() for p in after]
    del parameters, after
    counts_after = [sys.getrefcount(p) for p in list(training.model.parameters())]
    result = {
        "reports": [(r.step, r.tier, r.num_tensors) for r in reports],
        "same_pointers": same_pointers,
        "tied": training.model.head.weight is training.model.embedding.weight,
        "keys": all(p in training.optimizer.state for p in training.model.parameters()),
        "refcounts": (counts, counts_after),
        "missing": reports[-1].missing,
    }
    result["losses"] = [training.step() for _ in range(NUM_STEPS - SAVED_AFTER)]
    result["fingerprint"] = training.fingerprint()
    store.close(keep_memory=True)
    return result


@pytest.mark.parametrize("world_size", [2, 4])
def test_training_after_sigkill_equals_training_without_interruption(
    folder: str, world_size: int
) -> None:
    expected = run_ranks(world_size, _uninterrupted)
    with pytest.raises(RanksFailedError, match="exit code -9"):
        run_ranks(world_size, _train_and_die, folder)
    for tier, times in (("memory", 3), ("root", 1)):
        if tier == "root":
            shutil.rmtree(Path(folder) / "memory")
        results = run_ranks(world_size, _restart, folder, times)
        for (losses, fingerprint), result in zip(expected, results, strict=True):
            assert result["reports"][-1][0] == SAVED_AFTER - 1
            assert result["reports"][-1][1] == f"{tier} ({world_size} ranks)"
            assert result["same_pointers"]
            assert result["tied"]
            assert result["keys"]
            assert result["missing"] == ()
            before, after = result["refcounts"]
            assert max(a - b for a, b in zip(after, before, strict=True)) <= 0
            assert result["losses"] == losses[SAVED_AFTER:]
            assert result["fingerprint"] == fingerprint
