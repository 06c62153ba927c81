"""Cases that need a file system of their own; run in a private mount namespace, see test_j_disks.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardstore import SaveFailedError, SnapshotStore
from tests.cases.bits import Outcomes, bits, refusal, soil
from tests.faults.scenario import open_store


def mount(folder: Path, options: str) -> None:
    """Put a tmpfs on `folder`."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)


def _free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def full_disk(rank: int, folder: str) -> dict[str, Any]:
    """Rank 1's state does not fit the root; afterwards a smaller one does."""
    root = Path(folder, "root")
    store = open_store(folder, memory=0)
    state: dict[str, Any] = {"w": torch.arange(1000.0) + rank}
    store.save(state, step=1).wait(20)
    store.drain()
    torch.distributed.barrier()
    saved, free = bits(state), _free_bytes(root)
    large = {"w": torch.zeros((4 << 20) // 4 if rank == 1 else 8)}
    failed = refusal(lambda: store.save(large, step=2).wait(20), large)
    with pytest.raises(SaveFailedError):
        store.drain()
    torch.distributed.barrier()
    space_is_back = _free_bytes(root) >= free - 8192
    soil(state)
    step = store.restore(state).step
    old_ok = bits(state) == saved
    store.save(state, step=3).wait(20)
    listed = [info.step for info in store.snapshots()]
    store.close()
    return {
        "failed": failed,
        "space": space_is_back,
        "step": step,
        "old_ok": old_ok,
        "listed": listed,
    }


def read_only_root(folder: Path) -> dict[str, Any]:
    """Save, make the root read-only, restore, and try to save again."""
    root = folder / "root"
    mount(root, "size=8m")
    live = {"w": torch.arange(4.0)}
    with SnapshotStore(root, memory=0) as store:
        store.save(live, step=1).wait(20)
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    before = sorted((str(p), p.stat().st_mtime_ns) for p in root.rglob("*"))
    saved = bits(live)
    soil(live)
    store = SnapshotStore(root, memory=0)
    store.restore(live)
    equal = bits(live) == saved
    failed = refusal(lambda: store.save(live, step=2).wait(20), live)
    listed = [info.step for info in store.snapshots()]
    refusal(store.close)
    after = sorted((str(p), p.stat().st_mtime_ns) for p in root.rglob("*"))
    return {"equal": equal, "failed": failed, "listed": listed, "untouched": before == after}


def small_memory(folder: Path) -> dict[str, Any]:
    """8 MB of state and a tmpfs of 1 MB for the memory tier: with a root, and without."""
    shm = folder / "shm"
    mount(shm, "size=1m")
    live = {"w": torch.arange(2_000_000.0)}
    saved = bits(live)
    with SnapshotStore(folder / "beside", memory="64MiB", memory_dir=shm) as store:
        store.save(live, step=1).wait(20)
        store.save(live, step=2).wait(20)
        soil(live)
        step = store.restore(live).step
    equal = bits(live) == saved
    alone = SnapshotStore(name="alone", memory="64MiB", memory_dir=shm)
    failed = refusal(lambda: alone.save(live, step=1).wait(20), live)
    listed = alone.snapshots()
    alone._abandon("the test ends")
    return {"step": step, "equal": equal, "failed": failed, "listed": len(listed)}


def main() -> None:
    """Run the cases that the arguments name, and print what they found."""
    case, folder = sys.argv[1], Path(sys.argv[2])
    if case == "full_disk":
        mount(folder / "full_disk", "size=1m")
        found: Any = Outcomes(2, str(folder), full_disk).of(full_disk)
    else:
        found = {"read_only_root": read_only_root(folder), "small_memory": small_memory(folder)}
    print(json.dumps(found))
