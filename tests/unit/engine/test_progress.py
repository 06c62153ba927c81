"""When progress is reported, to whom, and what a bad callback can do. The clock is the test's."""

from __future__ import annotations

import json
import logging
import pickle
import threading
from itertools import pairwise

import msgspec
import pytest

from shardstore import Progress
from shardstore.engine.progress import ProgressReporter, What


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _reporter(clock: Clock, records: list[Progress] | None, *, rank: int = 0) -> ProgressReporter:
    return ProgressReporter(None if records is None else records.append, rank=rank, clock=clock)


def test_short_work_has_one_record_and_that_says_done() -> None:
    clock, records = Clock(), list[Progress]()
    with _reporter(clock, records).begin("save", step=3, total_bytes=10, tier="root") as work:
        clock.now += 0.1
        work.advance(10)
        work.complete()
    (record,) = records
    assert record == Progress("save", 3, "root", 10, 10, record.seconds, "done")
    assert record.seconds == pytest.approx(0.1)
    assert record.fraction == 1.0
    assert record.gb_per_s == pytest.approx(10 / 0.1 / 1e9)


def test_records_come_at_most_every_fifth_of_a_second_and_never_fall() -> None:
    clock, records = Clock(), list[Progress]()
    with _reporter(clock, records).begin("write", step=3, total_bytes=100, tier="root") as work:
        for _ in range(100):
            clock.now += 0.0625
            work.advance(1)
        work.complete()
    times = [record.seconds for record in records[:-1]]
    assert all(b - a >= 0.2 for a, b in pairwise(times))
    assert 20 <= len(records) <= 32
    done = [record.done_bytes for record in records]
    assert done == sorted(done)
    assert done[-1] == 100
    assert [record.status for record in records] == ["running"] * (len(records) - 1) + ["done"]


def test_more_bytes_than_expected_stay_within_the_total() -> None:
    clock, records = Clock(), list[Progress]()
    with _reporter(clock, records).begin("restore", step=0, total_bytes=5, tier="root") as work:
        for _ in range(3):
            clock.now += 1
            work.advance(4)
        work.reach(2)  # behind what is done already
        work.complete()
    assert [record.done_bytes for record in records] == [4, 5, 5, 5]


def test_work_that_is_left_has_failed_and_says_so_once() -> None:
    clock, records = Clock(), list[Progress]()
    work = _reporter(clock, records).begin("restore", step=3, total_bytes=10, tier="memory")
    work.advance(4)
    with pytest.raises(ZeroDivisionError), work:
        raise ZeroDivisionError
    work.close()
    (record,) = records
    assert (record.status, record.done_bytes) == ("failed", 4)


def test_nothing_to_do_is_all_of_it() -> None:
    records: list[Progress] = []
    with _reporter(Clock(), records).begin("drain", step=1, total_bytes=0, tier="root") as work:
        work.complete()
    assert records[0].fraction == 1.0
    assert records[0].gb_per_s == 0.0


def test_a_slow_callback_takes_a_tenth_of_the_time_at_most() -> None:
    clock = Clock()
    calls: list[float] = []

    def slow(_progress: Progress) -> None:
        calls.append(clock.now)
        clock.now += 3.0

    reporter = ProgressReporter(slow, clock=clock)
    work = reporter.begin("write", step=1, total_bytes=10_000, tier="root")
    for _ in range(1000):
        clock.now += 0.1
        work.advance(1)
    assert 2 <= len(calls) <= 4
    assert all(b - a >= 30 for a, b in pairwise(calls))


def test_a_callback_that_raises_is_told_once_and_called_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, calls = Clock(), list[Progress]()

    def broken(progress: Progress) -> None:
        calls.append(progress)
        raise RuntimeError("no display")

    reporter = ProgressReporter(broken, rank=5, clock=clock)
    for _ in range(2):
        with reporter.begin("save", step=1, total_bytes=3, tier="root") as work:
            for _ in range(3):
                clock.now += 1
                work.advance(1)
            work.complete()
    assert len(calls) == 8
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert "rank 5: the progress callback raised" in line.getMessage()
    assert line.exc_info is not None
    assert "no display" in str(line.exc_info[1])


def test_an_interrupt_passes_through_to_who_called_but_ends_no_thread_behind() -> None:
    def interrupted(_progress: Progress) -> None:
        raise KeyboardInterrupt

    reporter = ProgressReporter(interrupted)
    work = reporter.begin("save", step=1, total_bytes=1, tier="root")
    with pytest.raises(KeyboardInterrupt):
        work.complete()
    survived = threading.Event()

    def behind() -> None:
        reporter.begin("write", step=1, total_bytes=1, tier="root").complete()
        survived.set()

    thread = threading.Thread(target=behind)
    thread.start()
    thread.join(20)
    assert survived.is_set()


def _work_for(seconds: int, what: What, reporter: ProgressReporter, clock: Clock) -> None:
    with reporter.begin(what, step=7, total_bytes=seconds, tier="root") as work:
        for _ in range(seconds):
            clock.now += 1.0
            work.advance(1)
        work.complete()


@pytest.mark.parametrize("what", ["save", "restore", "drain"])
def test_without_a_callback_rank_0_logs_a_line_every_five_seconds(
    what: What, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="shardstore")
    clock = Clock()
    reporter = ProgressReporter(clock=clock)
    _work_for(4, what, reporter, clock)
    assert not caplog.records
    _work_for(20, what, reporter, clock)
    assert [vars(line)["seconds"] for line in caplog.records] == [5.0, 10.0, 15.0, 20.0]
    line = caplog.records[1]
    assert line.levelno == logging.INFO
    fields = vars(line)
    assert (fields["event"], fields["step"], fields["tier"], fields["nbytes"]) == (
        "progress", 7, "root", 10,
    )  # fmt: skip
    assert "50 %" in line.getMessage()
    assert f"{what} of step 7" in line.getMessage()


def test_no_line_comes_from_other_ranks_nor_from_writing_behind_nor_beside_a_callback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="shardstore")
    clock = Clock()
    _work_for(20, "restore", ProgressReporter(rank=1, clock=clock), clock)
    _work_for(20, "write", ProgressReporter(clock=clock), clock)
    _work_for(20, "save", _reporter(clock, []), clock)
    assert not caplog.records


def test_records_pickle_and_become_json_and_print_as_one_line() -> None:
    record = Progress("restore", 12, "memory", 25, 100, 0.5, "running")
    assert pickle.loads(pickle.dumps(record)) == record
    plain = json.loads(json.dumps(msgspec.to_builtins(record)))
    assert plain == {
        "what": "restore", "step": 12, "tier": "memory", "done_bytes": 25, "total_bytes": 100,
        "seconds": 0.5, "status": "running",
    }  # fmt: skip
    assert str(record) == "restore of step 12 from memory: 25 % of 0.00 GB, 0.00 GB/s"
