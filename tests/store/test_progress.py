"""The progress callback of a store: what it hears of saves, writes, restores and drains."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardstore import Progress, SnapshotStore
from shardstore.engine.progress import ProgressReporter
from shardstore.tiers.fileops import use_ops
from tests.faults.breaking_ops import WatchedOps, hold_at
from tests.ranks import run_ranks
from tests.store.conftest import OpenStore

MIB = 1 << 20


def _state(mib: int = 4, value: float = 1.0) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((MIB // 4,), float(value)) for i in range(mib)}


def _of(records: list[Progress], what: str) -> list[Progress]:
    return [record for record in records if record.what == what]


class Ticking:
    """A clock on which a second passes at each look, and none while a callback runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = time.monotonic()

    def __call__(self) -> float:
        with self._lock:
            self._seconds += 1.0
            return self._seconds

    def stop_for_a_look(self) -> None:
        with self._lock:
            self._seconds -= 1.0


def _report_everything(store: SnapshotStore, callback: Callable[[Progress], object]) -> None:
    """Report each portion, as if it took a second."""
    clock = Ticking()

    def report(progress: Progress) -> None:
        clock.stop_for_a_look()
        callback(progress)

    store._session.progress = ProgressReporter(report, clock=clock)


def _assert_whole(records: list[Progress], total_bytes: int | None = None) -> None:
    """One piece of work: its total stays, it never falls back, and it ends at 100 %."""
    assert records[-1].status == "done"
    assert all(record.status == "running" for record in records[:-1])
    totals = {record.total_bytes for record in records}
    assert len(totals) == 1
    assert total_bytes is None or totals == {total_bytes}
    done = [record.done_bytes for record in records]
    assert done == sorted(done)
    assert done[-1] == records[-1].total_bytes
    assert all(record.seconds >= 0 for record in records)


def test_each_piece_of_work_ends_at_all_of_its_bytes(open_store: OpenStore) -> None:
    records: list[Progress] = []
    store = open_store(progress=records.append)
    state = _state()
    info = store.save(state, step=7).wait(20)
    assert info is not None
    store.drain()
    store.restore(state)
    assert {(r.what, r.step, r.tier) for r in records} >= {
        ("save", 7, "memory"), ("write", 7, "root"), ("restore", 7, "memory"),
    }  # fmt: skip
    _assert_whole(_of(records, "save"), info.nbytes)
    _assert_whole(_of(records, "write"), info.nbytes)
    _assert_whole(_of(records, "restore"), 4 * MIB)


