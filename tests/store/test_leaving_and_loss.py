"""Ways to leave, and memory that others take away."""

from __future__ import annotations

import errno
import gc
import shutil
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardstore import (
    CoordinationError,
    SaveFailedError,
    SnapshotStore,
    StateMismatchError,
    UnsupportedStateError,
    list_snapshots,
)
from shardstore.tiers.fileops import FileOps, use_ops
from tests.store.conftest import OpenStore


def test_memory_files_removed_by_somebody_else_cost_no_later_save(
    open_store: OpenStore, folder: str
) -> None:
    store = open_store()
    state = {"w": torch.zeros(1000)}
    for step in (1, 2):
        store.save(state, step=step).wait()
    shutil.rmtree(Path(folder) / "memory")
    (Path(folder) / "memory").mkdir()
    for step in range(3, 8):
        state["w"].fill_(step)
        assert store.save(state, step=step).wait() is not None
    state["w"].zero_()
    assert store.restore(state).step == 7
    assert state["w"][0].item() == 7
    store.close()
    assert [i.step for i in list_snapshots(Path(folder) / "root")] == list(range(1, 8))


def test_a_memory_only_snapshot_whose_file_was_removed_is_a_failed_save(
    open_store: OpenStore, folder: str
) -> None:
    """It has no other tier to live in: without its name it would not outlive the process (G7)."""

    class RemovesTheSlot(FileOps):
        armed = False

        def point(self, name: str) -> None:
            if name == "seal" and self.armed:
                for slot in (Path(folder) / "memory").rglob("slot-*"):
                    slot.unlink()

    ops = RemovesTheSlot()
    with use_ops(ops):
        store = open_store()
    state = {"w": torch.ones(1000)}
    ops.armed = True
    with pytest.raises(SaveFailedError, match="ENOENT"):
        store.save(state, step=1, persist=False).wait()
    assert store.snapshots() == []
    ops.armed = False
    with pytest.raises(SaveFailedError, match="step 1"):
        store.save(state, step=2, persist=False)
    store.drain()
    assert [(info.step, info.tiers) for info in store.snapshots()] == [(2, ("memory",))]


def test_a_store_that_nobody_refers_to_still_writes_what_was_saved(folder: str) -> None:
    code = f"""
        import gc, torch, shardstore
        def main():
            store = shardstore.SnapshotStore({str(Path(folder) / "root")!r}, memory_dir={folder!r})
            store.save({{"w": torch.ones(100000)}}, step=4)
        main()
        gc.collect()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)
    assert [info.step for info in list_snapshots(Path(folder) / "root")] == [4]


def test_an_older_step_shown_for_a_while_does_not_unprotect_the_newest(
    open_store: OpenStore,
) -> None:
    store = open_store(memory="60KiB")  # three slots
    state = {"w": torch.zeros(2000)}
    for step in (1, 2, 3):
        state["w"].fill_(step)
        store.save(state, step=step).wait()
    newest = store._session.memory.newest_complete
    with store.swapped(state, step=1):
        assert state["w"][0].item() == 1
    assert store._session.memory.newest_complete == newest
    store.save(state, step=4).wait()
    assert all(slot.path for slot in store._session.memory._slots), "it must outlive the process"


def test_keep_is_applied_again_after_a_crash_before_the_release(open_store: OpenStore) -> None:
    store = open_store(root=None, name="kept", keep=2)
    state = {"w": torch.zeros(1000)}
    for step in (1, 2):
        store.save(state, step=step).wait()
    store.take_leave("as if it crashed")
    store = open_store(root=None, name="kept", keep=1)
    assert [info.step for info in store.snapshots()] == [2]
    store.save(state, step=3).wait()


def test_a_snapshot_that_retention_deleted_stays_away_over_restarts(
    open_store: OpenStore, folder: str
) -> None:
    class DiesBeforeForgetting(FileOps):
        """Removing old bytes never happens: as if killed right after the register was closed."""

        def rename(self, source: str, target: str) -> None:
            if "deleted-" in target:
                raise OSError(errno.EIO, "killed")
            super().rename(source, target)

    state = {"w": torch.zeros(10)}
    store = open_store()
    for step in (1, 2):
        store.save(state, step=step).wait()
    store.close(keep_memory=True)
    with use_ops(DiesBeforeForgetting()):
        store = open_store(keep=1, memory=0)  # its memory copies of 1 and 2 are not seen
    store.save(state, step=3).wait()
    store.close(keep_memory=True)
    for _ in range(2):
        store = open_store(keep=1)
        assert [info.step for info in store.snapshots()] == [3]
        store.save(state, step=3).wait()
        store.close(keep_memory=True)
    with SnapshotStore(Path(folder) / "root", memory=0) as reopened:
        assert {info.step for info in reopened.snapshots()} == {3}


def test_swapped_returns_to_what_was_even_if_the_structure_changed_inside(
    open_store: OpenStore,
) -> None:
    model = nn.Linear(2, 2)
    notes: dict[str, Any] = {"a": 1}
    state = {"model": model, "notes": notes}
    store = open_store()
    store.save(state, step=1).wait()
    with torch.no_grad():
        model.weight.fill_(5)
    notes["a"] = 2
    with store.swapped(state, step=1):
        model.register_buffer("added", torch.ones(1))
        notes["new"] = 3
    assert set(model.weight.reshape(-1).tolist()) == {5}
    assert notes["a"] == 2


def test_a_restore_without_any_room_reads_through_and_takes_it_for_no_damage(
    open_store: OpenStore,
) -> None:
    class NoRoom(FileOps):
        armed = False

        def allocate(self, fd: int, nbytes: int, offset: int = 0) -> None:
            if self.armed:
                raise OSError(errno.ENOSPC, "full")
            super().allocate(fd, nbytes, offset)

    state = {"w": torch.zeros(1000)}
    store = open_store(memory=0)
    for step in (1, 2):
        store.save(state, step=step).wait()
    store.close()
    ops = NoRoom()
    with use_ops(ops):
        store = open_store(memory=0)
    ops.armed = True
    report = store.restore(state)
    assert (report.step, report.skipped) == (2, ())


def test_refused_saves_and_restores_keep_no_model_alive(open_store: OpenStore) -> None:
    store = open_store()
    store.save({"w": torch.ones(1)}, step=1).wait()
    model = nn.Linear(2, 2)
    with pytest.raises(StateMismatchError):
        store.restore({"model": model})
    with pytest.raises(UnsupportedStateError):
        store.save({"model": model, "bad": object()}, step=2)
    store.drain()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_an_interrupt_inside_a_restore_is_raised_as_one(open_store: OpenStore) -> None:
    class Interrupting:
        armed = False

        def state_dict(self) -> dict[str, int]:
            if self.armed:
                raise KeyboardInterrupt
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    thing = Interrupting()
    store = open_store()
    store.save({"x": thing}, step=1).wait()
    thing.armed = True
    with pytest.raises(KeyboardInterrupt):
        store.restore({"x": thing})
    with pytest.raises(KeyboardInterrupt), store.swapped({"x": thing}):
        pass
    thing.armed = False
    assert store.restore({"x": thing}).step == 1


def test_a_bad_step_at_restore_is_told_and_the_store_goes_on(open_store: OpenStore) -> None:
    store = open_store()
    store.save({"w": torch.ones(1)}, step=1).wait()
    with pytest.raises((ValueError, CoordinationError), match="step"):
        store.restore({"w": torch.ones(1)}, step="1")  # type: ignore[call-overload]
    assert store.restore({"w": torch.ones(1)}, step=torch.tensor(1)).step == 1  # type: ignore[call-overload]
