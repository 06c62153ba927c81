"""A training script for torchrun: FSDP2, loader workers, a guard. Prints nothing; leaves a file per rank."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tests.faults.scenario import Job, open_store

NUM_STEPS = 2000


class Rows(Dataset[torch.Tensor]):
    """Rows that take workers a moment each, and tell which process made them."""

    def __len__(self) -> int:
        return 8 * NUM_STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        assert get_worker_info() is not None
        time.sleep(0.001)
        return torch.tensor([index, os.getpid()])


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    calls: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, _frame: calls.append(signum))
    job, stopped = Job(rank), None
    workers: set[int] = set()
    with open_store(folder) as store, store.guard_preemption(grace_s=25.0) as guard:
        report = store.restore(job.state, required=False)
        first = report.step + 1 if report else 0
        loader = DataLoader(Rows(), batch_size=8, num_workers=2, multiprocessing_context="fork")
        batches: Iterator[torch.Tensor] | None = iter(loader)
        for step in range(first, NUM_STEPS):
            assert batches is not None
            workers |= {int(row[1]) for row in next(batches)}
            job.fill(step)
            dist.barrier()
            stop = guard.should_stop(step)
            if stop or step % 10 == 0:
                store.save(job.state, step=step)
            if step == first + 20:
                Path(folder, f"pids-{rank}").write_text(json.dumps([os.getpid(), *workers]))
            if stop:
                stopped = step
                batches = None  # the loader's workers end here
                break
    result = {"first": first, "stopped": stopped, "calls": len(calls), "workers": len(workers)}
    Path(folder, f"result-{rank}").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