def test_a_restore_is_reported_tensor_by_tensor_and_a_write_portion_by_portion(
    open_store: OpenStore,
) -> None:
    records: list[Progress] = []
    store = open_store(memory="600MiB")
    _report_everything(store, records.append)
    state = {"large": torch.zeros(40 * MIB), **_state(3)}
    store.save(state, step=1).wait(60)
    store.restore(state)
    written, restored = _of(records, "write"), _of(records, "restore")
    assert len(written) >= 4, "163 MiB in calls of 64 MiB, and the end"
    assert [record.done_bytes // MIB for record in restored] == [160, 161, 162, 163, 163]
    _assert_whole(written)
    _assert_whole(restored)


def test_a_streamed_save_and_its_restore_count_every_byte(open_store: OpenStore) -> None:
    records: list[Progress] = []
    store = open_store(memory=0)
    _report_everything(store, records.append)
    state = _state(150)
    store.save(state, step=3).wait(60)
    for tensor in state.values():
        tensor.zero_()
    store.restore(state)
    assert all(bool((tensor == 1).all()) for tensor in state.values())
    saved, restored = _of(records, "save"), _of(records, "restore")
    assert {(r.step, r.tier) for r in [*saved, *restored]} == {(3, "root")}
    assert [r.done_bytes // MIB for r in saved] == [64, 128, 150, 150]
    _assert_whole(saved, 150 * MIB)
    _assert_whole(restored, 2 * 150 * MIB)
    before_applying = [r for r in restored if r.done_bytes <= 150 * MIB]
    assert len(before_applying) >= 150
    assert not _of(records, "write"), "save wrote it itself"


def test_a_drain_tells_what_is_left_while_it_waits(open_store: OpenStore) -> None:
    reached, go = threading.Event(), threading.Event()
    ops = WatchedOps(hold_at("point:post durable", reached, go))
    records: list[Progress] = []

    def callback(progress: Progress) -> None:
        records.append(progress)
        if progress.what == "drain" and progress.done_bytes:
            go.set()  # a first file is written, but not committed

    with use_ops(ops):
        store = open_store(progress=callback)
    ops.arm()
    for step in (1, 2):
        store.save(_state(), step=step)
    assert reached.wait(20)
    store.drain(timeout_s=60)
    drained = _of(records, "drain")
    _assert_whole(drained)
    assert drained[0].step == 2
    assert 0 < drained[0].done_bytes < drained[-1].total_bytes
    assert drained[-1].total_bytes > 8 * MIB
    store.drain()
    assert len(_of(records, "drain")) == len(drained), "nothing was pending"


def test_a_drain_that_is_given_up_has_failed(open_store: OpenStore) -> None:
    reached, go = threading.Event(), threading.Event()
    ops = WatchedOps(hold_at("point:spill", reached, go))
    records: list[Progress] = []
    with use_ops(ops):
        store = open_store(progress=records.append)
    ops.arm()
    store.save(_state(), step=1)
    assert reached.wait(20)
    with pytest.raises(TimeoutError):
        store.drain(timeout_s=0)
    (given_up,) = _of(records, "drain")
    assert (given_up.status, given_up.done_bytes) == ("failed", 0)
    go.set()
    store.drain(timeout_s=60)
    assert _of(records, "drain")[-1].status == "done"


def test_a_damaged_snapshot_fails_and_the_older_one_is_done(
    open_store: OpenStore, folder: str
) -> None:
    records: list[Progress] = []
    store = open_store(memory=0, progress=records.append)
    for step in (1, 2):
        store.save(_state(value=step), step=step).wait(20)
    (file,) = (Path(folder) / "root").glob("step-000000000002*/*.safetensors")
    with file.open("r+b") as damaged:
        damaged.seek(-100, 2)
        damaged.write(b"damage")
    report = store.restore(_state())
    assert report.step == 1
    found = [(r.step, r.status) for r in _of(records, "restore") if r.status != "running"]
    assert found == [(2, "failed"), (1, "done")]


def test_a_callback_that_raises_breaks_nothing_and_is_logged_once(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    def broken(progress: Progress) -> None:
        calls.append(progress.what)
        raise RuntimeError("the display is broken")

    store = open_store(memory="9MiB", progress=broken)
    state = _state(value=5.0)
    store.save(state, step=1)
    store.drain()
    store.save(_state(16, value=6.0), step=2).wait(60)  # does not fit: streamed
    for tensor in state.values():
        tensor.zero_()
    store.restore(state, step=1)
    assert all(bool((tensor == 5).all()) for tensor in state.values())
    assert {"save", "write", "restore"} <= set(calls)
    raised = [r for r in caplog.records if "progress callback" in r.getMessage()]
    assert len(raised) == 1


def test_no_lock_of_the_store_is_held_while_the_callback_runs(open_store: OpenStore) -> None:
    stuck: list[Progress] = []
    seen: set[str] = set()

    def look(progress: Progress) -> None:
        seen.add(progress.what)
        # Another thread, as locks of this one may be re-entrant.
        asking = threading.Thread(target=lambda: (store.stats(), store.snapshots()))
        asking.start()
        asking.join(20)
        if asking.is_alive():
            stuck.append(progress)

    store = open_store(memory="9MiB", keep=1)
    _report_everything(store, look)
    for step in range(3):
        store.save(_state(), step=step)
    store.drain()
    store.restore(_state())
    store.save(_state(16), step=9)
    store.drain()
    assert not stuck
    assert seen >= {"save", "write", "restore"}


def test_a_slow_callback_delays_but_loses_nothing(open_store: OpenStore) -> None:
    reached, go = threading.Event(), threading.Event()

    def slow(progress: Progress) -> None:
        if progress.what == "write":
            reached.set()
            assert go.wait(60)

    store = open_store(memory="64MiB", progress=slow)
    first = store.save(_state(value=1.0), step=1)
    assert reached.wait(20)
    second = store.save(_state(value=2.0), step=2)  # training does not wait for it
    assert not first.committed.done()
    go.set()
    assert first.wait(20) is not None
    assert second.wait(20) is not None


def test_an_interrupt_in_the_callback_of_a_save_loses_no_save(open_store: OpenStore) -> None:
    def interrupted(progress: Progress) -> None:
        if progress.what == "save":
            raise KeyboardInterrupt

    store = open_store(progress=interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.save(_state(), step=1)
    store.drain()
    assert [info.step for info in store.snapshots()] == [1]


def test_what_is_no_callback_is_refused(open_store: OpenStore) -> None:
    with pytest.raises(ValueError, match="progress must be callable or None, got 3"):
        open_store(progress=3)


def test_a_long_restore_shows_life_in_the_log_without_a_callback(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="shardstore")
    store = open_store()
    store._session.progress = ProgressReporter(clock=Ticking())
    state = _state(20)
    store.save(state, step=4).wait(20)
    store.restore(state)
    lines = [r for r in caplog.records if vars(r).get("event") == "progress"]
    assert 2 <= len(lines) <= 4, "20 tensors of a second each, a line every 5 s"
    assert all("restore of step 4 from memory" in line.getMessage() for line in lines)


def _two_ranks(rank: int, folder: str) -> list[Progress]:
    records: list[Progress] = []
    with SnapshotStore(
        Path(folder) / "root",
        memory="32MiB",
        memory_dir=folder,
        timeout_s=30.0,
        progress=records.append if rank else None,  # ranks may differ
    ) as store:
        state = _state(2 + rank, value=float(rank))
        store.save(state, step=5)
        store.drain()
        store.restore(state)
    return records


def test_each_rank_hears_of_its_own_bytes_and_ranks_may_differ(folder: str) -> None:
    none, records = run_ranks(2, _two_ranks, folder)
    assert none == []
    for what in ("save", "write", "restore"):
        _assert_whole(_of(records, what))
    assert _of(records, "restore")[-1].total_bytes == 3 * MIB
