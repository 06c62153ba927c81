"""A training script for torchrun on two hosts: trains to a step, from where the last life got to."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from shardstore import CorruptSnapshotError, SnapshotStore
from tests.distributed.training import Training

NUM_STEPS = 6


def main(root: str, results: str, life: str, dies_after: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    training = Training(rank)
    store = SnapshotStore(root, memory=0, timeout_s=6.0, name="job")
    out = Path(results, f"{life}-{rank}.json")
    try:
        report = store.restore(training.state, required=False)
    except CorruptSnapshotError as error:
        assert training.progress == {"epoch": 0, "losses": []}, "live state was touched"
        out.write_text(json.dumps({"refused": str(error)}))
        store.take_leave("it was refused")
        dist.destroy_process_group()
        return
    for step in range(report.step + 1 if report else 0, NUM_STEPS):
        training.step()
        store.save(training.state, step=step).wait(40)
        if step == dies_after:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    found = [data.hex() for data in training.fingerprint()]
    begun = None if report is None else report.step
    out.write_text(json.dumps({"begun": begun, "fingerprint": found}))
    store.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
