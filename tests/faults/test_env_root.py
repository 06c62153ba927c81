"""A root that goes away, turns read-only or shows one file that cannot be read, while a job of two ranks runs."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from shardstore import CorruptSnapshotError, ShardStoreError, SnapshotStore, list_snapshots
from shardstore.tiers.fileops import FileOps, use_ops
from tests.faults.breaking_ops import WatchedOps, raise_at
from tests.faults.threaded import Ranks, Stores, names, state_of, steps_of

TIERS: dict[str, dict[str, Any]] = {"root alone": {"memory": 0}, "memory": {"memory": "1MiB"}}


def _open(here: Path, ops: FileOps | None = None, **options: Any) -> Stores:
    memory = here / "memory"
    memory.mkdir(exist_ok=True)
    with use_ops(ops or FileOps()):
        return Ranks().open(  # whoever is not told fails the test by its timeout
            here / "root", memory_dir=memory, name="job", timeout_s=100.0, **options
        )


def _refusals(stores: Stores, step: int) -> list[str]:
    told = stores.save(step)
    assert all(told), told
    stores.drain()
    return told


@pytest.mark.parametrize("tiers", TIERS)
def test_a_root_that_is_removed_while_running_is_made_again_by_the_next_save(
    folder: str, tiers: str, caplog: pytest.LogCaptureFixture
) -> None:
    here = Path(folder)
    stores = _open(here, **TIERS[tiers])
    assert stores.save(1) == ["", ""]
    shutil.rmtree(here / "root")
    assert stores.listed() == ([1] if tiers == "memory" else [])
    for step in (2, 3):
        assert stores.save(step) == ["", ""]
        assert stores.restore() == step
    assert caplog.text.count("it was emptied, or its file system was unmounted") == 1
    assert [info.step for info in list_snapshots(here / "root")] == [2, 3]
    stores.close()
    again = _open(here, **TIERS[tiers])
    assert again.restore() == 3
    assert again.save(4) == ["", ""]
    assert again.restore() == 4
    again.close()


@pytest.mark.parametrize("tiers", TIERS)
def test_a_root_that_became_a_file_fails_saves_with_its_path_and_works_once_it_is_back(
    folder: str, tiers: str
) -> None:
    here = Path(folder)
    root, away = here / "root", here / "away"
    stores = _open(here, on_error="warn", **TIERS[tiers])
    assert stores.save(1) == ["", ""]
    root.rename(away)
    root.write_text("theirs")
    for text in _refusals(stores, 2):
        assert "SaveFailedError" in text
        assert str(root) in text
    assert root.read_text() == "theirs"
    root.unlink()
    away.rename(root)
    assert stores.save(3) == ["", ""]
    assert stores.restore() == 3
    assert stores.restore(step=1) == 1
    assert stores.listed() == [1, 3]
    stores.close()


def test_a_folder_of_an_attempt_that_vanishes_before_its_commit_fails_the_save(folder: str) -> None:
    here = Path(folder)

    class Ops(WatchedOps):
        def open_new(self, path: str, mode: int = 0o666) -> int:
            if self._armed and ".manifest.json" in path:
                self.disarm()
                shutil.rmtree(os.path.dirname(path))
            return super().open_new(path, mode)

    ops = Ops()
    stores = _open(here, ops, memory=0, on_error="warn")
    assert stores.save(1) == ["", ""]
    ops.arm()
    for text in _refusals(stores, 2):
        assert "SaveFailedError" in text
    assert stores.restore() == 1
    assert stores.save(3) == ["", ""]
    assert stores.listed() == [1, 3]
    stores.close()


def _facts(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of every name below a folder what writing would change; reading may change the time of access."""
    found = {name: (folder / name).lstat() for name in names(folder)}
    return {name: (s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found.items()}


class ReadOnlyOps(FileOps):
    """A file system that was remounted read-only, below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.is_on = False

    def _check(self, path: str) -> None:
        if self.is_on and path.startswith(self.folder):
            raise OSError(errno.EROFS, "Read-only file system")

    def open_new(self, path: str, mode: int = 0o666) -> int:
        self._check(path)
        return super().open_new(path, mode)

    def open_existing(self, path: str, *, writable: bool = False) -> int:
        if writable:
            self._check(path)
        return super().open_existing(path, writable=writable)

    def rename(self, source: str, target: str) -> None:
        self._check(target)
        super().rename(source, target)

    def link(self, source: str, target: str) -> None:
        self._check(target)
        super().link(source, target)

    def unlink(self, path: str) -> None:
        self._check(path)
        super().unlink(path)

    def make_folder(self, path: str, mode: int = 0o777) -> None:
        self._check(path)
        super().make_folder(path, mode)

    def remove_folder(self, path: str) -> None:
        self._check(path)
        super().remove_folder(path)


@pytest.mark.parametrize("tiers", TIERS)
def test_a_read_only_root_restores_on_all_ranks_is_not_written_to_and_refuses_every_save(
    folder: str, tiers: str
) -> None:
    here, root = Path(folder), Path(folder, "root")
    ops = ReadOnlyOps(root)
    stores = _open(here, ops, **TIERS[tiers], on_error="warn", keep=1)
    assert stores.save(1) == ["", ""]
    stores.close()
    before = _facts(root)
    ops.is_on = True
    stores = _open(here, ops, **TIERS[tiers], on_error="warn", keep=1)
    assert stores.restore() == 1
    for step in (2, 3):
        for text in _refusals(stores, step):
            assert "EROFS" in text
            assert str(root) in text
    assert stores.listed()[-1:] == [1]
    assert stores.restore() == 1
    assert _facts(root) == before
    ops.is_on = False
    assert stores.save(4) == ["", ""]
    stores.drain()
    assert stores.restore() == 4
    assert steps_of(root) == [4]
    stores.close()


class UnreadableOps(FileOps):
    """Files whose path has `part` in it are somebody else's."""

    def __init__(self, part: str) -> None:
        self.part = part

    def open_existing(self, path: str, *, writable: bool = False) -> int:
        if self.part and self.part in path:
            raise OSError(errno.EACCES, "Permission denied")
        return super().open_existing(path, writable=writable)

    def list_folder(self, path: str) -> list[str]:
        if self.part and path.endswith(self.part):
            raise OSError(errno.EACCES, "Permission denied")
        return super().list_folder(path)


@pytest.mark.parametrize("what", ["manifest.json", "rank-00001.safetensors", ""])
def test_a_snapshot_that_cannot_be_read_hides_no_other_and_is_not_deleted(
    folder: str, what: str
) -> None:
    here, root = Path(folder), Path(folder, "root")
    stores = _open(here, memory=0)
    for step in (1, 2):
        assert stores.save(step) == ["", ""]
    stores.close()
    (newest,) = root.glob("step-000000000002.*")
    stores = _open(here, UnreadableOps(f"{newest.name}/{what}" if what else newest.name), memory=0)
    assert stores.listed()[0] == 1
    assert stores.restore() == 1
    with pytest.raises(ShardStoreError, match="EACCES"):
        stores.restore(step=2, fallback=False)
    assert stores.save(3) == ["", ""]
    assert stores.restore() == 3
    stores.close()
    stores = _open(here, UnreadableOps(newest.name), memory=0, keep=1)
    assert stores.save(4) == ["", ""]
    stores.drain()
    assert stores.restore() == 4
    stores.close()
    assert newest.exists(), "who cannot read it cannot tell that it may go"


def test_a_root_that_cannot_be_listed_is_an_error_and_never_an_empty_one(folder: str) -> None:
    here = Path(folder)
    stores = _open(here, memory=0)
    assert stores.save(1) == ["", ""]
    stores.close()
    with pytest.raises(CorruptSnapshotError, match="EACCES"):
        _open(here, UnreadableOps("/root"), memory=0).restore(required=False)


_CLOCKS = [1.0e9, 1.0e9 + 3600, 1.0e9 - 3600, 0.0, -1.0e6, 2.0**31 + 5, 2.0**33, 1.0e9 + 1]


@pytest.mark.parametrize("restarts", [False, True])
def test_clocks_that_jump_change_nothing_but_created(
    folder: str, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    here = Path(folder)
    stores = _open(here, memory="1MiB", keep=3)
    for step, now in enumerate(_CLOCKS, start=1):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        assert stores.save(step) == ["", ""]
        stores.drain()
        for path in (here / "root").rglob("*"):
            os.utime(path, (abs(now), abs(now)) if step % 2 else (2.0**31 + 1, 2.0**31 + 1))
        assert stores.restore() == step
        if restarts:
            stores.close(keep_memory=bool(step % 2))
            stores = _open(here, memory="1MiB", keep=3)
            assert stores.restore() == step
    monkeypatch.undo()
    last = len(_CLOCKS)
    assert stores.listed() == [last - 2, last - 1, last]
    assert steps_of(here / "root") == [last - 2, last - 1, last]
    found = list_snapshots(here / "root")
    assert [info.created for info in found] == _CLOCKS[-3:]
    stores.close()


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("is_also_fatal", [False, True])
def test_an_error_that_might_pass_is_one_decision_of_all_ranks(
    folder: str, code: int, is_also_fatal: bool
) -> None:
    """C66, on a local root: nobody goes on alone, whatever its own error says."""
    here = Path(folder)
    passing = raise_at("open_new rank-00000", OSError(code, "try again"))
    fatal = raise_at("open_new rank-00001", OSError(errno.EIO, "broken disk"))

    def act(name: str, at: int) -> None:
        passing(name, at)
        if is_also_fatal:
            fatal(name, at)

    ops = WatchedOps(act)
    stores = _open(here, ops, memory=0, on_error="warn")
    assert stores.save(1) == ["", ""]
    ops.arm()
    told = stores.save(2)
    stores.drain()
    ops.disarm()
    assert told[0] == told[1]
    if is_also_fatal:
        assert "SaveFailedError" in told[0]
    assert stores.listed() == [1] if told[0] else [1, 2]
    assert stores.restore() == (1 if told[0] else 2)
    assert stores.save(3) == ["", ""]
    assert stores.restore() == 3
    stores.close()


def test_a_save_that_is_refused_leaves_a_read_only_root_restorable_by_one_process(
    folder: str,
) -> None:
    root = Path(folder, "root")
    ops = ReadOnlyOps(root)
    ops.is_on = True
    with use_ops(ops):
        store = SnapshotStore(root, memory=0, on_error="warn", timeout_s=20)
    assert store.restore(state_of(0, 0, 10), required=False) is None
    with pytest.raises(ShardStoreError, match="EROFS"):
        store.save(state_of(1, 0, 10), step=1).wait(20)
    store.close()
