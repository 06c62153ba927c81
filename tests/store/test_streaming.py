"""States that memory has no room for: streamed to the root and back, never whole in host memory."""

from __future__ import annotations

import errno
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardstore import (
    CoordinationError,
    CorruptSnapshotError,
    SaveFailedError,
    SnapshotStore,
    TierFullError,
    list_snapshots,
)
from shardstore.tiers.fileops import FileOps, use_ops
from tests.store.conftest import OpenStore

MIB = 1 << 20


def _large_state(seed: int) -> dict[str, Any]:
    """160 MiB with borders of portions inside tensors, odd strides and small things around them."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(5 * MIB, generator=generator)
    model = nn.Linear(100, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(seed))
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "double": (base * 3).double(),
        "column": base.view(1024, -1).t(),
        "half": base.bfloat16(),
        "strided": base.repeat(4).view(-1, 4)[:, 1],
        "bytes": torch.arange(70 * MIB, dtype=torch.uint8) + seed,
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 4),
        "notes": {"seed": seed, "blob": bytes(100_000)},
    }


def _tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    found = [value for value in state.values() if isinstance(value, torch.Tensor)]
    found += [p.detach() for p in state["model"].parameters()]
    for entry in state["optimizer"].state.values():
        found += [value for value in entry.values() if isinstance(value, torch.Tensor)]
    return found


def _copies(state: dict[str, Any]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in _tensors(state)]


def _soil(state: dict[str, Any]) -> None:
    with torch.no_grad():
        for tensor in _tensors(state):
            tensor.fill_(3)
    state["notes"]["seed"] = "soiled"


def _assert_is(state: dict[str, Any], seed: int, saved: list[torch.Tensor]) -> None:
    found = _tensors(state)
    assert len(found) == len(saved)
    for i, (one, other) in enumerate(zip(found, saved, strict=True)):
        assert torch.equal(one, other), (i, one.shape)
    assert state["notes"] == {"seed": seed, "blob": bytes(100_000)}


@pytest.mark.parametrize("memory", [0, "32MiB"])
def test_a_state_beyond_the_budget_comes_back_bit_for_bit_in_place(
    disk_folder: Path, folder: str, memory: int | str
) -> None:
    state = _large_state(1)
    saved = _copies(state)
    where = [tensor.data_ptr() for tensor in _tensors(state)]
    with SnapshotStore(disk_folder, memory=memory, memory_dir=folder) as store:
        snapshot = store.save(state, step=1)
        _soil(state)
        info = snapshot.wait(60)
        assert info is not None
        assert info.tiers == ("root",)
        assert store.restore(state).tier == "root (1 rank)"
        _assert_is(state, 1, saved)
        assert [tensor.data_ptr() for tensor in _tensors(state)] == where
    with SnapshotStore(disk_folder, memory="1GiB", memory_dir=folder) as store:
        _soil(state)
        store.restore(state)  # into a slot, as any other
        _assert_is(state, 1, saved)
    files = [path.name for path in disk_folder.rglob("*") if path.is_file()]
    assert len(files) == 3, f"run record, manifest and shard, nothing else: {files}"


def test_what_is_missing_live_is_built_and_expanded_tensors_are_filled(
    open_store: OpenStore,
) -> None:
    state = _large_state(2)
    state["expanded"] = torch.ones(1, 8).expand(50, 8)
    saved = _copies(state)
    store = open_store(memory=0)
    store.save(state, step=1).wait(60)
    fresh = _large_state(3)
    fresh["optimizer"] = torch.optim.AdamW(fresh["model"].parameters())
    fresh["expanded"] = torch.zeros(1, 8).expand(50, 8)
    store.restore(fresh)
    for one, other in zip(_tensors(fresh), saved, strict=True):
        assert torch.equal(one, other)
    assert fresh["expanded"].stride() == (0, 1)


def test_a_flipped_byte_is_found_before_anything_is_touched(
    open_store: OpenStore, folder: str
) -> None:
    store = open_store(memory=0)
    state = _large_state(1)
    older = _copies(state)
    store.save(state, step=1).wait(60)
    with torch.no_grad():
        state["double"].add_(1)
    store.save(state, step=2).wait(60)
    newest = next((Path(folder) / "root").glob("step-000000000002*/*.safetensors"))
    with newest.open("r+b") as file:
        file.seek(-5, 2)
        last = file.read(1)
        file.seek(-5, 2)
        file.write(bytes([last[0] ^ 1]))
    _soil(state)
    with pytest.raises(CorruptSnapshotError, match="of rank 0 is damaged"):
        store.restore(state, step=2)
    assert state["notes"]["seed"] == "soiled"
    assert all(bool((tensor == 3).all()) for tensor in _tensors(state))
    report = store.restore(state)
    assert report.step == 1
    _assert_is(state, 1, older)


def test_a_file_that_changes_after_it_was_verified_says_that_the_state_is_partly_filled(
    folder: str,
) -> None:
    class ChangesLate(FileOps):
        """Damages the file as soon as the second pass over it begins."""

        num_passes = 0
        path: Path | None = None

        def bypass_cache(self, fd: int, on: bool) -> bool:
            if on and self.path is not None:
                self.num_passes += 1
                if self.num_passes == 2:
                    with self.path.open("r+b") as file:
                        file.seek(-5, 2)
                        file.write(b"\xff\xfe")
            return super().bypass_cache(fd, on)

    ops = ChangesLate()
    state = {"w": torch.ones(40 * MIB)}
    with use_ops(ops):
        store = SnapshotStore(Path(folder) / "root", memory=0)
    store.save(state, step=1).wait(60)
    ops.path = next((Path(folder) / "root").rglob("*.safetensors"))
    with pytest.raises(CoordinationError, match=r"partly applied[\s\S]*damaged"):
        store.restore(state)
    store.take_leave("the test ends")


def test_neither_budget_nor_root_is_refused_with_both_sizes(open_store: OpenStore) -> None:
    state = {"w": torch.zeros(1 << 20)}
    for root, persist in ((None, True), ("root", False)):
        store = open_store(root=root, memory="1MiB", name=f"small-{persist}")
        with pytest.raises(TierFullError, match=r"4,19[0-9],[0-9]{3} bytes.*1,048,576") as caught:
            store.save(state, step=1, persist=persist)
        assert caught.value.needed_bytes > 4 * MIB
        assert "memory=" in str(caught.value)
        assert store.snapshots() == []


class BreaksAt(FileOps):
    """Fails the write at some offset, once armed."""

    def __init__(self, offset: int, error: int) -> None:
        self.offset, self.error, self.armed = offset, error, False

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        if self.armed and offset >= self.offset:
            self.armed = False
            raise OSError(self.error, "broken")
        super().write_at(fd, data, offset)


@pytest.mark.parametrize("offset", [0, 100 * MIB])
def test_a_write_that_fails_is_a_failure_from_behind_and_the_next_save_works(
    folder: str, offset: int
) -> None:
    ops = BreaksAt(offset, errno.ENOSPC)
    with use_ops(ops):
        store = SnapshotStore(Path(folder) / "root", memory=0)
    state = _large_state(1)
    store.save(state, step=1).wait(60)
    ops.armed = True
    failing = store.save(state, step=2)
    with pytest.raises(SaveFailedError, match=r"rank 0: TierFullError: root: write .*ENOSPC"):
        failing.wait(60)
    with pytest.raises(SaveFailedError, match="save of step 2 failed"):
        store.save(state, step=3)
    store.close()
    assert [info.step for info in list_snapshots(Path(folder) / "root")] == [1, 3]
    assert not list((Path(folder) / "root").glob("step-000000000002*"))
    assert not list((Path(folder) / "root").rglob("*.tmp"))


PEAK = """
import json, sys, threading, time, torch
from pathlib import Path
from shardstore import SnapshotStore

