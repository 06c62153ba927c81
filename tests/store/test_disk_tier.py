"""`disk=`: a folder of the host between memory and the root."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardstore import SaveFailedError, SnapshotStore, TierError, list_snapshots
from shardstore.tiers.fileops import FileOps, use_ops

_MEBI = 1 << 20
Open = Callable[..., SnapshotStore]


@pytest.fixture
def open_store(folder: str, disk_folder: Path) -> Iterator[Open]:
    """Stores with a root and memory on the tmpfs, and a disk that is one."""
    opened: list[SnapshotStore] = []

    def open_one(
        *, root: str | None = "root", disk: str | None = "disk", **options: Any
    ) -> SnapshotStore:
        memory_dir = Path(folder) / "memory"
        memory_dir.mkdir(exist_ok=True)
        options.setdefault("memory", "64MiB")
        options.setdefault("timeout_s", 10.0)
        store = SnapshotStore(
            None if root is None else Path(folder) / root,
            disk=None if disk is None else disk_folder / disk,
            memory_dir=memory_dir,
            **options,
        )
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.take_leave("the test ends")


def _state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((_MEBI,), float(value))}


def _restored(store: SnapshotStore, step: int | None = None) -> tuple[float, str]:
    live = _state(-1.0)
    report = store.restore(live, step=step)
    (value,) = live["w"].unique().tolist()  # type: ignore[no-untyped-call]
    return value, report.tier.split()[0]


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


class RootOps(FileOps):
    """Acts on the root's large writes: holds or breaks them."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.writing, self.go = threading.Event(), threading.Event()
        self.error: OSError | None = None
        self.full: int | None = None
        """How many files the disk holds."""
        self.disk = ""
        self.is_stuck = False
        """Nothing can be removed from the disk."""

    def unlink(self, path: str) -> None:
        if self.is_stuck and path.startswith(self.disk) and path.endswith(".safetensors"):
            raise OSError(30, "Read-only file system")
        super().unlink(path)

    def _path(self, fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}")

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        if len(data) > _MEBI and self._path(fd).startswith(self.root):
            self.writing.set()
            assert self.go.wait(60)
            if self.error is not None:
                raise self.error
        super().write_at(fd, data, offset)

    def allocate(self, fd: int, nbytes: int, offset: int = 0) -> None:
        path = self._path(fd)
        if self.full is not None and path.startswith(self.disk):
            sealed = [p for p in _files(Path(self.disk)) if p.suffix == ".safetensors"]
            if len(sealed) >= self.full:
                raise OSError(28, "No space left on device")
        super().allocate(fd, nbytes, offset)


@pytest.fixture
def ops(folder: str, disk_folder: Path) -> RootOps:
    found = RootOps(str(Path(folder) / "root"))
    found.disk = str(disk_folder)
    return found


def test_a_snapshot_is_on_the_disk_and_on_the_root_and_is_read_from_the_nearest(
    open_store: Open, folder: str, disk_folder: Path
) -> None:
    store = open_store()
    info = store.save(_state(1), step=1, metadata={"a": 1}).wait(20)
    assert info is not None
    assert info.tiers == ("memory", "disk", "root")
    (on_disk,) = [p for p in _files(disk_folder) if p.suffix == ".safetensors"]
    (on_root,) = (Path(folder) / "root").rglob("*.safetensors")
    assert on_disk.read_bytes() == on_root.read_bytes(), "the same bytes in every tier"
    assert on_disk.parent.name == on_root.parent.name == info.id
    store.close()
    after = open_store()
    assert [i.tiers for i in after.snapshots()] == [("disk", "root")]
    assert _restored(after) == (1.0, "disk")
    shutil.rmtree(on_disk.parent)
    assert _restored(after) == (1.0, "root")
    after.close()


def test_memory_is_free_again_once_the_disk_has_it_however_slow_the_root_is(
    open_store: Open, ops: RootOps
) -> None:
    with use_ops(ops):
        store = open_store(memory="9MiB", timeout_s=60.0)  # two
    handles = [store.save(_state(step), step=step) for step in range(1, 7)]
    assert ops.writing.wait(20)
    assert not any(handle.committed.done() for handle in handles)
    assert store.stats().num_streamed == 0
    ops.go.set()
    assert [info.step for handle in handles if (info := handle.wait(30))] == list(range(1, 7))
    assert [_restored(store, step)[0] for step in range(1, 7)] == list(range(1, 7))
    store.close()
    assert [info.step for info in list_snapshots(ops.root)] == list(range(1, 7))


