"""Limits on memory below what the tmpfs and the budget would give: said, obeyed, and never the end."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path

import pytest
import torch

from shardstore import ShardStoreError, SnapshotStore, TierFullError
from shardstore.tiers.fileops import FileOps, use_ops
from tests.store.limited_ops import MIB, LimitedOps

SPARED = 128 * MIB
REMEDY = "resources.limits.memory"


def _open(folder: str, ops: FileOps, root: str | None = "root", **options: object) -> SnapshotStore:
    memory_dir = Path(folder) / "memory"
    memory_dir.mkdir(exist_ok=True)
    where = None if root is None else Path(folder) / root
    with use_ops(ops):
        return SnapshotStore(where, memory_dir=memory_dir, timeout_s=20.0, **options)  # type: ignore[arg-type]


def _state(value: float, nbytes: int = 8 * MIB) -> dict[str, torch.Tensor]:
    return {"w": torch.full((nbytes // 4,), float(value))}


def _slots(folder: str) -> list[Path]:
    return [path for path in Path(folder, "memory").rglob("*") if path.stat().st_size > 100]


def _told(caplog: pytest.LogCaptureFixture, *named: str) -> int:
    return sum(all(name in record.getMessage() for name in named) for record in caplog.records)


def test_auto_is_half_of_what_the_group_leaves(folder: str) -> None:
    store = _open(folder, LimitedOps(400 * MIB, use=100 * MIB))
    assert store.stats().memory_budget_bytes == 150 * MIB
    store.close()


@pytest.mark.parametrize("memory", ["2GiB", "auto"])
def test_under_a_limit_without_room_saves_go_to_the_root_and_say_why(
    folder: str, caplog: pytest.LogCaptureFixture, memory: str
) -> None:
    ops = LimitedOps(120 * MIB, use=100 * MIB)
    state = _state(0, 64 * MIB)
    store = _open(folder, ops, memory=memory)
    for step in (1, 2, 3):
        state["w"].fill_(step)
        store.save(state, step=step)
    for step in (1, 3):
        assert store.restore(state, step=step).tier == "root (1 rank)"
        assert set(state["w"].unique().tolist()) == {step}  # type: ignore[no-untyped-call]
    assert store.stats().num_streamed == 3
    assert (ops.num_reserved, _slots(folder)) == (3 * _file_nbytes(folder), []), "on disk only"
    figures = (f"{120 * MIB:,}", f"{20 * MIB:,}", "memory.max", REMEDY)
    if memory == "auto":
        assert _told(caplog, "does not fit the memory budget", *figures) == 1
    else:
        assert _told(caplog, f"{2 << 30:,}", *figures) == 1, "said at construction"
        assert _told(caplog, "could end the process", *figures) == 1, "and when it came to it"
    assert ops.largest_write <= 20 * MIB // 8, "buffers are cut to what is left"
    store.close()


def _file_nbytes(folder: str) -> int:
    return next(Path(folder, "root").glob("*/*.safetensors")).stat().st_size


def test_without_a_root_a_save_beyond_the_limit_is_refused_and_the_next_one_works(
    folder: str,
) -> None:
    ops = LimitedOps(300 * MIB, use=200 * MIB)
    for name, persist in (("named", True), (None, True), ("kept", False)):
        ops.use = 200 * MIB
        store = _open(folder, ops, None, name=name, memory="1GiB")
        with pytest.raises(TierFullError, match="could end the process") as caught:
            store.save(_state(1), step=1, persist=persist)
        assert caught.value.needed_bytes > 8 * MIB
        assert caught.value.free_bytes == 0
        for named in (f"{300 * MIB:,}", f"{100 * MIB:,}", f"{SPARED:,}", REMEDY):
            assert named in str(caught.value)
        assert store.snapshots() == []
        assert not _slots(folder)
        ops.use = 0
        state = _state(2)
        store.save(state, step=2, persist=persist).wait(20)
        state["w"].zero_()
        assert store.restore(state).step == 2
        assert state["w"][0] == 2
        store.close()


def test_a_limit_that_comes_near_while_running_leaves_what_is_in_memory_and_takes_no_more(
    folder: str,
) -> None:
    ops = LimitedOps(1 << 40)
    store = _open(folder, ops, memory="1GiB", on_full="direct")
    small, large = _state(1), _state(2, 16 * MIB)
    store.save(small, step=1, persist=False).wait(20)
    ops.use = ops.limit
    before = {path: path.stat().st_size for path in _slots(folder)}
    info = store.save(large, step=2).wait(20)
    assert info is not None
    assert info.tiers == ("root",)
    assert {path: path.stat().st_size for path in _slots(folder)}.items() <= before.items()
    with pytest.raises(TierFullError):
        store.save(large, step=3, persist=False)
    store.warmup(_state(3, 32 * MIB))
    for step, state in ((1, small), (2, large)):
        state["w"].zero_()
        store.restore(state, step=step)
        assert set(state["w"].unique().tolist()) == {step}  # type: ignore[no-untyped-call]
    ops.use = 0
    info = store.save(large, step=4).wait(20)
    assert info is not None
    assert info.tiers == ("memory", "root"), "memory is taken again once there is some"
    store.close()


def test_swapped_is_refused_where_its_copy_would_not_fit_and_live_state_stays(folder: str) -> None:
    ops = LimitedOps(1 << 40)
    store = _open(folder, ops, memory=0)
    state = _state(1)
    store.save(state, step=1).wait(20)
    state["w"].fill_(2)
    ops.use = ops.limit
    with (
        pytest.raises(ShardStoreError, match="could end the process"),
        store.swapped(state, step=1),
    ):
        raise AssertionError("it was entered")
    assert set(state["w"].tolist()) == {2}
    ops.use = 0
    with store.swapped(state, step=1):
        assert state["w"][0] == 1
    assert state["w"][0] == 2
    store.close()


class TakenMeanwhile(LimitedOps):
    """Another rank of the host takes memory while a slot is being reserved."""

    def allocate(self, fd: int, nbytes: int, offset: int = 0) -> None:
        super().allocate(fd, nbytes, offset)
        self.use += nbytes + 300 * MIB


def test_memory_that_goes_away_while_a_slot_is_reserved_ends_the_reserving(folder: str) -> None:
    ops = TakenMeanwhile(500 * MIB)
    store = _open(folder, ops, None, name="job", memory="2GiB")
    state = {"w": torch.empty(300 * MIB, dtype=torch.uint8)}
    with pytest.raises(TierFullError, match="could end the process"):
        store.save(state, step=1)
    assert ops.num_reserved == 64 * MIB, "not all of it"
    assert not _slots(folder), "and it was given back"
    store.close()


class SmallMachine(FileOps):
    """No control group; the machine itself has little left, swap included."""

    swap = 0

    def read_text(self, path: str) -> str:
        if path == "/proc/meminfo":
            return f"MemTotal: 1048576 kB\nMemAvailable: 102400 kB\nSwapFree: {self.swap} kB\n"
        if path.startswith("/sys/fs/cgroup"):
            raise FileNotFoundError(path)
        return super().read_text(path)


def test_the_machine_is_a_limit_as_well_and_swap_is_room_of_last_resort(folder: str) -> None:
    ops = SmallMachine()
    store = _open(folder, ops, None, name="job", memory="1GiB")
    with pytest.raises(TierFullError, match=f"the machine's {1 << 30:,} bytes of memory"):
        store.save(_state(1), step=1)
    ops.swap = 1 << 20
    store.save(_state(1), step=2).wait(20)
    store.close()
    auto = _open(folder, ops, memory="auto")
    assert auto.stats().memory_budget_bytes == 50 * MIB, "swap is nothing to plan with"
    auto.close()


def test_nothing_is_said_while_there_is_room(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="shardstore"):
        store = _open(folder, LimitedOps(1 << 40), memory="64MiB")
        store.save(_state(1), step=1).wait(20)
        store.close()
    assert [r for r in caplog.records if "tmpfs: what is committed" not in r.getMessage()] == []


def test_a_refusal_keeps_nothing_of_the_callers_alive(folder: str) -> None:
    ops = LimitedOps(1 << 40)
    store = _open(folder, ops, memory="1GiB")

    def restored() -> weakref.ref[torch.Tensor]:
        state = _state(1)
        store.save(state, step=1).wait(20)
        ops.use = ops.limit
        store.save({"w": torch.ones(16 * MIB)}, step=2).wait(20)
        store.restore(state, step=1)
        store.restore({"w": torch.ones(16 * MIB)}, step=2)
        return weakref.ref(state["w"])

    gc.collect()
    gc.disable()
    try:
        assert restored()() is None
    finally:
        gc.enable()
    store.close()
