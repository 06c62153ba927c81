"""A lock file has one owner, whoever leaves while others come."""

from __future__ import annotations

import os
from pathlib import Path

from shardstore.tiers import ownership
from shardstore.tiers.fileops import FileOps


class _LeavingOps(FileOps):
    """The holder removes the file, and lets go, right after somebody else has opened it."""

    def __init__(self) -> None:
        self.times = 0

    def open_lock(self, path: str) -> int:
        fd = super().open_lock(path)
        if self.times < 2:
            self.times += 1
            os.unlink(path)
        return fd


def test_a_lock_on_a_removed_file_is_no_lock(folder: str) -> None:
    path, ops = str(Path(folder, "owner-0000-00000.lock")), _LeavingOps()
    assert ownership.acquire(path, ops=ops) is None
    assert ops.times == 2
    assert os.path.exists(path), "another process would make it anew, and own it as well"
    assert ownership.is_held_here(path)
    ownership.release(path, remove=True)
    assert not os.path.exists(path)
