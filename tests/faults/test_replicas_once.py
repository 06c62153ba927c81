"""HSDP with replicas stored once: real jobs that end by SIGKILL, and lose what was near them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from shardstore import SnapshotStore
from shardstore.tiers.fileops import use_ops
from tests.distributed.training import Training, local_of
from tests.faults.breaking_ops import WatchedOps, kill_at
from tests.faults.scenario import open_store, share_pids
from tests.ranks import RanksFailedError, run_ranks
from tests.servers.s3 import MotoServer, s3_options

NUM_STEPS = 4
SAVED_AFTER = 2
NUM_TENSORS = 6


def _hybrid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard"))


def _train_and_die(rank: int, folder: str) -> None:
    """What an uninterrupted run gives goes to files; then the same with a save in its middle, and death."""
    pids = share_pids(rank, folder)
    training = Training(rank, mesh=_hybrid())
    losses = [training.step() for _ in range(NUM_STEPS)]
    Path(folder, f"expected-{rank}").write_bytes(pickle.dumps((losses, training.fingerprint())))
    training = Training(rank, mesh=_hybrid())
    for _ in range(SAVED_AFTER):
        training.step()
    store = open_store(folder, replicas="once")
    store.save(training.state, step=SAVED_AFTER).wait(20)
    dist.barrier()
    if rank == 0:
        for pid in reversed(pids):
            os.kill(pid, signal.SIGKILL)
    signal.pause()


def _restart(rank: int, folder: str) -> dict[str, Any]:
    store = open_store(folder, replicas="once")
    training = Training(rank, seed=5, mesh=_hybrid())
    training.step()
    report = store.restore(training.state)
    losses = [training.step() for _ in range(NUM_STEPS - SAVED_AFTER)]
    store.close(keep_memory=True)
    expected = pickle.loads(Path(folder, f"expected-{rank}").read_bytes())
    found = losses == expected[0][SAVED_AFTER:], training.fingerprint() == expected[1]
    return {"tier": report.tier, "equal": found}


def _data_start(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def _bytes_of_dtensors(path: Path) -> int:
    """Bytes of one rank's pieces of tensors with placements, in its whole file."""
    header = json.loads(path.read_bytes()[8 : _data_start(path)])
    record = json.loads(header["__metadata__"]["shardstore"])
    keys = [
        piece[0]
        for row, piece in zip(record["table"], record["pieces"], strict=True)
        if "mesh" in row and piece[0]
    ]
    return sum(stop - start for start, stop in (header[key]["data_offsets"] for key in keys))


def test_hybrid_training_goes_on_bit_for_bit_from_replicas_stored_once(folder: str) -> None:
    with pytest.raises(RanksFailedError, match="exit code -9"):
        run_ranks(4, _train_and_die, folder)
    (snapshot,) = Path(folder, "root").glob("step-*")
    near = Path(folder, "memory")
    whole = sorted(near.rglob("rank-0000?.safetensors"))
    stored = sorted(snapshot.glob("rank-*"))
    shared = sum(map(_bytes_of_dtensors, whole))
    sizes = [[path.stat().st_size for path in paths] for paths in (whole, stored)]
    assert shared > 10_000
    assert sum(sizes[0]) - sum(sizes[1]) == shared // 2
    written = [path.stat().st_size - _data_start(path) for path in stored]
    assert max(written) - min(written) <= 1024, written
    for tier in ("memory", "root"):
        if tier == "root":
            shutil.rmtree(near)
        results = run_ranks(4, _restart, folder)
        assert [r["tier"] for r in results] == [f"{tier} (4 ranks)"] * 4
        assert [r["equal"] for r in results] == [(True, True)] * 4


