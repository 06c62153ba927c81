"""Real bug reports on stale near copies and on disks that are too small (C90, C93)."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from shardstore import CorruptSnapshotError
from shardstore.tiers.fileops import FileOps, use_ops
from tests.faults.threaded import Ranks, Stores, state_of


class _Unreachable(FileOps):
    """Nothing below a folder answers."""

    def __init__(self, folder: str = "") -> None:
        self.folder = folder

    def _check(self, path: str) -> None:
        if self.folder and path.startswith(self.folder):
            raise OSError(errno.EHOSTDOWN, "Host is down")

    def list_folder(self, path: str) -> list[str]:
        self._check(path)
        return super().list_folder(path)

    def open_existing(self, path: str, *, writable: bool = False) -> int:
        self._check(path)
        return super().open_existing(path, writable=writable)

    def open_new(self, path: str, mode: int = 0o666) -> int:
        self._check(path)
        return super().open_new(path, mode)

    def make_folder(self, path: str, mode: int = 0o777) -> None:
        self._check(path)
        super().make_folder(path, mode)


def _open(folder: str, disk: Path, ops: FileOps | None = None, **options: Any) -> Stores:
    memory: dict[str, Any] = {"memory": "1MiB", "memory_dir": Path(folder, "memory")}
    memory["memory_dir"].mkdir(exist_ok=True)
    with use_ops(ops or FileOps()):
        return Ranks().open(Path(folder, "root"), disk=disk, name="job", **memory, **options)


def _on_disk(disk: Path, step: int) -> Path:
    return next(disk.rglob(f"step-{step:012d}.*/rank-00001.safetensors"))


def _save(folder: str, disk: Path, *steps: int) -> None:
    stores = _open(folder, disk)
    for step in steps:
        assert stores.save(step) == ["", ""]
    stores.drain()
    stores.close()


def test_a_cut_copy_on_the_disk_gives_way_to_the_whole_one_on_the_root(
    folder: str, disk_folder: Path
) -> None:
    """C93."""
    _save(folder, disk_folder, 3, 4)
    os.truncate(_on_disk(disk_folder, 4), 5000)
    stores = _open(folder, disk_folder)
    assert stores.restore() == 4
    stores.close()


def test_a_newer_one_on_the_disks_of_all_ranks_is_preferred_to_an_older_one_on_the_root(
    folder: str, disk_folder: Path
) -> None:
    """C93."""
    _save(folder, disk_folder, 4)
    root = Path(folder, "root")
    away = Path(folder, "away")
    stores = _open(folder, disk_folder)
    stores.save(5)
    stores.drain()
    stores.close()
    (newest,) = root.glob("step-000000000005.*")
    newest.rename(away)
    stores = _open(folder, disk_folder)
    assert stores.restore() == 5
    stores.close()


def test_a_root_that_does_not_answer_leaves_what_is_on_the_disks_with_a_warning(
    folder: str, disk_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C93."""
    _save(folder, disk_folder, 4, 5)
    ops = _Unreachable(f"{folder}/root")
    stores = _open(folder, disk_folder, ops, on_error="warn")
    assert stores.restore() == 5
    assert "EHOSTDOWN" in caplog.text
    assert all("EHOSTDOWN" in told for told in stores.save(6))
    ops.folder = ""
    assert stores.save(7) == ["", ""]
    assert stores.restore() == 7
    assert stores.listed() == [4, 5, 7]
    stores.close()


@pytest.mark.parametrize("required", [True, False])
def test_a_root_that_does_not_answer_is_never_taken_for_an_empty_one(
    folder: str, disk_folder: Path, required: bool
) -> None:
    """C77, C93: nothing near, and nobody can say what the root has."""
    _save(folder, disk_folder, 4)
    for path in disk_folder.rglob("*.safetensors"):
        path.unlink()
    stores = _open(folder, disk_folder, _Unreachable(f"{folder}/root"))
    with pytest.raises(CorruptSnapshotError, match="EHOSTDOWN"):
        stores.restore(required=required)
    stores.abandon()


class _Small(FileOps):
    """A file system that says how much is free."""

    def __init__(self, free: int | None) -> None:
        self.free = free
        self.asked: list[str] = []

    def free_space(self, path: str) -> int | None:
        self.asked.append(path)
        return self.free


def _each(folder: str) -> int:
    """Bytes of one snapshot on the root."""
    newest = max(Path(folder, "root").glob("step-*"))
    return sum(path.stat().st_size for path in newest.glob("*.safetensors"))


@pytest.mark.parametrize("memory", [0, "1MiB"])
def test_a_disk_that_cannot_hold_what_is_to_be_kept_is_told_at_the_first_save(
    folder: str, caplog: pytest.LogCaptureFixture, memory: int | str
) -> None:
    """C90: the size of the state, times keep + 1, against free space. It warns, and blocks nothing."""
    said = "bytes free. To keep 2 snapshot(s)"
    root = Path(folder, "root")
    options: dict[str, Any] = {"memory": memory, "memory_dir": folder, "keep": 2}
    with use_ops(_Small(None)):
        stores = Ranks().open(root, **options)
    assert stores.save(1) == ["", ""]
    stores.close()
    each = _each(folder)
    # Step 1 is there already, and goes in its turn: room for two more is enough.
    for free, is_told in (
        (2 * each + 64, False),
        (2 * each - 4096, True),
        (None, False),
        (0, True),
    ):
        caplog.clear()
        ops = _Small(free)
        with use_ops(ops):
            stores = Ranks().open(root, **options)
        for step in (2, 3):
            assert stores.save(step) == ["", ""]
        stores.drain()
        stores.each(lambda store, _: store.delete(3))
        stores.close()
        assert caplog.text.count(said) == int(is_told), (free, each, caplog.text)
        assert ops.asked == [str(root)], "once, on one rank"
        if is_told:
            assert str(root) in caplog.text
            assert f"{free:,} bytes free" in caplog.text


def test_a_disk_that_is_too_small_is_told_by_warmup(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    """C90: before training."""
    with use_ops(_Small(1 << 12)):
        stores = Ranks().open(Path(folder, "root"), memory="1MiB", memory_dir=folder)
    stores.each(lambda store, rank: store.warmup(state_of(1, rank, 3000)))
    assert caplog.text.count("4,096 bytes free. To keep 1 snapshot(s)") == 1
    assert stores.save(1) == ["", ""]
    stores.close()
    assert caplog.text.count("bytes free") == 1


def test_a_real_disk_with_room_is_not_complained_of(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    """C90."""
    stores = Ranks().open(Path(folder, "root"), memory=0)
    assert stores.save(1) == ["", ""]
    stores.close()
    assert "bytes free" not in caplog.text
