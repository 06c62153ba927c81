"""SIGTERM as schedulers send it: to torchrun, or to a whole process group with forked loader workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shardstore import list_snapshots

_ROOT = Path(__file__).resolve().parents[2]
_WAIT_S = 60.0


def _start(folder: str, num_ranks: int) -> subprocess.Popen[bytes]:
    """torchrun in a session of its own; its ranks lead process groups of theirs, with their loader workers."""
    for left in [*Path(folder).glob("pids-*"), *Path(folder).glob("result-*")]:
        left.unlink()
    return subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(num_ranks), "-m", "tests.faults.preempted_job", folder,
        ],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )  # fmt: skip


def _wait_for(paths: list[Path], process: subprocess.Popen[bytes]) -> list[Any]:
    deadline = time.monotonic() + _WAIT_S
    pause = threading.Event()
    while not all(path.exists() and path.stat().st_size for path in paths):
        assert time.monotonic() < deadline, f"{paths} did not come"
        assert process.poll() is None or all(path.exists() for path in paths), "torchrun ended"
        pause.wait(0.02)
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["torchrun", "each group"])
def test_sigterm_ends_the_job_with_a_snapshot_of_its_last_step(folder: str, whom: str) -> None:
    """C107: loader workers outlive the signal, so that the step in progress can be finished."""
    process = _start(folder, 2)
    try:
        pids = _wait_for([Path(folder, f"pids-{rank}") for rank in range(2)], process)
        if whom == "torchrun":
            process.send_signal(signal.SIGTERM)
        else:
            for own, *workers in pids:
                assert {os.getpgid(worker) for worker in workers} == {own}
                os.killpg(own, signal.SIGTERM)
        results = _wait_for([Path(folder, f"result-{rank}") for rank in range(2)], process)
        process.wait(_WAIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    first, second = results
    assert first["stopped"] == second["stopped"]
    assert first["stopped"] is not None
    assert first["stopped"] >= 20
    assert [r["calls"] for r in results] == [1, 1], "the script's own handler runs once"
    assert [r["workers"] for r in results] == [2, 2], "no worker was lost on the way"
    assert list_snapshots(Path(folder, "root"))[-1].step == first["stopped"]
    for _own, *workers in pids:
        for worker in workers:
            with pytest.raises(ProcessLookupError):
                os.kill(worker, 0)