def test_a_damaged_local_copy_falls_back_to_the_root_of_the_same_snapshot(
    open_store: Open, disk_folder: Path, folder: str
) -> None:
    store = open_store()
    for step in (1, 2):
        store.save(_state(step), step=step).wait(20)
    store.close()
    newest = [p for p in _files(disk_folder) if p.suffix == ".safetensors"][-1]
    with newest.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\xff" * 50)
    after = open_store()
    assert _restored(after) == (2.0, "root")
    after.close()


def test_a_full_disk_gives_up_what_the_root_has_oldest_first(
    open_store: Open, ops: RootOps
) -> None:
    ops.go.set()
    ops.full = 2
    with use_ops(ops):
        store = open_store(memory="9MiB")
    for step in range(1, 6):
        store.save(_state(step), step=step).wait(20)
    tiers = {info.step: info.tiers[-2:] for info in store.snapshots()}
    assert [step for step, found in tiers.items() if "disk" in found] == [4, 5]
    assert all("root" in found for found in tiers.values())
    assert [_restored(store, step)[0] for step in range(1, 6)] == [1, 2, 3, 4, 5]
    store.close()


def test_a_full_disk_that_removes_nothing_is_passed_by(open_store: Open, ops: RootOps) -> None:
    ops.go.set()
    ops.full, ops.is_stuck = 2, True
    with use_ops(ops):
        store = open_store()
    for step in range(1, 5):
        store.save(_state(step), step=step).wait(20)
    tiers = {info.step: info.tiers[-2:] for info in store.snapshots()}
    assert [step for step, found in tiers.items() if "disk" in found] == [1, 2]
    assert [_restored(store, step)[0] for step in range(1, 5)] == [1, 2, 3, 4]
    ops.is_stuck = False
    store.close()


def test_a_full_disk_keeps_what_the_root_has_no_file_of(
    open_store: Open, ops: RootOps, folder: str
) -> None:
    ops.go.set()
    ops.full = 2
    with use_ops(ops):
        store = open_store(memory="9MiB")
    for step in (1, 2):
        store.save(_state(step), step=step).wait(20)
    (lost,) = (Path(folder) / "root").glob("step-000000000001*/*.safetensors")
    lost.unlink()
    store.save(_state(3), step=3).wait(20)
    assert _restored(store, 1) == (1.0, "disk"), "the root lost its file; step 2 went instead"
    assert _restored(store, 2)[0] == 2.0
    store.close()


def test_a_full_disk_with_nothing_to_give_up_is_passed_by(
    open_store: Open, ops: RootOps, caplog: pytest.LogCaptureFixture
) -> None:
    ops.go.set()
    ops.full = 0
    with use_ops(ops):
        store = open_store()
    for step in (1, 2, 3):
        info = store.save(_state(step), step=step).wait(20)
        assert info is not None
        assert info.tiers == ("memory", "root")
    assert sum("The root gets it directly" in r.message for r in caplog.records) == 1
    store.close()


def test_what_fails_to_get_to_the_root_is_removed_from_the_disk(
    open_store: Open, ops: RootOps, disk_folder: Path
) -> None:
    ops.go.set()
    with use_ops(ops):
        store = open_store()
    store.save(_state(1), step=1).wait(20)
    ops.error = OSError(5, "broken")
    with pytest.raises(SaveFailedError, match="broken"):
        store.save(_state(2), step=2).wait(20)
    ops.error = None
    with pytest.raises(SaveFailedError):
        store.drain()
    assert [info.step for info in store.snapshots()] == [1]
    assert [p.parent.name[:17] for p in _files(disk_folder)] == ["step-000000000001"]
    store.close()


def test_without_a_root_the_disk_is_where_snapshots_are_safe(
    open_store: Open, folder: str, disk_folder: Path
) -> None:
    store = open_store(root=None, keep=2, memory="9MiB")
    for step in range(1, 5):
        info = store.save(_state(step), step=step, metadata={"step": step}).wait(20)
        assert info is not None
        assert info.tiers == ("memory", "disk")
    store.save(_state(9), step=9, persist=False).wait(20)
    assert [info.step for info in store.snapshots()] == [3, 4, 9]
    store.close()
    assert not (Path(folder) / "memory").exists() or not _files(Path(folder) / "memory")
    after = open_store(root=None, keep=2)
    assert [(info.step, info.tiers, info.metadata) for info in after.snapshots()] == [
        (3, ("disk",), {"step": 3}),
        (4, ("disk",), {"step": 4}),
    ]
    assert _restored(after) == (4.0, "disk")
    assert _restored(after, 3) == (3.0, "disk")
    after.delete(3)
    assert [info.step for info in after.snapshots()] == [4]
    assert {p.parent.name[:17] for p in _files(disk_folder)} == {"step-000000000004"}
    after.close()


