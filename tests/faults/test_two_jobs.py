"""Two jobs on one root (C110): kept apart, told once on each side, and a killed one blocks nobody."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from shardstore import SnapshotStore, list_snapshots
from tests.faults.scenario import open_store
from tests.ranks import RanksFailedError, run_ranks

_STEPS = range(1, 6)


class _Warnings(logging.Handler):
    """Texts of this process's warnings of another job."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("shardstore").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "another job" in (text := record.getMessage()):
            self.texts.append(text)


def _tell(folder: str, event: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        Path(folder, event).touch()


def _wait_for(folder: str, event: str) -> None:
    deadline = time.monotonic() + 60
    pause = threading.Event()
    while not Path(folder, event).exists():
        assert time.monotonic() < deadline, event
        pause.wait(0.01)


def _state(rank: int, value: float) -> dict[str, Any]:
    return {"w": torch.full((5 + rank,), value), "progress": {"value": value}}


def _save(store: SnapshotStore, rank: int, value: float, steps: Any) -> None:
    for step in steps:
        store.save(_state(rank, value), step=step).wait(30)
    store.drain()
    dist.barrier()


def _job(rank: int, folder: str, value: float) -> dict[str, Any]:
    """The first job saves before and after the second one's first save; both go on side by side."""
    warnings = _Warnings()
    other = "2" if value == 1 else "1"
    store = open_store(folder, memory=0, keep=2, name=f"job-{value}")
    if value == 1:
        _save(store, rank, value, _STEPS[:3])
        _tell(folder, "1 has begun")
        _wait_for(folder, "2 has begun")
    else:
        _wait_for(folder, "1 has begun")
        _save(store, rank, value, _STEPS[:1])
        _tell(folder, "2 has begun")
    _save(store, rank, value, _STEPS)
    _tell(folder, f"{value:.0f} has saved")
    _wait_for(folder, f"{other} has saved")
    live = _state(rank, -1.0)
    restored = []
    for step in (None, *_STEPS[-2:]):
        report = store.restore(live, step=step)
        values = {*live["w"].tolist(), live["progress"]["value"]}
        restored.append((report.id, values))
    dist.barrier()
    store.close()
    return {"restored": restored, "warnings": warnings.texts, "pid": os.getpid()}


def _values_in(path: Path) -> set[float]:
    found: set[float] = set()
    for shard in path.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                found.update(file.get_tensor(key).tolist())
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("two-jobs")
    (folder / "memory").mkdir()
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run_ranks, 2, _job, str(folder), value) for value in (1.0, 2.0)]
        return folder, [job.result() for job in jobs]


def test_no_snapshot_of_two_jobs_mixes_them(both: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    folder, jobs = both
    for ranks in jobs:
        restored = [rank["restored"] for rank in ranks]
        assert restored[0] == restored[1], "both ranks restored the same"
        assert all(len(values) == 1 for _, values in restored[0])
    for info in list_snapshots(folder / "root"):
        assert len(_values_in(folder / "root" / info.id)) == 1, info


def test_neither_job_deletes_what_the_other_saved(
    both: tuple[Path, list[list[dict[str, Any]]]],
) -> None:
    """The first stops deleting once it sees the second, which deletes its own alone."""
    folder, _ = both
    steps: dict[float, list[int]] = {1.0: [], 2.0: []}
    for info in list_snapshots(folder / "root"):
        (value,) = _values_in(folder / "root" / info.id)
        steps[value].append(info.step)
    assert steps == {1.0: [2, 3, *_STEPS], 2.0: [*_STEPS[-2:]]}


def test_each_side_says_once_who_the_other_is(
    both: tuple[Path, list[list[dict[str, Any]]]],
) -> None:
    folder, (first, second) = both
    assert [len(rank["warnings"]) for rank in (*first, *second)] == [1, 0, 1, 0]
    assert "has started on" in first[0]["warnings"][0]
    assert str(second[0]["pid"]) in first[0]["warnings"][0]
    assert "works on" in second[0]["warnings"][0]
    assert str(first[0]["pid"]) in second[0]["warnings"][0]
    for rank in (first[0], second[0]):
        assert str(folder / "root") in rank["warnings"][0]


def _saves_and_is_killed(rank: int, folder: str) -> None:
    store = open_store(folder, keep=2)
    _save(store, rank, 1.0, _STEPS[:3])
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _goes_on(rank: int, folder: str) -> tuple[float, list[int], list[str]]:
    warnings = _Warnings()
    store = open_store(folder, keep=2)
    live = _state(rank, -1.0)
    store.restore(live)
    _save(store, rank, 2.0, (4, 5))
    steps = [info.step for info in store.snapshots()]
    store.close()
    return live["progress"]["value"], steps, warnings.texts


def test_a_killed_job_neither_blocks_the_next_one_nor_counts_as_another(folder: str) -> None:
    with pytest.raises(RanksFailedError):
        run_ranks(2, _saves_and_is_killed, folder)
    assert run_ranks(2, _goes_on, folder) == [(1.0, [4, 5], [])] * 2
