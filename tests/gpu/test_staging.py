"""Copies off a CUDA device: exact, in the order of the stream, page-locked or not."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from shardstore import SnapshotStore
from shardstore.format.layout import plan_layout
from shardstore.state.flatten import FlatState, flatten_state
from shardstore.state.pinning import PageLock, PageLocks, bytes_of
from shardstore.state.ring import NUM_BUFFERS, RING_BYTES
from shardstore.state.staging import stage, views
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.slotfiles import SlotFiles

DEVICE = torch.device("cuda", 0)


def busy(seconds: float = 0.5) -> torch.cuda.Event:
    """Keep the current stream busy for about so long; the event says when it is over."""
    torch.cuda._sleep(int(seconds * 1.5e9))  # type: ignore[no-untyped-call]
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclass
class Target:
    """Host memory for one state, as a slot has it."""

    tensors: list[torch.Tensor]
    page_lock: PageLock | None


class Targets:
    def __init__(self, folder: str) -> None:
        self._files = SlotFiles(folder, rank=0, owner="0" * 8, ops=FileOps())

    def make(self, flat: FlatState, *, is_locked: bool) -> Target:
        layout = plan_layout(flat.table, flat.pieces, header_nbytes=0)
        slot = self._files.allocate(max(1, layout.nbytes))
        assert slot is not None
        lock = PageLocks().lock(slot.view, DEVICE) if is_locked else None
        assert (lock is not None) == is_locked
        return Target(views(slot.view, layout, flat.table, flat.pieces), lock)


@pytest.fixture
def targets(folder: str) -> Targets:
    return Targets(str(Path(folder) / "job"))


def raw(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    return bytes(plain.view(torch.uint8).numpy().data)


@pytest.mark.parametrize("is_locked", [True, False])
def test_every_kind_of_tensor_is_copied_bit_for_bit(targets: Targets, is_locked: bool) -> None:
    torch.manual_seed(0)
    complex_ = torch.randn(300, 7, dtype=torch.complex64, device=DEVICE)
    state: dict[str, object] = {
        "float32": torch.randn(1000, 33, device=DEVICE),
        "bfloat16": torch.randn(1001, device=DEVICE, dtype=torch.bfloat16),
        "float8": torch.randn(513, device=DEVICE).to(torch.float8_e4m3fn),
        "bool": torch.rand(77, device=DEVICE) > 0.5,
        "scalar": torch.tensor(3.5, device=DEVICE),
        "empty": torch.empty(0, 4, device=DEVICE),
        "transposed": torch.randn(129, 65, device=DEVICE).t(),
        "strided": torch.randn(64, 64, device=DEVICE)[::3, 1::2],
        "expanded": torch.randn(5, 1, device=DEVICE).expand(5, 9),
        "conjugated": complex_.conj(),
        "negated": complex_.conj().imag,
        "large": torch.randint(
            0, 255, (RING_BYTES * (NUM_BUFFERS + 1) + 5,), dtype=torch.uint8, device=DEVICE
        ),
        "host": torch.randn(100),
    }
    flat = flatten_state(state, rank=0)
    target = targets.make(flat, is_locked=is_locked)
    stage(flat, target.tensors, target.page_lock)
    for row, tensor, copied in zip(flat.table, flat.tensors, target.tensors, strict=True):
        if row.alias_of is None:
            assert raw(copied) == raw(tensor), row.path


@pytest.mark.parametrize("is_locked", [True, False])
def test_pending_kernels_are_part_of_a_copy_and_later_ones_are_not(
    targets: Targets, is_locked: bool
) -> None:
    tensor = torch.zeros(1 << 20, device=DEVICE)
    flat = flatten_state({"t": tensor}, rank=0)
    target = targets.make(flat, is_locked=is_locked)
    busy()
    tensor.fill_(1)
    stage(flat, target.tensors, target.page_lock)
    tensor.fill_(2)
    torch.cuda.synchronize()
    assert bool((target.tensors[0] == 1).all())


def test_memory_is_page_locked_as_long_as_somebody_holds_the_lock(targets: Targets) -> None:
    flat = flatten_state({"t": torch.zeros(10_000, device=DEVICE)}, rank=0)
    for _ in range(20):  # a range that was not let go of cannot be registered again
        target = targets.make(flat, is_locked=True)
        assert target.tensors[0].is_pinned()
        target.page_lock = None
        assert not target.tensors[0].is_pinned()


def test_a_failed_registration_is_not_blamed_on_the_next_kernel(folder: str) -> None:
    slot = SlotFiles(str(Path(folder) / "job"), rank=0, owner="0" * 8, ops=FileOps()).allocate(8192)
    assert slot is not None
    first = PageLocks().lock(slot.view, DEVICE)
    assert first is not None
    assert PageLocks().lock(slot.view, DEVICE) is None  # it is registered already
    assert float(torch.ones(3, device=DEVICE).add_(1).sum()) == 6.0
    assert bytes_of(slot.view).is_pinned()


def test_slots_of_a_store_are_page_locked_and_let_go_of(folder: str, caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    state = {"t": torch.randn(1 << 20, device=DEVICE)}
    wanted = state["t"].clone()
    for _ in range(5):
        store = SnapshotStore(Path(folder) / "root", memory="64MiB", memory_dir=folder)
        store.warmup(state)
        for step in range(4):
            store.save(state, step=step).wait(60)
        state["t"].zero_()
        store.restore(state)
        assert torch.equal(state["t"], wanted)
        store.close()
    assert "page-lock" not in caplog.text


@pytest.mark.skipif(not hasattr(torch.cuda, "host_memory_stats"), reason="needs torch 2.8")
def test_the_ring_is_the_same_memory_each_time(targets: Targets) -> None:
    flat = flatten_state({"t": torch.zeros(50 << 20, dtype=torch.uint8, device=DEVICE)}, rank=0)
    target = targets.make(flat, is_locked=False)
    stage(flat, target.tensors)
    before = torch.cuda.host_memory_stats()["segment.current"]
    for _ in range(5):
        stage(flat, target.tensors)
    assert torch.cuda.host_memory_stats()["segment.current"] == before


def _seconds(flat: FlatState, target: Target) -> float:
    stage(flat, target.tensors, target.page_lock)
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        stage(flat, target.tensors, target.page_lock)
        times.append(time.perf_counter() - started)
    return sorted(times)[2]


def test_speed_is_printed(targets: Targets, capsys: pytest.CaptureFixture[str]) -> None:
    """No figure is asserted: run with -s to see them."""
    large = {f"t{i}": torch.randn(4 << 20, device=DEVICE) for i in range(64)}
    small = {f"t{i}": torch.randn(3, device=DEVICE) for i in range(10_000)}
    pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    best = min(_timed_copy(pinned, source) for _ in range(5))
    lines = [f"bare copy into pinned memory: {(1 << 30) / best / 1e9:.1f} GB/s"]
    for is_locked in (True, False):
        how = "page-locked" if is_locked else "ring"
        flat = flatten_state(large, rank=0)
        seconds = _seconds(flat, targets.make(flat, is_locked=is_locked))
        lines.append(
            f"{how}: 1 GiB in 64 tensors {(1 << 30) / seconds / 1e9:.1f} GB/s, {seconds / best:.2f} x bare"
        )
        flat = flatten_state(small, rank=0)
        seconds = _seconds(flat, targets.make(flat, is_locked=is_locked))
        lines.append(f"{how}: 10,000 tiny tensors {seconds / 1e4 * 1e6:.1f} us each")
    with capsys.disabled():
        print("", *lines, sep="\n")


def _timed_copy(target: torch.Tensor, source: torch.Tensor) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - started
