"""A process that lives under a memory limit, and says how close it came: run by test_limits_process.py.

The group is pretended, its use is not: it is what a kernel would count, anonymous memory of this process
and the blocks of its files on the tmpfs, read anew at every look.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from shardstore import SnapshotStore
from shardstore.tiers.fileops import use_ops
from tests.store.limited_ops import MIB, LimitedOps

STATE_BYTES = 300 * MIB
NUM_STEPS = 6


class LiveOps(LimitedOps):
    """Counts what this process really has."""

    def __init__(self, memory_dir: Path) -> None:
        super().__init__(0)
        self.memory_dir = memory_dir

    def used(self) -> int:
        return used_bytes(self.memory_dir)


def used_bytes(memory_dir: Path) -> int:
    """Anonymous memory, and blocks of files on the tmpfs or without a name."""
    status = Path("/proc/self/status").read_text()
    anonymous = int(status.split("RssAnon:")[1].split()[0]) * 1024
    files = 0
    for path in memory_dir.rglob("*"):
        try:
            files += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    nameless = 0
    for line in Path("/proc/self/smaps").read_text().split("\n"):
        if "memfd:shardstore" in line:
            start, _, stop = line.split()[0].partition("-")
            nameless += int(stop, 16) - int(start, 16)
    return anonymous + files + nameless


def main() -> None:
    """Save for several steps under a limit of `sys.argv[3]` bytes above what is in use, and restore."""
    root, memory_dir, above = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    memory: Any = sys.argv[4]
    state = {f"t{i}": torch.full((STATE_BYTES // 10 // 4,), -1.0) for i in range(10)}
    ops = LiveOps(memory_dir)
    ops.limit = ops.used() + above
    peak, running = [0], [True]

    def watch() -> None:
        while running[0]:
            peak[0] = max(peak[0], used_bytes(memory_dir))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with use_ops(ops), SnapshotStore(root, memory=memory, memory_dir=memory_dir) as store:
            for step in range(1, NUM_STEPS + 1):
                for tensor in state.values():
                    tensor.fill_(step)
                store.save(state, step=step)
            store.drain()
            steps = [info.step for info in store.snapshots()]
            for tensor in state.values():
                tensor.fill_(-1)
            restored = store.restore(state).step
            num_streamed = store.stats().num_streamed
    finally:
        running[0] = False
        watcher.join()
    same = all(bool((tensor == restored).all()) for tensor in state.values())
    print(json.dumps({"peak": peak[0], "limit": ops.limit, "steps": steps, "restored": restored,
                      "same": same, "num_streamed": num_streamed}))  # fmt: skip


if __name__ == "__main__":
    main()
