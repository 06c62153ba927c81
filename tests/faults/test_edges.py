"""Full memory at a restart, nameless memory, interrupts in close, a barrier that fails after copying."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardstore import CoordinationError, list_snapshots
from shardstore.engine.leaving import Leaver
from tests.faults.scenario import Job, open_store
from tests.ranks import run_ranks

FULL_TMPFS = """
    import os, subprocess, sys, torch
    memory = sys.argv[1]
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", memory], check=True)
    life = (
        "import os, sys, torch\\n"
        "from shardstore import SnapshotStore\\n"
        "store = SnapshotStore(name='job', memory_dir=sys.argv[1], memory='64MiB')\\n"
        "store.save({'w': torch.arange(100_000.0)}, step=7).wait(20)\\n"
        "os.kill(os.getpid(), 9)\\n"
    )
    subprocess.run([sys.executable, "-c", life, memory], check=False)
    with open(memory + "/filler", "wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError:
            pass
    from shardstore import SnapshotStore
    live = {"w": torch.zeros(100_000)}
    store = SnapshotStore(name="job", memory_dir=memory, memory="64MiB")
    print(store.restore(live).step, live["w"][9].item())
    # Nameless memory of a swap must not serve a snapshot that is to outlive the process.
    with store.swapped(live, step=7):
        pass
    print(all(slot.path for slot in store._session.memory._slots))
    store.close(keep_memory=True)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_restart_on_a_full_tmpfs_finds_its_snapshot_and_keeps_names(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    run = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", textwrap.dedent(FULL_TMPFS), str(memory)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[:2] == ["7 9.0", "True"]


def test_an_interrupt_in_close_still_finishes_own_writes(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Leaver, timeout_s: float | None) -> bool:
        monkeypatch.undo()
        raise KeyboardInterrupt

    store = open_store(folder)
    store.save({"w": torch.ones(200_000)}, step=3)
    monkeypatch.setattr(Leaver, "wait_outcomes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.close()
    store._leaver.join()
    assert [info.step for info in list_snapshots(Path(folder) / "root")] == [3]


class _Leaving:
    """A Stateful whose load makes this rank vanish from the barrier after copying."""

    def __init__(self) -> None:
        self.act: Any = None

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.act is not None:
            self.act()


def _barrier_fails(rank: int, folder: str) -> tuple[str, bool]:
    store = open_store(folder, timeout_s=1.5)
    job, leaving = Job(rank), _Leaving()
    state = {**job.state, "leaving": leaving}
    job.fill(1)
    store.save(state, step=1).wait(20)
    job.fill(5)
    dist.barrier()
    if rank == 1:
        leaving.act = store._session.coordinator.abandon
    text = ""
    try:
        store.restore(state)
    except CoordinationError as error:
        text = str(error)
    filled = 1 in job.steps_seen()
    store._abandon("the test ends")
    return text, filled


def test_a_barrier_that_fails_after_copying_says_that_state_was_filled(folder: str) -> None:
    for text, filled in run_ranks(2, _barrier_fails, folder):
        assert filled
        assert "live state is filled" in text
        assert "unchanged" not in text.split(":")[0]


def _different_on_error(rank: int, folder: str) -> str:
    with pytest.raises(CoordinationError) as caught:
        open_store(folder, on_error="warn" if rank else "raise")
    return str(caught.value)


def test_on_error_must_be_equal_on_all_ranks(folder: str) -> None:
    for text in run_ranks(2, _different_on_error, folder):
        assert "on_error" in text
        assert "rank 1" in text
