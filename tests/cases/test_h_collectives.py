"""What a save asks of the training's process group: nothing that grows with the state, however slow the disk (C70)."""

from __future__ import annotations

import datetime
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardstore import SnapshotStore
from shardstore.tiers.fileops import use_ops
from tests.cases.bits import Outcomes
from tests.faults.breaking_ops import WatchedOps
from tests.faults.scenario import Job, open_store

_NAMES = (
    "all_gather", "all_gather_object", "all_gather_into_tensor", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object",
    "irecv", "isend", "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "scatter", "scatter_object_list", "send",
)  # fmt: skip


def _counted(calls: list[str]) -> Any:
    """Every collective of torch.distributed notes its name and the bytes of its tensors."""
    patch = pytest.MonkeyPatch()
    for name in _NAMES:
        whole = getattr(dist, name)

        def call(*args: Any, _whole: Any = whole, _name: str = name, **options: Any) -> Any:
            tensors = [value for value in args if isinstance(value, torch.Tensor)]
            calls.append(f"{_name} {sum(tensor.nbytes for tensor in tensors)}")
            return _whole(*args, **options)

        for module in (dist, dist.distributed_c10d):
            patch.setattr(module, name, call)
    return patch


def _collectives(rank: int, folder: str) -> list[list[str]]:
    found = []
    for size in (10, 1_000_000):
        state: dict[str, Any] = {f"w{i}": torch.full((size,), float(rank)) for i in range(3)}
        calls: list[str] = []
        patch = _counted(calls)
        try:
            store = open_store(folder, root=f"root-{size}")
            opened = len(calls)
            for step in (1, 2):
                store.save(state, step=step).wait(20)
            store.restore(state)
            store.delete(1)
            store.close()
        finally:
            patch.undo()
        found.append([*calls[:opened], "opened", *calls[opened:]])
    return found


def _very_slow_write(rank: int, folder: str) -> int:
    """The training group gives up after 5 s; rank 1's file takes 12."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=5))
    slow = threading.Event()

    def act(name: str, _at: int) -> None:
        if name.startswith("open_new rank-00001"):
            slow.wait(12)

    ops = WatchedOps(act)
    with use_ops(ops):
        store: SnapshotStore = open_store(folder, memory=0, process_group=group, timeout_s=60.0)
    ops.arm()
    job = Job(rank)
    job.fill(1)
    info = store.save(job.state, step=1).wait(60)
    assert info is not None
    value = torch.ones(())
    dist.all_reduce(value, group=group)
    store.close()
    return info.step


def test_no_collective_of_a_save_or_restore_carries_the_state(folder: str) -> None:
    """C70: many ranks are simulated by counting. Only opening asks the group, for the port."""
    for small, large in Outcomes(2, folder, _collectives).of(_collectives):
        assert small == large, "what is said grows with the state"
        assert small[-1] == "opened", f"a save or a restore uses the training's group: {small}"


@pytest.mark.nightly
def test_a_write_of_12_s_is_no_failure_where_the_group_gives_up_after_5(folder: str) -> None:
    """C70, with the figures of the report."""
    found = Outcomes(2, folder, _very_slow_write, timeout_s=90.0).of(_very_slow_write)
    assert found == [1, 1]
