"""Ten thousand tensors, a gibibyte, and what a save costs beyond the copy."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardstore import SnapshotStore


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder on disk, not on the tmpfs."""
    path = Path(tempfile.mkdtemp(prefix="shardstore-test-"))
    yield path
    shutil.rmtree(path)


def test_ten_thousand_tiny_tensors_come_back(disk: Path) -> None:
    state = {f"t{i}": torch.full((1 + i % 3,), float(i)) for i in range(10_000)}
    with SnapshotStore(disk / "root", memory="64MiB") as store:
        started = time.monotonic()
        store.save(state, step=1).wait()
        for tensor in state.values():
            tensor.fill_(-1)
        report = store.restore(state)
        took_s = time.monotonic() - started
    assert report.num_tensors == 10_000
    assert all(t.tolist() == [float(i)] * (1 + i % 3) for i, t in enumerate(state.values()))
    assert took_s < 30


def _resources(store: SnapshotStore) -> tuple[int, int, int]:
    """Bytes of anonymous and shared memory, open descriptors, threads; when nothing goes on behind."""
    for save in store._pipeline.pending:
        assert save.settled.wait(20)
    status = Path("/proc/self/status").read_text()
    found = {
        key: int(status.split(f"{key}:")[1].split()[0])
        for key in ("RssAnon", "RssShmem", "Threads")
    }
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    return (found["RssAnon"] + found["RssShmem"]) * 1024, num_open, found["Threads"]


@pytest.mark.slow
def test_forty_snapshots_in_memory_for_three_all_come_back(disk: Path, folder: str) -> None:
    nbytes = 64 << 20
    state = {f"t{i}": torch.zeros(nbytes // 16 // 4) for i in range(16)}
    after = {}
    with SnapshotStore(disk / "root", memory=3 * nbytes + (1 << 20), memory_dir=folder) as store:
        for step in range(1, 41):
            for i, tensor in enumerate(state.values()):
                tensor.fill_(step + i / 16)
            store.save(state, step=step).wait()
            after[step] = _resources(store)
        for step in [*range(40, 0, -1), 17]:
            for tensor in state.values():
                tensor.fill_(-1)
            assert store.restore(state, step=step).step == step
            for i, tensor in enumerate(state.values()):
                assert bool((tensor == step + i / 16).all()), (step, i)
        end = _resources(store)
    print(f"after 5: {after[5]}, after 40: {after[40]}, after restoring all: {end}")
    for memory, num_open, num_threads in (after[40], end):
        assert memory <= after[5][0] * 1.1
        assert num_open <= after[5][1]
        assert num_threads <= after[5][2]


@pytest.mark.slow
def test_a_gibibyte_is_saved_at_the_cost_of_a_warm_copy_and_restored_from_both_tiers(
    disk: Path,
) -> None:
    state = {f"t{i}": torch.full((4 << 20,), float(i)) for i in range(64)}
    copy = {name: tensor.clone() for name, tensor in state.items()}

    def bare_copy_s() -> float:
        started = time.perf_counter()
        for name, tensor in state.items():
            copy[name].copy_(tensor)
        return time.perf_counter() - started

    ratios = []
    with SnapshotStore(disk / "root", memory="3GiB", keep=2) as store:
        store.warmup(state)
        store.save(state, step=0).wait()
        for step in range(1, 6):
            bare_s = bare_copy_s()
            started = time.perf_counter()
            snapshot = store.save(state, step=step)
            blocked_s = time.perf_counter() - started
            ratios.append(blocked_s / bare_s)
            snapshot.wait()
        for tensor in state.values():
            tensor.fill_(-1)
        assert store.restore(state).tier == "memory (1 rank)"
        assert all(torch.equal(copy[name], state[name]) for name in state)
    with SnapshotStore(disk / "root", memory="3GiB") as store:
        for tensor in state.values():
            tensor.fill_(-1)
        assert store.restore(state).tier == "root (1 rank)"
        assert all(torch.equal(copy[name], state[name]) for name in state)
    print(f"save / bare warm copy of 1 GiB: {[round(r, 2) for r in ratios]}")
    assert statistics.median(ratios) <= 1.5, ratios
