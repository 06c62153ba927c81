"""An error at any one operation of a save, on a full, broken or lying disk: old or new, whole, on all ranks."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardstore.tiers.fileops import use_ops
from tests.faults.breaking_ops import WatchedOps
from tests.faults.threaded import Ranks, Stores, names, steps_of, used_bytes

TIERS: dict[str, dict[str, Any]] = {
    "root": {"memory": 0},
    "memory and root": {"memory": "1MiB"},
    "disk and root": {"memory": 0, "disk": True},
    "memory, disk and root": {"memory": "1MiB", "disk": True},
}


class BrokenOps(WatchedOps):
    """Fails once at operation `number`, before it happens, or after it did (`in_doubt`)."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.code = 0
        self.in_doubt = False
        self.at = ""
        self._owed = threading.local()

    def break_at(self, number: int, code: int, *, in_doubt: bool) -> None:
        self.names, self.at = [], ""
        self.number, self.code, self.in_doubt = number, code, in_doubt
        self.arm()

    def _hit(self, name: str, *subject: object) -> None:
        before = len(self.names)
        super()._hit(name, *subject)
        if name.startswith(("point:", "store")) or not self._armed:
            return  # no system calls
        with self._lock:
            is_it = len(self.names) > before and len(self.names) >= self.number > 0 and not self.at
            if is_it:
                self.at = self.names[-1]
        if is_it and self.in_doubt:
            self._owed.error = OSError(self.code, "in doubt")
        elif is_it:
            raise OSError(self.code, "broken")

    def _settle(self) -> None:
        error, self._owed.error = getattr(self._owed, "error", None), None
        if error is not None:
            raise error


def _in_doubt(name: str) -> Callable[..., Any]:
    whole = getattr(WatchedOps, name)

    def call(self: BrokenOps, *args: Any, **options: Any) -> Any:
        result = whole(self, *args, **options)
        self._settle()
        return result

    return call


for _name in ("fsync", "rename", "link", "unlink", "make_folder", "remove_folder", "write_at"):
    setattr(BrokenOps, _name, _in_doubt(_name))


def _open(here: Path, tiers: str, ops: BrokenOps, disk_folder: Path, **more: Any) -> Stores:
    options = dict(TIERS[tiers])
    if options.pop("disk", False):
        options["disk"] = disk_folder / "disk"
    memory = here / "memory"
    memory.mkdir(exist_ok=True)
    with use_ops(ops):
        return Ranks().open(here / "root", memory_dir=memory, name="job", **options, **more)


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize(
    ("code", "in_doubt"),
    [(errno.ENOSPC, False), (errno.EIO, False), (errno.EIO, True), (errno.EDQUOT, False)],
    ids=["full", "broken", "in doubt", "quota"],
)
def test_old_or_new_whole_on_all_ranks_and_the_space_comes_back(
    folder: str, disk_folder: Path, tiers: str, code: int, in_doubt: bool
) -> None:
    if code == errno.EDQUOT and tiers != "root":
        pytest.skip("as a full disk")
    here, root = Path(folder), Path(folder, "root")
    ops = BrokenOps()
    stores = _open(here, tiers, ops, disk_folder, keep=1, on_error="warn")
    assert stores.save(1) == ["", ""]
    stores.drain()
    used, step, newest, number = used_bytes(root), 1, 1, 0
    while True:
        number += 1
        step += 1
        ops.break_at(number, code, in_doubt=in_doubt)
        told = stores.save(step)
        stores.drain()
        ops.disarm()
        at = f"operation {number}, {ops.at}"
        if not ops.at:
            assert told == ["", ""]
            break  # a save has no more operations than that
        assert bool(told[0]) == bool(told[1]), f"{at}: {told}"
        if told[0]:
            assert all("SaveFailedError" in text for text in told), at
            assert errno.errorcode[code] in told[0], f"{at}: {told}"
        else:
            newest = step
        assert stores.listed()[-1] == newest, at
        assert stores.restore() == newest, at
        step += 1
        assert stores.save(step) == ["", ""], at
        stores.drain()
        newest = step
        assert stores.restore() == newest, at
        assert steps_of(root) == [newest], f"{at}: left {names(root)}"
        assert used_bytes(root) <= used, f"{at}: space was lost: {names(root)}"
    assert number > 20
    assert steps_of(root, ("step-", "deleted-")) == [step]
    stores.close()
    again = _open(here, tiers, ops, disk_folder)
    assert again.restore() == step
    again.close()