def test_without_a_root_more_kept_snapshots_than_memory_holds_go_to_the_disk(
    open_store: Open,
) -> None:
    store = open_store(root=None, memory="9MiB", keep=1)
    for step in range(1, 6):
        store.save(_state(step), step=step, persist=False).wait(20)
    assert [_restored(store, step)[0] for step in range(1, 6)] == [1, 2, 3, 4, 5]
    assert store.stats().num_spilled == 3
    store.close(keep_memory=True)
    after = open_store(root=None, memory="9MiB", keep=1)
    assert [info.step for info in after.snapshots()] == [1, 2, 3, 4, 5]
    for step in (6, 7):
        after.save(_state(step), step=step).wait(20)
    assert [info.step for info in after.snapshots()] == [1, 2, 3, 4, 5, 7], (
        "keep counts no kept one"
    )
    assert _restored(after, 2)[0] == 2.0
    after.close()


@pytest.mark.parametrize("memory", [0, "1MiB"])
def test_a_state_beyond_memory_streams_to_the_disk_where_there_is_no_root(
    open_store: Open, memory: int | str
) -> None:
    store = open_store(root=None, memory=memory)
    for step in (1, 2):
        info = store.save(_state(step), step=step).wait(20)
        assert info is not None
        assert info.tiers == ("disk",)
    assert store.stats().num_streamed == 2
    assert _restored(store, 1) == (1.0, "disk")
    store.close()
    after = open_store(root=None, memory=memory)
    assert _restored(after) == (2.0, "disk")
    after.close()


def test_retention_of_the_root_clears_the_disk_too(open_store: Open, disk_folder: Path) -> None:
    store = open_store(keep=2)
    for step in range(1, 6):
        store.save(_state(step), step=step).wait(20)
    assert {p.parent.name[:17] for p in _files(disk_folder)} == {
        "step-000000000004",
        "step-000000000005",
    }
    store.close()


def test_leftovers_of_a_dead_run_are_removed_at_the_start_and_nothing_else(
    open_store: Open, disk_folder: Path
) -> None:
    store = open_store(root=None, name="run")
    store.save(_state(1), step=1).wait(20)
    (whole,) = [p for p in _files(disk_folder) if p.suffix == ".safetensors"]
    store.close()
    space = whole.parent.parent
    torn = space / "step-000000000002.00000001-000002-12345678"
    torn.mkdir()
    temp = torn / "rank-00000.safetensors.tmp"
    temp.write_bytes(b"x")
    damaged = space / "step-000000000003.00000001-000003-12345678"
    damaged.mkdir()
    (damaged / "rank-00000.safetensors").write_bytes(b"nonsense")
    foreign = space / "notes.txt"
    foreign.write_text("mine")
    after = open_store(root=None, name="run")
    assert whole.exists()
    assert foreign.exists()
    assert not torn.exists()
    assert not damaged.exists()
    assert _restored(after) == (1.0, "disk")
    after.close()


def test_a_temp_file_that_another_process_writes_is_left_alone(
    open_store: Open, disk_folder: Path, ops: RootOps
) -> None:
    store = open_store(root=None, name="run")
    store.save(_state(1), step=1).wait(20)
    on_disk = store._session.on_disk
    assert on_disk is not None
    writer = on_disk.disk.create_shard(store._session.memory.ids()[0], _MEBI)
    other = open_store(root=None, name="run")
    assert [p for p in _files(disk_folder) if p.suffix == ".tmp"]
    writer.discard()
    other.close()


def test_a_disk_that_cannot_serve_is_refused_at_construction(
    open_store: Open, folder: str, disk_folder: Path
) -> None:
    (disk_folder / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file"):
        open_store(disk="file")
    with pytest.raises(ValueError, match="is a file"):
        open_store(disk="file/deeper")
    with pytest.raises(ValueError, match="on the tmpfs of memory_dir"):
        open_store(disk=f"{folder}/disk")
    with pytest.raises(ValueError, match="is the root"):
        open_store(root=f"{disk_folder}/same", disk=f"{disk_folder}/same")
    for wrong in ("", b"x", 3, "s3://bucket/x"):
        with pytest.raises(ValueError, match="disk must be a path"):
            SnapshotStore(None, disk=wrong)  # type: ignore[arg-type]
    with pytest.raises(TierError, match="cannot be written to"):
        SnapshotStore(None, disk="/proc/1")
    assert not (disk_folder / "disk").exists(), "nothing is made before the first save"
