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

    def _hit(self, name: str, *subjects: str) -> None:
        before = len(self.names)
        super()._hit(name, *subjects)
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


FAULTS = {
    "full": (errno.ENOSPC, False),
    "quota": (errno.EDQUOT, False),
    "broken": (errno.EIO, False),
    "in doubt": (errno.EIO, True),
}
EVERY_TIME = (
    ("full", "root"),
    ("broken", "memory and root"),
    ("in doubt", "memory, disk and root"),
)


def _cases() -> list[Any]:
    marks = {case: () if case in EVERY_TIME else (pytest.mark.nightly,) for case in _all_cases()}
    return [pytest.param(*case, marks=marks[case], id=" - ".join(case)) for case in marks]


def _all_cases() -> list[tuple[str, str]]:
    return [(fault, tiers) for fault in FAULTS for tiers in TIERS]


@pytest.mark.parametrize(("fault", "tiers"), _cases())
def test_old_or_new_whole_on_all_ranks_and_the_space_comes_back(
    folder: str, disk_folder: Path, fault: str, tiers: str
) -> None:
    code, in_doubt = FAULTS[fault]
    here, root = Path(folder), Path(folder, "root")
    ops = BrokenOps()
    stores = _open(here, tiers, ops, disk_folder, keep=1, on_error="warn")
    assert stores.save(1) == ["", ""]
    stores.drain()
    places = (root, here / "memory", disk_folder)
    used, step, newest, number = [used_bytes(place) for place in places], 1, 1, 0
    used[1] *= 2  # a second slot comes with the second save
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
        for place, allowed in zip(places, used, strict=True):
            assert used_bytes(place) <= allowed, f"{at}: space was lost: {names(place)}"
    assert number > 20
    assert steps_of(root, ("step-", "deleted-")) == [step]
    stores.close()
    again = _open(here, tiers, ops, disk_folder)
    assert again.restore() == step
    again.close()
