"""A kernel may write, or read, less than it was asked to: on a full or interrupted file system, over a network."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shardstore import SnapshotStore, list_snapshots

_STATE_BYTES = 3_000_001


def _state(value: int) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(value)
    return {"w": torch.randint(0, 255, (_STATE_BYTES,), dtype=torch.uint8, generator=chance)}


@pytest.mark.parametrize("unit", [1, 4096], ids=["any count", "whole pages"])
@pytest.mark.parametrize("memory", ["16MiB", 0], ids=["memory", "streamed"])
def test_short_writes_and_reads_change_nothing(
    disk_folder: Path, folder: str, monkeypatch: pytest.MonkeyPatch, unit: int, memory: str | int
) -> None:
    chance = random.Random(unit)
    pwrite, preadv = os.pwrite, os.preadv
    num_short = 0

    def short(nbytes: int) -> int:
        nonlocal num_short
        count = min(nbytes, unit * chance.randint(1, 1 + 400_000 // unit))
        num_short += count < nbytes
        return count

    def short_write(fd: int, data: Any, offset: int) -> int:
        view = memoryview(data)
        return pwrite(fd, view[: short(len(view))], offset)

    def short_read(fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        view = memoryview(buffers[0])
        return preadv(fd, [view[: short(len(view))]], offset, flags)

    monkeypatch.setattr(os, "pwrite", short_write)
    monkeypatch.setattr(os, "preadv", short_read)
    with SnapshotStore(disk_folder / "root", memory_dir=folder, memory=memory) as store:
        for value in (1, 2):
            store.save(_state(value), step=value).wait()
    live = _state(3)
    with SnapshotStore(disk_folder / "root", memory_dir=folder, memory=memory) as store:
        for value in (1, 2):
            assert store.restore(live, step=value).step == value
            assert torch.equal(live["w"], _state(value)["w"])
    assert [info.step for info in list_snapshots(disk_folder / "root")] == [1, 2]
    assert num_short > 20
