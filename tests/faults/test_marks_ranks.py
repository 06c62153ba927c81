"""Pins and damage with two ranks, of which one fails or dies half way: both say the same afterwards."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardstore import CoordinationError, SnapshotNotFoundError, SnapshotStore
from shardstore.tiers.fileops import use_ops
from tests.cases.bits import Outcomes
from tests.faults.breaking_ops import WatchedOps, raise_at
from tests.faults.scenario import share_pids
from tests.ranks import RanksFailedError, run_ranks


def _open(folder: str, name: str, **options: Any) -> SnapshotStore:
    """Memory only: nothing but the ranks' own files says what is pinned or damaged."""
    memory_dir = Path(folder) / "memory"
    memory_dir.mkdir(exist_ok=True)
    return SnapshotStore(
        name=name, memory="64MiB", memory_dir=memory_dir, timeout_s=20.0, **options
    )


def _state(rank: int, value: float) -> dict[str, Any]:
    return {"w": torch.full((5 + rank,), value)}


def _save(store: SnapshotStore, rank: int, *steps: int) -> None:
    for step in steps:
        store.save(_state(rank, step), step=step).wait(20)
    store.drain()
    dist.barrier()


def _pins(store: SnapshotStore) -> dict[int, bool]:
    return {info.step: info.pinned for info in store.snapshots()}


def _refused(call: Any, *arguments: object) -> str:
    with pytest.raises(CoordinationError) as caught:
        call(*arguments)
    return str(caught.value)


def _one_rank_fails_to_pin(rank: int, folder: str) -> dict[str, Any]:
    ops = WatchedOps(raise_at("open_new rank-00001.pinned", OSError(errno.EIO, "broken")))
    with use_ops(ops):
        store = _open(folder, "failing", keep=1)
    _save(store, rank, 1)
    ops.arm()
    texts = [_refused(store.pin, 1), _refused(store.pin, 1 + rank)]
    with pytest.raises(SnapshotNotFoundError):
        store.pin(9)
    store.pin(1)
    _save(store, rank, 2, 3)
    pins = _pins(store)
    store.close()
    return {"texts": texts, "pins": pins}


def _damage_under_one_rank(rank: int, folder: str) -> dict[str, Any]:
    store = _open(folder, "damaged", keep=2)
    _save(store, rank, 1, 2)
    if rank == 1:
        (path,) = Path(folder).rglob("damaged/step-000000000002.*/rank-00001.safetensors")
        with path.open("r+b") as file:
            file.seek(-3, os.SEEK_END)
            file.write(b"\x55")
    dist.barrier()
    live = _state(rank, -1)
    restored = store.restore(live).step
    _save(store, rank, 3)
    listed = [[*_pins(store)]]
    store.close(keep_memory=True)
    marks = sorted(p.name for p in Path(folder).rglob("damaged/step-*/*.damaged"))
    store = _open(folder, "damaged", keep=2)
    listed.append([*_pins(store)])
    for step in (4, 5):
        _save(store, rank, step)
        listed.append([*_pins(store)])
    dist.barrier()
    store.close()
    return {"restored": restored, "listed": listed, "marks": marks}


@pytest.fixture(scope="module")
def outcomes() -> Iterator[Outcomes]:
    with tempfile.TemporaryDirectory(prefix="shardstore-test-", dir="/dev/shm") as path:
        yield Outcomes(2, path, _one_rank_fails_to_pin, _damage_under_one_rank)


def test_a_pin_that_one_rank_cannot_write_fails_on_both(outcomes: Outcomes) -> None:
    first, second = outcomes.of(_one_rank_fails_to_pin)
    for found in (first, second):
        failed, differing = found["texts"]
        assert "rank 1" in failed
        assert "EIO" in failed
        assert "'pin 1', 'pin 2'" in differing, "ranks that disagree are told of it"
        assert found["pins"] == {1: True, 3: False}


def test_damage_under_one_rank_counts_alike_on_both_and_after_a_restart(
    outcomes: Outcomes,
) -> None:
    first, second = outcomes.of(_damage_under_one_rank)
    assert first == second
    assert first["restored"] == 1
    assert first["marks"] == ["rank-00000.damaged", "rank-00001.damaged"]
    assert first["listed"] == [[1, 2, 3], [1, 2, 3], [3, 4], [4, 5]]


def _die_while_pinning(rank: int, folder: str) -> None:
    pids = share_pids(rank, folder)

    def die(name: str, _at: int) -> None:
        if name == "open_new rank-00001.pinned":
            deadline = time.monotonic() + 20
            while not list(Path(folder).rglob("rank-00000.pinned")):
                assert time.monotonic() < deadline
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    ops = WatchedOps(die)
    with use_ops(ops):
        store = _open(folder, "killed", keep=1)
    _save(store, rank, 1)
    ops.arm()
    store.pin(1)


def _goes_on(rank: int, folder: str) -> list[dict[int, bool]]:
    store = _open(folder, "killed", keep=1)
    found = [_pins(store)]
    _save(store, rank, 2, 3)
    found.append(_pins(store))
    marks = sorted(p.name for p in Path(folder).rglob("step-*/*.pinned"))
    assert marks == ["rank-00000.pinned", "rank-00001.pinned"], "made good at the start"
    store.close()
    return found


def test_a_pin_that_only_one_rank_came_to_write_is_a_pin_on_both(folder: str) -> None:
    memory = Path(folder, "memory")
    with pytest.raises(RanksFailedError):
        run_ranks(2, _die_while_pinning, folder)
    assert [p.name for p in memory.rglob("*.pinned")] == ["rank-00000.pinned"]
    assert run_ranks(2, _goes_on, folder) == [[{1: True}, {1: True, 3: False}]] * 2