def _large(rank: int, value: float) -> dict[str, Any]:
    """Some parts of an upload for each rank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("rep",))
    tensors = [
        distribute_tensor(torch.arange(float(numel)) + value, mesh, [Replicate()])
        for numel in (3_000_000, 3_000_000, 1_000, 70_001)
    ]
    return {"w": tensors, "mine": torch.full((1000,), float(rank))}


def _save_and_restore_remotely(
    rank: int, folder: str, url: str, options: dict[str, Any]
) -> dict[str, Any]:
    def open_remote(memory: str) -> SnapshotStore:
        near = Path(folder, memory)
        near.mkdir(exist_ok=True)
        return SnapshotStore(
            url, replicas="once", storage_options=options, memory_dir=near, memory="256MiB",
            timeout_s=30,
        )  # fmt: skip

    state = _large(rank, 1.0)
    with open_remote("memory") as store:
        info = store.save(state, step=1).wait(40)
    assert info is not None
    saved = [local_of(t).clone() for t in state["w"]]
    for tensor in state["w"]:
        local_of(tensor).zero_()
    with open_remote("elsewhere") as store:
        report = store.restore(state)
    equal = all(torch.equal(local_of(t), s) for t, s in zip(state["w"], saved, strict=True))
    whole = sum(s.nbytes for s in saved)
    return {"nbytes": info.nbytes, "whole": whole, "tier": report.tier, "equal": equal}


def test_an_object_store_gets_every_shard_once(folder: str, s3_server: MotoServer) -> None:
    url = f"s3://{s3_server.fresh_bucket()}/run"
    options = s3_options(s3_server.port)
    results = run_ranks(2, _save_and_restore_remotely, folder, url, options, timeout_s=90)
    for result in results:
        assert result["equal"]
        assert result["tier"] == "root (2 ranks)"
        assert 0 < result["nbytes"] - result["whole"] < 100_000


def _state(rank: int, value: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("rep",))
    tensors = {
        str(i): distribute_tensor(torch.full((1000,), float(value)), mesh, [Replicate()])
        for i in range(NUM_TENSORS)
    }
    return {"w": tensors, "mine": torch.full((7,), 10.0 * rank + value), "at": {"step": value}}


def _seen(rank: int, state: dict[str, Any]) -> set[int]:
    found = {int(v) for t in state["w"].values() for v in local_of(t).tolist()}
    return found | {int(v) - 10 * rank for v in state["mine"].tolist()} | {state["at"]["step"]}


def _save_two(rank: int, folder: str, at: int, only_rank: int | None) -> list[str]:
    """Commit step 1, then save step 2 and die at operation `at` of it."""
    pids = share_pids(rank, folder)
    victims = pids if only_rank is None else [pids[rank]]
    is_victim = only_rank is None or only_rank == rank
    ops = WatchedOps(kill_at(at, victims)) if is_victim and at else WatchedOps()
    with use_ops(ops):
        store = open_store(folder, replicas="once", timeout_s=20.0 if only_rank is None else 5.0)
    store.save(_state(rank, 1), step=1).wait(20)
    state = _state(rank, 2)
    dist.barrier()
    ops.arm()
    store.save(state, step=2).wait(20)
    ops.disarm()
    store.close(keep_memory=True)
    return ops.names


def _look(rank: int, folder: str) -> tuple[int, set[int], int, set[int]]:
    store = open_store(folder, replicas="once")
    state = _state(rank, -1)
    step = store.restore(state).step
    seen = _seen(rank, state)
    store.save(_state(rank, 3), step=3).wait(20)
    again = store.restore(state).step
    store.close()
    return step, seen, again, _seen(rank, state)


def _kill_and_look(points: Sequence[tuple[int | None, int]]) -> set[int]:
    steps = set()
    for number, (victim, at) in enumerate(points):
        folder = tempfile.mkdtemp(prefix="shardstore-test-", dir="/dev/shm")
        try:
            with pytest.raises(RanksFailedError, match="exit code -9"):
                run_ranks(2, _save_two, folder, at, victim)
            if number % 2 == 0:
                shutil.rmtree(Path(folder, "memory"), ignore_errors=True)
            results = run_ranks(2, _look, folder)
            ((step, *_), _) = results
            assert step in (1, 2)
            for found in results:
                assert found == (step, {step}, 3, {3}), f"killed {victim} at {at}: {results}"
            steps.add(step)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return steps


def _points(num_points: int, *victims: int | None) -> list[tuple[int | None, int]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        total = min(map(len, run_ranks(2, _save_two, folder, 0, None))) - 1
    assert total >= 10
    ats = sorted({1 + round(i * (total - 1) / (num_points - 1)) for i in range(num_points)})
    return [(victims[number % len(victims)], at) for number, at in enumerate(ats)]


def test_killed_in_the_middle_of_a_save_the_old_or_the_new_is_there() -> None:
    assert _kill_and_look(_points(4, None)[1:3]) <= {1, 2}


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_killed_at_many_points_of_a_save_the_old_or_the_new_is_there() -> None:
    assert _kill_and_look(_points(20, None, 1, 0)) == {1, 2}
