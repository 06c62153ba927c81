"""What was found damaged does not count for `keep`, in this process and after a restart (P4)."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardstore import CorruptSnapshotError, ShardStoreError, SnapshotStore
from shardstore.tiers.fileops import FileOps, use_ops
from tests.store.conftest import OpenStore

PLACES: dict[str, dict[str, Any]] = {
    "root": {"memory": 0},
    "disk": {"root": None, "disk": "disk", "memory": 0},
    "memory": {"root": None, "name": "job"},
}


def _state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4,), float(value))}


def _save(store: SnapshotStore, *steps: int) -> None:
    for step in steps:
        store.save(_state(step), step=step).wait()
    store.drain()


def _steps(store: SnapshotStore) -> list[int]:
    return [info.step for info in store.snapshots()]


def _shard(step: int, *homes: Path) -> Path:
    (found,) = (
        path for home in homes for path in home.rglob(f"step-{step:012d}.*/rank-00000.safetensors")
    )
    return found


def _flip(path: Path) -> None:
    """One bit of the tensor, in place."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        file.seek(8 + length + 3)
        byte = file.read(1)[0]
        file.seek(8 + length + 3)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("restarts", [False, True], ids=["same process", "after a restart"])
@pytest.mark.parametrize("place", PLACES)
def test_what_was_found_damaged_does_not_count_and_makes_no_good_one_go(
    folder: str, disk_folder: Path, open_store: OpenStore, place: str, restarts: bool
) -> None:
    options = dict(PLACES[place])
    if "disk" in options:
        options["disk"] = disk_folder / "disk"
    store = open_store(keep=2, **options)
    _save(store, 1, 2)
    store.close(keep_memory=True)
    _flip(_shard(2, Path(folder), disk_folder))
    store = open_store(keep=2, **options)
    assert store.restore(_state(-1)).step == 1
    homes = (Path(folder), disk_folder)
    assert not [p for h in homes for p in h.rglob("*damaged*")], "nothing before the first save"
    _save(store, 3)
    assert [p for h in homes for p in h.rglob("*damaged*")]
    assert {1, 3} <= set(_steps(store)), "2 takes nobody's place"
    if restarts:
        store.close(keep_memory=True)
        store = open_store(keep=2, **options)
        assert {1, 3} <= set(_steps(store))
    _save(store, 4)
    assert {3, 4} <= set(_steps(store))
    assert 1 not in _steps(store)
    _save(store, 5)
    assert _steps(store) == [4, 5], "two good ones are newer: it goes as it would have gone whole"
    store.close(keep_memory=True)
    assert not [p for h in homes for p in h.rglob("*damaged*")]


def test_a_damaged_one_stays_with_a_policy_that_would_have_kept_it_whole(
    folder: str, open_store: OpenStore
) -> None:
    """A mark may be wrong (a bad cable, bad memory): what it speaks of goes no sooner for it."""
    store = open_store(memory=0, keep=1)
    _save(store, 1)
    store.pin(1)
    _save(store, 2)
    store.close()
    for step in (1, 2):
        _flip(_shard(step, Path(folder)))
    store = open_store(memory=0, keep=1)
    with pytest.raises(CorruptSnapshotError):
        store.restore(_state(-1))
    _save(store, 3)
    assert _steps(store) == [1, 3]


class _Unreadable(FileOps):
    """Reads of shards fail while armed."""

    armed = False

    def read_at(self, fd: int, into: memoryview, offset: int) -> int:
        if self.armed and "rank-" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, "broken")
        return super().read_at(fd, into, offset)


def test_a_device_that_gives_no_bytes_proves_no_damage(folder: str, open_store: OpenStore) -> None:
    ops = _Unreadable()
    with use_ops(ops):
        store = open_store(memory=0, keep=2)
    _save(store, 1, 2)
    ops.armed = True
    with pytest.raises(ShardStoreError, match="EIO"):
        store.restore(_state(-1))
    ops.armed = False
    assert store.restore(_state(-1)).step == 2
    _save(store, 3)
    assert not list(Path(folder).rglob("*damaged*"))


def test_a_truncated_file_and_a_forged_header_are_damage(
    folder: str, open_store: OpenStore
) -> None:
    store = open_store(memory=0)
    _save(store, 1, 2, 3)
    store.close()
    os.truncate(_shard(3, Path(folder)), 5000)
    _shard(2, Path(folder)).write_bytes(b"\0" * 9000)
    store = open_store(memory=0)
    assert store.restore(_state(-1)).step == 1
    _save(store, 4)
    marked = {path.parent.name[:17] for path in Path(folder).rglob("damaged")}
    assert marked == {"step-000000000002", "step-000000000003"}


def test_a_mark_that_cannot_be_written_warns_and_breaks_nothing(
    folder: str, open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    class NoMarks(FileOps):
        def open_new(self, path: str, mode: int = 0o666) -> int:
            if path.endswith("damaged"):
                raise OSError(errno.ENOSPC, "full")
            return super().open_new(path, mode)

    with use_ops(NoMarks()):
        store = open_store(memory=0, keep=2)
    _save(store, 1, 2)
    _flip(_shard(2, Path(folder)))
    assert store.restore(_state(-1)).step == 1
    _save(store, 3)
    assert "cannot be marked" in caplog.text
    assert {1, 3} <= set(_steps(store)), "this process knows it all the same"
