"""Ranks as threads over one in-memory key-value store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shardstore.cluster.coordination import Coordinator
from shardstore.cluster.kv import KeyValueStore, LocalKeyValueStore

T = TypeVar("T")


def coordinators(
    world_size: int, *, timeout_s: float = 5.0, store: KeyValueStore | None = None
) -> list[Coordinator]:
    """One coordinator per rank, over one store."""
    shared = LocalKeyValueStore() if store is None else store
    return [
        Coordinator(shared, rank=rank, world_size=world_size, timeout_s=timeout_s)
        for rank in range(world_size)
    ]


def on_all(ranks: list[Coordinator], call: Callable[[Coordinator], T]) -> list[T | BaseException]:
    """Run `call` for every rank at the same time; results or exceptions by rank."""

    def guarded(rank: Coordinator) -> T | BaseException:
        try:
            return call(rank)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(guarded, ranks))


class FrozenStore(LocalKeyValueStore):
    """A store whose host can be stopped: every call then blocks, as a TCP client does."""

    def __init__(self) -> None:
        super().__init__()
        self.running = threading.Event()
        self.running.set()

    def get(self, key: str) -> bytes | None:
        self.running.wait()
        return super().get(key)

    def set(self, key: str, value: bytes) -> None:
        self.running.wait()
        super().set(key, value)
