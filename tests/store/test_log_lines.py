"""One line in the log for each transition of a snapshot, with fields for machines."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from shardstore import SaveFailedError, SnapshotStore
from shardstore.engine.transitions import FIELDS
from shardstore.tiers.fileops import use_ops
from tests.faults.breaking_ops import WatchedOps, hold_at, raise_at
from tests.ranks import run_ranks
from tests.store.conftest import OpenStore

MIB = 1 << 20


def _state(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((MIB,), value)}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: vars(record)[name] for name in FIELDS}


def _lines(records: list[logging.LogRecord], *events: str) -> list[dict[str, Any]]:
    """Fields of the lines of some events; of all, where none is named."""
    found = [_fields(r) for r in records if hasattr(r, "event")]
    return [line for line in found if not events or line["event"] in events]


@pytest.fixture
def info(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="shardstore")
    return caplog


def test_a_save_says_staged_sealed_written_and_committed_once_each(
    open_store: OpenStore, info: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    info.clear()  # the root is on a tmpfs here, which is warned of
    found = store.save(_state(), step=12).wait(20)
    assert found is not None
    store.drain()
    lines = {line["event"]: line for line in _lines(info.records)}
    assert len(lines) == len(_lines(info.records)) == 4
    assert set(lines) == {"staged", "sealed", "written", "committed"}
    for line in lines.values():
        assert (line["step"], line["rank"], line["nbytes"]) == (12, 0, found.nbytes)
        assert 0 < line["seconds"] < 60
    assert lines["staged"]["id"] is None, "it has no number before all ranks have saved once"
    assert {lines[event]["id"] for event in ("sealed", "written", "committed")} == {found.id}
    assert lines["staged"]["tier"] == lines["sealed"]["tier"] == "memory"
    assert lines["written"]["tier"] == "root"
    assert lines["committed"]["tier"] == "memory, root"
    assert lines["staged"]["seconds"] <= lines["sealed"]["seconds"]
    assert max(line["seconds"] for line in lines.values()) == lines["committed"]["seconds"]
    assert {record.levelno for record in info.records} == {logging.INFO}


def test_fields_are_plain_and_the_text_reads_without_them(
    open_store: OpenStore, info: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    info.clear()  # the root is on a tmpfs here, which is warned of
    found = store.save(_state(), step=12).wait(20)
    assert found is not None
    store.drain()
    for record in info.records:
        assert json.loads(json.dumps(_fields(record))) == _fields(record)
    texts = {vars(record)["event"]: record.getMessage() for record in info.records}
    seconds = {line["event"]: line["seconds"] for line in _lines(info.records)}
    assert texts["staged"] == (
        f"save of step 12 is staged (memory): 4.2 MB, {seconds['staged']:.3f} s after save was called"
    )
    assert texts["written"].startswith(f"{found.id} is written (root): 4.2 MB, ")


def test_a_restore_and_what_an_earlier_run_left_are_told(
    open_store: OpenStore, info: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    found = store.save(_state(), step=3).wait(20)
    assert found is not None
    store.take_leave("the test goes on as a restart")
    info.clear()
    store = open_store()
    (adopted,) = _lines(info.records)
    assert adopted == {
        "event": "adopted", "rank": 0, "step": 3, "id": found.id, "tier": "memory",
        "nbytes": found.nbytes, "seconds": None,
    }  # fmt: skip
    info.clear()
    report = store.restore(_state())
    (restored,) = _lines(info.records)
    assert restored == {
        "event": "restored", "rank": 0, "step": 3, "id": found.id, "tier": "memory",
        "nbytes": 4 * MIB, "seconds": report.duration_s,
    }  # fmt: skip
    assert info.records[-1].getMessage() == f"restored {report}"


def test_memory_tells_what_it_gives_up_and_retention_what_it_deletes(
    open_store: OpenStore, info: pytest.LogCaptureFixture
) -> None:
    store = open_store(memory="9MiB")  # two slots
    for step in range(4):
        store.save(_state(), step=step).wait(20)
        store.drain()
    evicted = _lines(info.records, "evicted")
    assert [line["step"] for line in evicted] == [0, 1]
    assert {line["tier"] for line in evicted} == {"memory"}
    assert all(line["nbytes"] > 4 * MIB for line in evicted)
    assert not _lines(info.records, "released")
    info.clear()
    store.delete(3)
    store.close()
    (released,) = _lines(info.records, "released", "evicted")
    assert (released["event"], released["step"]) == ("released", 3)
    info.clear()
    store = open_store("other", keep=1)
    for step in range(3):
        store.save(_state(), step=step)
        store.drain()
    assert [line["step"] for line in _lines(info.records, "released")] == [0, 1]
    assert not _lines(info.records, "evicted"), "what was deleted is not evicted as well"


def test_a_skipped_save_says_so_and_is_never_staged(
    open_store: OpenStore, info: pytest.LogCaptureFixture
) -> None:
    reached, go = threading.Event(), threading.Event()
    ops = WatchedOps(hold_at("point:spill", reached, go))
    with use_ops(ops):
        store = open_store(memory="9MiB", on_full="skip")
    ops.arm()
    handles = [store.save(_state(), step=step) for step in range(3)]
    assert reached.wait(20)
    go.set()
    assert handles[2].wait(20) is None
    store.drain()
    (skipped,) = _lines(info.records, "skipped")
    assert (skipped["step"], skipped["rank"]) == (2, 0)
    assert [line["step"] for line in _lines(info.records, "staged")] == [0, 1]
    assert handles[2].timings.staged_s is None


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_failed_save_warns_with_its_cause(
    open_store: OpenStore, info: pytest.LogCaptureFixture, on_error: str
) -> None:
    ops = WatchedOps(raise_at("write_at", OSError(5, "broken")))
    with use_ops(ops):
        store = open_store(on_error=on_error)
    info.clear()
    store.save(_state(), step=7).wait(20)
    ops.arm()
    with pytest.raises(SaveFailedError):
        store.save(_state(), step=8).wait(20)
    warnings = [record for record in info.records if record.levelno == logging.WARNING]
    assert [_fields(record)["event"] for record in warnings] == ["failed"]
    assert _fields(warnings[0])["step"] == 8
    assert warnings[0].getMessage().startswith("rank 0: save of step 8 failed: rank 0: TierError: ")
    assert "broken" in warnings[0].getMessage()


def test_a_streamed_save_is_staged_and_sealed_on_the_root(
    open_store: OpenStore, info: pytest.LogCaptureFixture
) -> None:
    store = open_store(memory=0)
    store.save(_state(), step=1).wait(20)
    store.drain()
    tiers = {line["event"]: line["tier"] for line in _lines(info.records)}
    assert tiers == {"staged": "root", "sealed": "root", "written": "root", "committed": "root"}


def test_nothing_is_said_below_the_level_that_is_on(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="shardstore")
    store = open_store()
    caplog.clear()
    store.save(_state(), step=1).wait(20)
    store.restore(_state())
    store.close()
    assert not caplog.records


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "event"):
            self.lines.append((record.levelno, record.getMessage(), _fields(record)))


def _two_ranks(rank: int, folder: str) -> list[tuple[int, str, dict[str, Any]]]:
    kept, logger = _Kept(), logging.getLogger("shardstore")
    logger.addHandler(kept)
    logger.setLevel(logging.DEBUG)
    ops = WatchedOps(raise_at("write_at", OSError(5, "broken")))
    with use_ops(ops):
        store = SnapshotStore(
            Path(folder) / "root", memory="32MiB", memory_dir=folder, timeout_s=30.0
        )
    state = _state(float(rank))
    store.save(state, step=1).wait(30)
    store.restore(state)
    if rank == 1:
        ops.arm()
    with pytest.raises(SaveFailedError):
        store.save(state, step=2).wait(30)
    with pytest.raises(SaveFailedError):
        store.drain()
    store.close()
    return kept.lines


def test_rank_0_speaks_for_all_and_others_only_where_something_failed(folder: str) -> None:
    ranks = run_ranks(2, _two_ranks, folder)
    for rank, lines in enumerate(ranks):
        assert {fields["rank"] for _, _, fields in lines} == {rank}
        events = [fields["event"] for _, _, fields in lines if fields["step"] == 1]
        assert sorted(events) == ["committed", "restored", "sealed", "staged", "written"]
    spoken = [
        [(level, f["event"]) for level, _, f in lines if level > logging.DEBUG] for lines in ranks
    ]
    assert {level for level, _ in spoken[0]} == {logging.INFO}
    assert "failed" in [event for _, event in spoken[0]], "rank 0 tells of the others' failures"
    assert spoken[1] == [(logging.WARNING, "failed")]
    (text,) = [text for level, text, _ in ranks[1] if level == logging.WARNING]
    assert text.startswith("rank 1: save of step 2 failed: rank 1: ")
    committed = [f for lines in ranks for _, _, f in lines if f["event"] == "committed"]
    written = [
        f for lines in ranks for _, _, f in lines if f["event"] == "written" and f["step"] == 1
    ]
    assert {f["nbytes"] for f in committed} == {sum(f["nbytes"] for f in written)}
