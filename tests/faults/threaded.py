"""Two ranks as threads of one process: a joint test that takes milliseconds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from shardstore import SaveFailedError, ShardStoreError, SnapshotStore
from shardstore.cluster.threads import ThreadGroup, ThreadRank

T = TypeVar("T")


class Ranks:
    """Opens stores on all ranks of one group, and makes every rank do the same."""

    def __init__(self, world_size: int = 2) -> None:
        self._group = ThreadGroup(world_size)
        self._ranks = [self._group.rank(rank) for rank in range(world_size)]

    def each(self, call: Callable[[ThreadRank], T]) -> list[T]:
        """Call on all ranks at once; results by rank, or what the lowest rank raised."""
        with ThreadPoolExecutor(len(self._ranks)) as pool:
            return list(pool.map(call, self._ranks))

    def open(self, root: str | Path, **options: Any) -> Stores:
        """A store on every rank. All of them use the system calls that are current."""
        options.setdefault("timeout_s", 20.0)
        return Stores(
            self, self.each(lambda rank: SnapshotStore(root, process_group=rank, **options))
        )


class Stores:
    """The stores of all ranks, with a state in which every element says its step."""

    def __init__(self, ranks: Ranks, stores: list[SnapshotStore]) -> None:
        self.ranks = ranks
        self.stores = stores

    def each(self, call: Callable[[SnapshotStore, int], T]) -> list[T]:
        """Call with every rank's store and rank, at once."""
        return self.ranks.each(lambda rank: call(self.stores[rank.rank], rank.rank))

    def save(self, step: int, *, numel: int = 3000) -> list[str]:
        """Save on all ranks and wait; by rank, "" or how it failed."""

        def one(store: SnapshotStore, rank: int) -> str:
            try:
                store.save(state_of(step, rank, numel), step=step).wait(20)
            except ShardStoreError as error:
                return f"{type(error).__name__}: {error}"
            return ""

        return self.each(one)

    def drain(self) -> None:
        """Wait for what is behind, and hear of failures that were told already."""

        def one(store: SnapshotStore, _rank: int) -> None:
            try:
                store.drain()
            except SaveFailedError:
                pass

        self.each(one)

    def restore(self, *, numel: int = 3000, **options: Any) -> int:
        """Restore on all ranks; the step that every element of every rank has."""

        def one(store: SnapshotStore, rank: int) -> int:
            live = state_of(-7, rank, numel)
            report = store.restore(live, **options)
            assert report is not None
            seen = step_of(live, rank)
            assert seen == report.step
            return seen

        steps = set(self.each(one))
        assert len(steps) == 1, f"ranks restored {steps}"
        return steps.pop()

    def listed(self) -> list[int]:
        """What rank 0 lists."""
        return [info.step for info in self.stores[0].snapshots()]

    def close(self, **options: Any) -> None:
        """Close on all ranks; what failed before was told already."""

        def one(store: SnapshotStore, _rank: int) -> None:
            try:
                store.close(**options)
            except SaveFailedError:
                pass

        self.each(one)

    def abandon(self) -> None:
        """Leave as an exception would."""
        self.each(lambda store, _: store.take_leave("the test goes on"))


def state_of(step: int, rank: int, numel: int) -> dict[str, Any]:
    """Values of one step on one rank."""
    value = float(100 * step + rank)
    return {
        "w": torch.full((numel,), value),
        "rows": torch.full((3 + rank, 5), value, dtype=torch.float64),
        "step": {"n": step},
    }


def step_of(live: dict[str, Any], rank: int) -> int:
    """The step of which every element is."""
    w = live["w"]
    seen = {w.min().item(), w.max().item(), *live["rows"].reshape(-1).tolist()}
    seen.add(float(100 * live["step"]["n"] + rank))
    assert len(seen) == 1, f"rank {rank}: a mixture of {seen}"
    return int(seen.pop() - rank) // 100


def used_bytes(folder: Path) -> int:
    """Disk space below a folder, folders included."""
    return sum(path.lstat().st_blocks * 512 for path in [folder, *folder.rglob("*")])


def names(folder: Path) -> list[str]:
    """Every name below a folder, relative."""
    return sorted(os.path.relpath(path, folder) for path in folder.rglob("*"))


def steps_of(folder: Path, kinds: Iterable[str] = ("step-",)) -> list[int]:
    """Steps of the attempts that have a folder."""
    found = [path.name for path in folder.iterdir() if path.name.startswith(tuple(kinds))]
    return sorted(int(name.partition("step-")[2][:12]) for name in found)
