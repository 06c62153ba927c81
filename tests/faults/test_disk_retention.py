"""Retention where disks are the outermost tier: what only memory has is no successor."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest
import torch

from shardstore import SaveFailedError, SnapshotStore
from shardstore.engine.pruning import prune
from shardstore.tiers.fileops import FileOps, use_ops
from tests.faults.orphans import WRITER, catalog_of, state
from tests.faults.scenario import open_store


class _HeldDisk(FileOps):
    """Files on the disk get their names only when a test lets them; those of some steps never do."""

    def __init__(self, disk: Path) -> None:
        self.disk = str(disk)
        self.go = {step: threading.Event() for step in range(1, 9)}
        self.broken: set[int] = set()

    def rename(self, old: str, new: str) -> None:
        if new.startswith(self.disk) and new.endswith(".safetensors"):
            step = int(new.partition("step-")[2][:12])
            assert self.go[step].wait(60.0)
            if step in self.broken:
                raise OSError(errno.EIO, "the disk broke")
        super().rename(old, new)


def _open(folder: str, disk: Path, *, keep: int | None = 1) -> SnapshotStore:
    memory = Path(folder, "memory")
    memory.mkdir(exist_ok=True)
    return SnapshotStore(
        disk=disk, name="job", memory="1MiB", memory_dir=memory, keep=keep, timeout_s=20.0
    )


def _wait_listed(store: SnapshotStore, step: int) -> None:
    deadline = time.monotonic() + 20.0
    while step not in [info.step for info in store.snapshots()]:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def _on_disk(disk: Path) -> list[int]:
    return sorted(int(p.parent.name[5:17]) for p in disk.rglob("*.safetensors"))


def test_the_last_one_on_the_disk_stays_while_a_newer_one_is_only_in_memory(
    folder: str, disk_folder: Path
) -> None:
    ops = _HeldDisk(disk_folder)
    with use_ops(ops):
        store = _open(folder, disk_folder)
    first = store.save(state(1), step=1)
    second = store.save(state(2), step=2)
    _wait_listed(store, 2)
    ops.go[1].set()
    assert first.wait(20) is not None
    assert _on_disk(disk_folder) == [1], "nothing else is safe yet"
    ops.broken.add(2)
    ops.go[2].set()
    with pytest.raises(SaveFailedError, match="the disk broke"):
        second.wait(20)
    live = state(-1)
    assert store.restore(live).step == 1
    ops.go[3].set()
    with pytest.raises(SaveFailedError):
        store.save(state(3), step=3)
    assert store.save(state(3), step=3).wait(20) is not None
    store.drain()
    assert _on_disk(disk_folder) == [3]
    store.close()


def test_a_start_keeps_the_last_one_on_the_disk_while_a_newer_one_is_only_in_memory(
    folder: str, disk_folder: Path
) -> None:
    with _open(folder, disk_folder, keep=None) as store:
        for step in (1, 2):
            assert store.save(state(step), step=step).wait(20) is not None
        store.close(keep_memory=True)
    for path in disk_folder.rglob("step-000000000002.*/*"):
        path.unlink()  # as if the process had ended before it was there
    store = _open(folder, disk_folder)
    assert _on_disk(disk_folder) == [1]
    live = state(-1)
    assert store.restore(live).step == 2
    assert store.save(state(3), step=3).wait(20) is not None
    store.drain()
    assert _on_disk(disk_folder) == [3]
    assert [info.step for info in store.snapshots()] == [3]
    store.close()


def test_a_pinned_snapshot_that_only_memory_has_is_not_waited_for(folder: str) -> None:
    with open_store(folder, memory="16KiB", timeout_s=60.0) as store:
        for step in (1, 2):
            live = {"w": torch.full((700,), float(step))}
            assert store.save(live, step=step).wait(20) is not None
        store.drain()
        assert len(prune(catalog_of(folder), 1, writer=WRITER, dry_run=False)) == 1
        assert [info.step for info in store.snapshots()] == [1, 2]
        store.pin(1)
        started = time.monotonic()
        assert store.save({"w": torch.full((700,), 3.0)}, step=3).wait(50) is not None
        assert time.monotonic() - started < 30.0, "nothing was on its way out"
        live = {"w": torch.zeros(700)}
        assert store.restore(live, step=1).step == 1
        assert live["w"].tolist() == [1.0] * 700
