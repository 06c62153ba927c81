"""A job on a file system that will lose its power: it tells before and after each operation what is committed."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any, Final, Literal

import torch

from shardstore import SnapshotStore
from shardstore.tiers.fileops import FileOps, use_ops

NUM_ROWS: Final = 60_000
STEPS: Final = ((None, (1, 2)), (1, (3, 4, 5)))
"""What `keep` is, and the steps that are saved under it."""
PINNED: Final = 1
"""Before `keep` deletes."""


def state(step: int) -> dict[str, Any]:
    """What step `step` saves: no two steps have an equal element."""
    generator = torch.Generator().manual_seed(step)
    return {
        "w": torch.randint(0, 2**31, (NUM_ROWS,), generator=generator),
        "small": torch.full((3,), float(step)),
        "step": {"n": step},
    }


class TellingOps(FileOps):
    """Writes a line to `told` around every operation and goes on when `heard` answers."""

    def __init__(self, told: int, heard: int, *, is_honest: bool) -> None:
        self._told = told
        self._is_honest = is_honest
        self._heard = heard
        self._lock = threading.RLock()
        self._linked: str | None = None
        self.committed: list[str] = []
        """Ids whose manifest has been created, durably."""
        self.leaving: list[str] = []
        """Ids that somebody has begun to take off the list."""
        self.pinning: Literal["before", "under way", "done"] = "before"
        """Of the first step."""

    def tell(self, name: str) -> None:
        with self._lock:
            line = {
                "at": name,
                "committed": self.committed,
                "leaving": self.leaving,
                "pinning": self.pinning,
            }
            os.write(self._told, json.dumps(line).encode() + b"\n")
            assert os.read(self._heard, 1)

    def _around(self, name: str, path: str) -> str:
        return f"{name} {os.path.basename(path)}"

    def point(self, name: str) -> None:
        self.tell(f"point {name}")

    def open_new(self, path: str, mode: int = 0o666) -> int:
        fd = super().open_new(path, mode)
        self.tell(self._around("after open_new", path))
        return fd

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        super().write_at(fd, data, offset)
        self.tell(f"after write_at {offset}")

    def fsync(self, fd: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        self.tell(f"before fsync {name}")
        if self._is_honest:
            super().fsync(fd)
        self.tell(f"after fsync {name}")

    def fsync_folder(self, path: str) -> None:
        super().fsync_folder(path)
        with self._lock:
            if self._linked is not None and path == os.path.dirname(self._linked):
                self.committed.append(os.path.basename(self._linked))
                self._linked = None

    def rename(self, source: str, target: str) -> None:
        if os.path.basename(target) == "manifest.json":
            self.leaving.append(os.path.basename(os.path.dirname(target)))
        self.tell(self._around("before rename", target))
        super().rename(source, target)
        self.tell(self._around("after rename", target))

    def link(self, source: str, target: str) -> None:
        self.tell(self._around("before link", target))
        super().link(source, target)
        if os.path.basename(target) == "manifest.json":
            self._linked = os.path.dirname(target)
        self.tell(self._around("after link", target))

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self.tell(self._around("after unlink", path))

    def make_folder(self, path: str, mode: int = 0o777) -> None:
        super().make_folder(path, mode)
        self.tell(self._around("after make_folder", path))

    def remove_folder(self, path: str) -> None:
        super().remove_folder(path)
        self.tell(self._around("after remove_folder", path))


def main() -> None:
    """Arguments: the root, two descriptors, and whether to sync or only to say so."""
    torch.set_num_threads(1)
    root, told, heard = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    ops = TellingOps(told, heard, is_honest=sys.argv[4] == "sync")
    with use_ops(ops):
        for keep, steps in STEPS:
            with SnapshotStore(root, memory=0, keep=keep, timeout_s=300.0) as store:
                for step in steps:
                    info = store.save(state(step), step=step).wait()
                    assert info is not None
                    assert info.id in ops.committed
                    ops.tell(f"committed {step}")
                store.drain()
                if keep is None:
                    ops.pinning = "under way"
                    store.pin(PINNED)
                    ops.pinning = "done"
                    ops.tell("pinned")
    ops.tell("the end")


if __name__ == "__main__":
    main()
