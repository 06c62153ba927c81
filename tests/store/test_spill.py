"""A spill that runs beside its own seal: what is written counts only if the seal held."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from shardstore import SaveFailedError, SnapshotStore, list_snapshots
from shardstore.tiers.fileops import FileOps, use_ops
from shardstore.tiers.slots import SlotReader
from tests.faults.scenario import open_store as open_in
from tests.store.conftest import OpenStore


class Steered(FileOps):
    """Holds the first large write, and breaks the first seal once armed."""

    def __init__(self, *, break_seal: bool) -> None:
        self.writing, self.go = threading.Event(), threading.Event()
        self.armed = False
        self.break_seal = break_seal

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        if self.armed and len(data) > 1 << 20:
            self.armed = False
            self.writing.set()
            assert self.go.wait(60)
        super().write_at(fd, data, offset)

    def point(self, name: str) -> None:
        if name == "seal" and self.break_seal:
            self.break_seal = False
            assert self.writing.wait(60)
            raise OSError(5, "broken")


def _one_value(state: dict[str, torch.Tensor]) -> set[float]:
    return set(state["w"].unique().tolist())  # type: ignore[no-untyped-call]


def test_a_seal_that_fails_while_its_file_is_written_leaves_nothing_even_if_the_slot_is_reused(
    open_store: OpenStore, folder: str
) -> None:
    ops = Steered(break_seal=True)
    with use_ops(ops):
        store = open_store(memory="9MiB", timeout_s=20.0)  # two slots
    state = {"w": torch.full((1 << 20,), 1.0)}
    ops.armed = True
    broken = store.save(state, step=1)
    assert ops.writing.wait(60)
    for step in (2, 3):
        state["w"].fill_(step)
        with suppress(SaveFailedError):  # of step 1; this one is taken all the same
            store.save(state, step=step)
    ops.go.set()
    with pytest.raises(SaveFailedError, match="broken"):
        broken.wait(30)
    with suppress(SaveFailedError):  # raised here unless a save did
        store.drain()
    assert [info.step for info in store.snapshots()] == [2, 3]
    assert not list((Path(folder) / "root").glob("step-000000000001*"))
    assert not list((Path(folder) / "root").rglob("*.tmp"))
    store.close()
    with SnapshotStore(Path(folder) / "root", memory=0) as reopened:  # what the root has
        for step in (2, 3):
            reopened.restore(state, step=step)
            assert _one_value(state) == {float(step)}


def test_a_snapshot_that_is_deleted_while_it_is_written_is_never_published(
    open_store: OpenStore, folder: str
) -> None:
    ops = Steered(break_seal=False)
    with use_ops(ops):
        store = open_store(memory="9MiB", timeout_s=3.0)
    state = {"w": torch.full((1 << 20,), 1.0)}
    ops.armed = True
    doomed = store.save(state, step=1)
    assert ops.writing.wait(60)
    # Another rank's failure reaches this one now: the slot is retired and used again.
    pending = store._pipeline.pending[0]
    assert pending.sealed.wait(20)
    assert pending.id is not None
    store._session.memory.mark_failed(pending.id)
    slot = (
        store._session.memory.reserve(pending.slot.nbytes, kept=False, timeout_s=5.0)
        if pending.slot
        else None
    )
    assert slot is pending.slot
    assert slot is not None
    slot.view[-100:] = bytes(100)
    ops.go.set()
    assert pending.spilled.wait(30)
    assert not list((Path(folder) / "root").rglob("*.safetensors"))
    assert not list((Path(folder) / "root").rglob("*.tmp"))
    del doomed
    store.take_leave("the test ends")
    assert list_snapshots(Path(folder) / "root") == []


def test_the_header_is_written_last_and_the_file_equals_the_slot(
    open_store: OpenStore, folder: str
) -> None:
    offsets: list[int] = []

    class Ordered(FileOps):
        def write_at(self, fd: int, data: memoryview, offset: int) -> None:
            if threading.current_thread().name == "shardstore-spill":
                offsets.append(offset)
            super().write_at(fd, data, offset)

    with use_ops(Ordered()):
        store = open_store(memory="600MiB")
    state = {
        "w": torch.arange(40 << 20, dtype=torch.float32),
        "odd": torch.ones(3, dtype=torch.uint8),
    }
    info = store.save(state, step=1).wait(60)
    assert info is not None
    assert offsets[-1] == 0
    assert offsets[:-1] == sorted(offsets[:-1])
    assert len(offsets) >= 4, "three calls of data, the part page, the header"
    file = next((Path(folder) / "root").rglob("*.safetensors"))
    reader = store._session.memory.open_shard(store._session.memory.ids()[0])
    assert isinstance(reader, SlotReader)
    with reader:
        assert file.read_bytes() == reader.read(0, reader.nbytes)


def test_what_a_dead_run_could_not_spill_makes_room_for_this_one(folder: str) -> None:
    """Its slot would be lost to this run otherwise, and every save would be streamed."""
    options: dict[str, Any] = {"name": "job", "memory": "900KB"}  # two slots
    state = {"w": torch.ones(100_000)}
    with SnapshotStore(memory_dir=_memory_dir(folder), **options) as store:
        store.save(state, step=1).wait()
        store.close(keep_memory=True)
    with open_in(folder, **options) as store:
        assert store.restore(state).step == 1
        for step in (2, 3, 4):
            store.save(state, step=step).wait()
        assert store.stats().num_streamed == 0
        store.drain()
        assert [info.step for info in list_snapshots(Path(folder, "root"))] == [1, 2, 3, 4]


def _memory_dir(folder: str) -> Path:
    path = Path(folder, "memory")
    path.mkdir(exist_ok=True)
    return path