def resident():
    status = Path("/proc/self/status").read_text()
    anonymous = int(status.split("RssAnon:")[1].split()[0]) * 1024
    shared = int(status.split("RssShmem:")[1].split()[0]) * 1024
    return anonymous + shared

root, memory_dir, memory, nbytes = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
state = {f"t{i}": torch.full((nbytes // 16 // 4,), float(i)) for i in range(16)}
with SnapshotStore(root, memory=memory, memory_dir=memory_dir) as store:
    small = {"w": torch.zeros(10)}
    store.save(small, step=0).wait()
    store.restore(small)
    peak, running = [0], [True]
    before = resident()
    def watch():
        while running[0]:
            peak[0] = max(peak[0], resident() - before)
            time.sleep(0.002)
    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    store.save(state, step=1).wait()
    saved_s = time.perf_counter() - started
    saving, peak[0] = peak[0], 0
    for tensor in state.values():
        tensor.fill_(-1)
    started = time.perf_counter()
    store.restore(state, step=1)
    restored_s = time.perf_counter() - started
    running[0] = False
    watcher.join()
    same = all(bool((state[f"t{i}"] == i).all()) for i in range(16))
print(json.dumps({"saving": saving, "restoring": peak[0], "same": same, "saved_s": saved_s, "restored_s": restored_s}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "nbytes"), [("512MiB", 4 << 30), ("64MiB", 512 << 20)], ids=["4 GiB", "512 MiB"]
)
def test_peak_memory_is_the_budget_and_a_little_whatever_the_state(
    disk_folder: Path, folder: str, memory: str, nbytes: int
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PEAK, str(disk_folder), folder, memory, str(nbytes)],
        capture_output=True, text=True, check=True, timeout=170,
    )  # fmt: skip
    found = json.loads(run.stdout)
    growth = {key: found[key] / MIB for key in ("saving", "restoring")}
    print(f"{nbytes >> 20} MiB with memory={memory}: peak growth {growth} MiB, {found}")
    assert found["same"]
    assert max(growth.values()) <= int(memory.removesuffix("MiB")) + 256


def _hold_spill() -> tuple[FileOps, Callable[[], None]]:
    import threading

    go = threading.Event()

    class Held(FileOps):
        def point(self, name: str) -> None:
            if name == "spill":
                assert go.wait(60)

    return Held(), go.set


def test_while_the_writer_is_held_saves_are_fast_until_memory_is_full_and_then_do_as_told(
    folder: str,
) -> None:
    """Three slots: what is being written, and two more; the fourth save is skipped."""
    for on_full in ("skip", "direct", "wait"):
        ops, let_go = _hold_spill()
        with use_ops(ops):
            store = SnapshotStore(
                Path(folder) / on_full, memory="13MiB", memory_dir=folder, on_full=on_full,
                timeout_s=2.0 if on_full == "wait" else 30.0,
            )  # fmt: skip
        state = {"w": torch.zeros(MIB)}
        handles = []
        for step in (1, 2, 3):
            state["w"].fill_(step)
            handles.append(store.save(state, step=step))
        state["w"].fill_(4)
        if on_full == "wait":
            with pytest.raises(TierFullError, match="nothing left in time"):
                store.save(state, step=4)
        else:
            handles.append(store.save(state, step=4))
        let_go()
        found = [handle.wait(30) for handle in handles]
        skipped = on_full == "skip"
        assert store.stats().num_skipped == int(skipped)
        assert store.stats().num_streamed == int(on_full == "direct")
        assert [info is None for info in found] == [False] * 3 + [skipped] * (len(found) - 3)
        expected = [1, 2, 3, 4] if on_full == "direct" else [1, 2, 3]
        assert [info.step for info in store.snapshots()] == expected
        for step in expected:
            store.restore(state, step=step)
            assert set(state["w"].tolist()) == {step}
        store.save(state, step=9).wait(30)
        store.take_leave("the test ends")


def test_a_closed_store_keeps_no_buffers(disk_folder: Path) -> None:
    def anonymous() -> int:
        return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) << 10

    state = {"w": torch.ones(48 << 20, dtype=torch.float32)}
    closed = []
    gc.disable()
    try:
        before = anonymous()
        for run in range(3):
            with SnapshotStore(disk_folder / "root", memory=0) as store:
                store.save(state, step=run)
                assert store.stats().num_streamed == 1
            closed.append(store)
            del store
        assert anonymous() - before < 32 << 20, (
            "two buffers of 64 MiB for each store that was closed"
        )
    finally:
        gc.enable()
