"""The root does not answer for a while: training goes on, what is near is whole, and all is durable afterwards."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shardstore import CorruptSnapshotError, SaveFailedError, SnapshotStore, list_snapshots
from shardstore.engine.handle import Snapshot
from tests.faults.threaded import Stores, state_of
from tests.remote.conftest import MakeHost
from tests.remote.job import Host, s3_options
from tests.servers.proxy import Proxy
from tests.servers.s3 import MotoServer

_NUMEL = 3000


def _begin(stores: Stores, step: int) -> list[Snapshot]:
    """Save on both ranks, and do not wait."""
    return stores.each(lambda store, rank: store.save(state_of(step, rank, _NUMEL), step=step))


def _durable(host: Host) -> list[int]:
    return [i.step for i in list_snapshots(host.root, storage_options=host.storage_options)]


def _told(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


def test_an_outage_delays_what_is_durable_and_stops_nothing(
    make_host: MakeHost, proxy: Proxy, caplog: pytest.LogCaptureFixture, s3_server: MotoServer
) -> None:
    """With disks every save is kept near; without, what finds no memory is left out, on all ranks alike."""
    caplog.set_level(logging.WARNING, "shardstore")
    host = make_host(proxy, timeout_s=16.0)
    small = make_host(
        proxy, with_disk=False, timeout_s=16.0, memory="120KiB", root=s3_server.fresh("small")
    )
    kept, left_out = host.open(), small.open()
    for stores in (kept, left_out):
        assert stores.save(1) == ["", ""]
    proxy.outage(True)
    began = time.monotonic()
    step, saves, skipped = 1, {}, {}
    while time.monotonic() - began < 6.0:
        step += 1
        saves[step] = _begin(kept, step)
        skipped[step] = _begin(left_out, step)  # waits for memory as long as the root may answer
        time.sleep(0.3)  # the step
    assert step > 5, "it stood still"
    assert _told(caplog, f"{host.root} does not work for") <= 2, "once on each rank"
    proxy.outage(False)
    for each in (*saves.values(), *skipped.values()):
        for snapshot in each:
            snapshot.committed.exception(40)
    for stores in (kept, left_out):
        stores.drain()  # and nothing failed
    assert _durable(host) == list(range(1, step + 1))
    outcomes = {s: [one.wait(20) is not None for one in each] for s, each in skipped.items()}
    assert all(one == other for one, other in outcomes.values())
    assert {one for one, _ in outcomes.values()} == {False, True}
    assert _durable(small) == [1, *(s for s, (one, _) in outcomes.items() if one)]
    assert 1 <= _told(caplog, f"{host.root} works again") <= 2
    kept.close()
    left_out.close()


def test_an_outage_longer_than_the_timeout_is_warned_of_and_raised_where_training_ends(
    make_host: MakeHost, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """The next saves do not raise it; `drain` does, on both ranks; what is near is whole all the while."""
    host = make_host(proxy, timeout_s=2.5)
    stores = host.open()
    assert stores.save(1) == ["", ""]
    proxy.outage(True)
    failed = _begin(stores, 2)
    for snapshot in failed:
        with pytest.raises(SaveFailedError, match="unreachable"):
            snapshot.wait(30)
    assert "save of step 2 failed" in caplog.text
    proxy.outage(False)
    for step in (3, 4):
        for snapshot in _begin(stores, step):
            assert snapshot.wait(30) is not None
    assert stores.restore() == 4

    def drained(store: SnapshotStore, _rank: int) -> str:
        with pytest.raises(SaveFailedError) as raised:
            store.drain()
        return str(raised.value)

    assert all("step 2" in text for text in stores.each(drained))
    stores.each(lambda store, _: store.close())
    assert _durable(host) == [1, 3, 4]


def test_an_outage_is_raised_by_the_next_save_where_nothing_near_has_a_copy(
    make_host: MakeHost, proxy: Proxy
) -> None:
    """Nobody trains on for hours without a snapshot because of a warning."""
    stores = make_host(proxy, with_disk=False, timeout_s=2.0, memory=0).open()
    assert stores.save(1) == ["", ""]
    proxy.outage(True)
    for handle in _begin(stores, 2):
        with pytest.raises(SaveFailedError, match=r"unreachable|unknown"):
            handle.wait(60)

    def raises(store: SnapshotStore, rank: int) -> bool:
        with pytest.raises(SaveFailedError, match="step 2"):
            store.save(state_of(3, rank, _NUMEL), step=3)
        return True

    assert stores.each(raises) == [True, True]
    stores.abandon()


@pytest.mark.parametrize("kind", ["refuse", pytest.param("hang", marks=pytest.mark.nightly)])
def test_a_restart_during_an_outage_restores_what_is_near_with_a_warning(
    make_host: MakeHost, proxy: Proxy, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """It waits once for the root, whatever the number of snapshots; without anything near it says so."""
    host = make_host(proxy, timeout_s=3.0 if kind == "refuse" else 6.0)
    stores = host.open()
    for step in (1, 2, 3, 4):
        assert stores.save(step) == ["", ""]
    stores.close(keep_memory=True)
    proxy.outage(True) if kind == "refuse" else proxy.hold(True)
    for lost in ("nothing", "memory"):
        if lost == "memory":
            host.lose_memory()
        caplog.clear()
        began = time.monotonic()
        stores = host.open()
        assert stores.restore() == 4
        assert time.monotonic() - began < (20 if kind == "hang" else 8), (
            "it waited for every request"
        )
        assert "only what is near can be restored" in caplog.text
        stores.close()
    if kind == "refuse":
        host.lose_memory()
        host.lose_disk()
        stores = host.open()
        with pytest.raises(CorruptSnapshotError, match="unreachable"):
            stores.restore(required=False)
        stores.close()
    proxy.clear()
    stores = host.open()
    assert stores.restore() == 4
    stores.close()


class _Training:
    """A small loop on one process that saves every few steps, and how long each step takes."""

    def __init__(self, store: SnapshotStore) -> None:
        self.store = store
        self.weight = torch.randn(300, 300)
        self.step = 0
        self.saved: list[int] = []

    def run(self, seconds: float) -> list[float]:
        """Train for so long; seconds of each step."""
        taken = []
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            began = time.perf_counter()
            for _ in range(12):
                self.weight = torch.nn.functional.normalize(self.weight @ self.weight)
            if self.step % 20 == 0:
                self.store.save({"w": self.weight}, step=self.step)
                self.saved.append(self.step)
            self.step += 1
            taken.append(time.perf_counter() - began)
        return taken


def _slowest(taken: list[float]) -> float:
    """What all but one of a hundred steps take at most."""
    return float(torch.tensor(taken, dtype=torch.float64).quantile(0.99))


@pytest.mark.parametrize("outage_s", [5.0, pytest.param(30.0, marks=pytest.mark.nightly)])
def test_no_step_is_slower_because_of_an_outage(
    s3_server: MotoServer, proxy: Proxy, folder: str, disk_folder: Path, outage_s: float
) -> None:
    """The same loop before and during it: no tail of slow steps, no stall, and all is durable afterwards."""
    root, options = s3_server.fresh("steps"), s3_options(s3_server, proxy)
    given: dict[str, Any] = {"memory": "64MiB", "memory_dir": folder, "disk": disk_folder / "disk"}
    with SnapshotStore(root, storage_options=options, timeout_s=120.0, **given) as store:
        training = _Training(store)
        training.run(0.5)
        control = training.run(outage_s)
        proxy.outage(True)
        during = training.run(outage_s)
        proxy.outage(False)
        after = training.run(0.5)
        store.drain(100)
    median = float(torch.tensor(control, dtype=torch.float64).median())
    assert _slowest(during) <= 1.5 * max(median, _slowest(control))
    lost = sum(t for t in during if t > 1.5 * median) / outage_s
    lost_before = sum(t for t in control if t > 1.5 * median) / outage_s
    assert lost <= lost_before + 0.1, "it stood still"
    assert len(after) > 0
    assert [i.step for i in list_snapshots(root, storage_options=options)] == training.saved
