"""Stores of one process, with every file under one folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardstore import SnapshotStore

OpenStore = Callable[..., SnapshotStore]


@pytest.fixture
def open_store(folder: str) -> Iterator[OpenStore]:
    """Open stores on one root and memory folder; what a test leaves open is abandoned."""
    opened: list[SnapshotStore] = []

    def open_one(root: str | None = "root", **options: Any) -> SnapshotStore:
        memory_dir = Path(folder) / "memory"
        memory_dir.mkdir(exist_ok=True)
        options.setdefault("memory", "64MiB")
        options.setdefault("timeout_s", 10.0)
        options.setdefault("memory_dir", memory_dir)
        store = SnapshotStore(None if root is None else Path(folder) / root, **options)
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.take_leave("the test ends")
