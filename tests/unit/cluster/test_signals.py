"""Signals reach a thread whatever the main thread does, and are no business of forked children (P7)."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from shardstore.cluster.signals import SignalCatcher

SIGNAL = signal.SIGUSR1
"""Not SIGTERM: a failed test must not end pytest."""


class Ears:
    """What a catcher has heard."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.some = threading.Event()

    def __call__(self, signum: int) -> None:
        assert signum == SIGNAL
        self.times.append(time.monotonic())
        self.some.set()


@contextmanager
def catching(*signals: signal.Signals) -> Iterator[tuple[SignalCatcher, Ears]]:
    ears = Ears()
    catcher = SignalCatcher(signals or (SIGNAL,), ears)
    catcher.install()
    try:
        yield catcher, ears
    finally:
        catcher.release()


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    before = signal.getsignal(SIGNAL)
    signal.signal(SIGNAL, signal.SIG_IGN)
    yield
    signal.signal(SIGNAL, before)
    assert signal.set_wakeup_fd(-1) == -1


def test_the_earlier_handler_runs_once_per_signal_and_is_back_afterwards() -> None:
    calls: list[int] = []

    def mine(signum: int, _frame: object) -> None:
        calls.append(signum)

    signal.signal(SIGNAL, mine)
    with catching() as (_, ears):
        os.kill(os.getpid(), SIGNAL)
        assert ears.some.wait(5.0)
        assert calls == [SIGNAL]
        os.kill(os.getpid(), SIGNAL)
        assert calls == [SIGNAL] * 2
    assert signal.getsignal(SIGNAL) is mine
    os.kill(os.getpid(), SIGNAL)
    assert calls == [SIGNAL] * 3


def test_it_is_heard_while_the_main_thread_is_in_a_native_call() -> None:
    rounds = 500_000
    while not _is_heard_in_a_native_call(
        rounds
    ):  # until the call is long enough to tell, on any machine
        rounds *= 4


def _is_heard_in_a_native_call(rounds: int) -> bool:
    """False if the call was too short."""
    with catching() as (_, ears), ThreadPoolExecutor(1) as pool:
        entered = threading.Event()

        def send() -> None:
            entered.wait()
            os.kill(os.getpid(), SIGNAL)

        sent = pool.submit(send)
        started = time.monotonic()
        entered.set()
        hashlib.pbkdf2_hmac("sha256", b"x", b"y", rounds)  # neither returns early nor holds the GIL
        ended = time.monotonic()
        sent.result()
        assert ears.some.wait(5.0)
    if ended - started < 0.5:
        return False
    assert ears.times[0] < ended, "it was heard only when the native call was over"
    return True


def test_whoever_had_the_wakeup_descriptor_still_gets_the_signals() -> None:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    other = signal.set_wakeup_fd(writer)
    try:
        with catching() as (_, ears):
            os.kill(os.getpid(), SIGNAL)
            assert ears.some.wait(5.0)
        assert SIGNAL in os.read(reader, 100)
        assert signal.set_wakeup_fd(other) == writer
    finally:
        os.close(reader)
        os.close(writer)


def test_a_descriptor_and_a_handler_set_meanwhile_stay() -> None:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    calls: list[int] = []
    with catching() as (_, ears):
        chained: Any = signal.getsignal(SIGNAL)

        def later(signum: int, frame: Any) -> None:
            calls.append(signum)
            chained(signum, frame)

        signal.signal(SIGNAL, later)
        signal.set_wakeup_fd(writer)
        os.kill(os.getpid(), SIGNAL)
        assert ears.some.wait(5.0), "the handler tells it, though the descriptor is another's"
    assert signal.getsignal(SIGNAL) is later
    assert signal.set_wakeup_fd(-1) == writer
    os.kill(
        os.getpid(), SIGNAL
    )  # `later` still calls ours, which does what was there before: nothing
    assert calls == [SIGNAL] * 2
    os.close(reader)
    os.close(writer)


def test_released_on_another_thread_it_does_what_was_done_before() -> None:
    calls: list[int] = []
    signal.signal(SIGNAL, lambda signum, _frame: calls.append(signum))
    ears = Ears()
    catcher = SignalCatcher([SIGNAL], ears)
    catcher.install()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(catcher.release).result() is False
    os.kill(os.getpid(), SIGNAL)
    assert calls == [SIGNAL]
    with catching() as (_, second):  # and makes way for the next one
        os.kill(os.getpid(), SIGNAL)
        assert second.some.wait(5.0)
    assert catcher.release()
    assert len(calls) == 2


def test_only_the_main_thread_and_only_one_at_a_time() -> None:
    with ThreadPoolExecutor(1) as pool:
        broken = pool.submit(SignalCatcher([SIGNAL], Ears()).install)
        with pytest.raises(ValueError, match="main thread"):
            broken.result()
    with catching(), pytest.raises(ValueError, match="leave the earlier guard_preemption"):
        SignalCatcher([SIGNAL], Ears()).install()


def test_a_signal_to_a_forked_child_is_not_heard_by_its_parent() -> None:
    signal.signal(SIGNAL, signal.SIG_DFL)
    with catching() as (_, ears):
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), SIGNAL)  # as without us: it ends the process
            os._exit(7)
        _, status = os.waitpid(pid, 0)
        assert os.WTERMSIG(status) == SIGNAL
        assert not ears.some.wait(0.2)
    signal.signal(SIGNAL, signal.SIG_IGN)


def _work(started: Any) -> None:
    started.set()
    while True:
        time.sleep(1.0)


@contextmanager
def _worker(target: Callable[..., None] = _work) -> Iterator[Any]:
    context = multiprocessing.get_context("fork")
    started = context.Event()
    worker = context.Process(target=target, args=(started,), daemon=True)
    worker.start()
    assert started.wait(10.0)
    try:
        yield worker
    finally:
        worker.kill()
        worker.join()


def _signal_from_elsewhere(pid: int, signum: signal.Signals) -> None:
    sender = os.fork()
    if sender == 0:
        os.kill(pid, signum)
        os._exit(0)
    os.waitpid(sender, 0)


def test_a_forked_worker_outlives_the_schedulers_signal_but_not_its_parents() -> None:
    with catching(signal.SIGTERM) as (_, ears), _worker() as worker:
        _signal_from_elsewhere(worker.pid, signal.SIGTERM)
        worker.join(0.3)
        assert worker.is_alive(), "a worker that ends takes the trainer's next batch with it"
        assert not ears.some.is_set()
        worker.terminate()
        worker.join(10.0)
        assert worker.exitcode == -signal.SIGTERM


def test_a_worker_dies_of_the_signal_once_nobody_watches() -> None:
    with catching(signal.SIGTERM) as (catcher, _), _worker() as worker:
        catcher.release()
        _signal_from_elsewhere(worker.pid, signal.SIGTERM)
        worker.join(10.0)
        assert worker.exitcode == -signal.SIGTERM


def _own_handler(started: Any) -> None:
    def bye(_signum: int, _frame: object) -> None:
        os._exit(23)

    signal.signal(signal.SIGTERM, bye)
    _work(started)


def test_a_workers_own_handler_runs_when_its_parent_ends_it() -> None:
    with catching(signal.SIGTERM), _worker(_own_handler) as worker:
        worker.terminate()
        worker.join(10.0)
        assert worker.exitcode == 23


def test_many_descriptors_do_not_matter() -> None:
    held = [os.dup(0) for _ in range(1100)]  # select() ends at 1,024
    try:
        with catching() as (_, ears):
            os.kill(os.getpid(), SIGNAL)
            assert ears.some.wait(5.0)
    finally:
        for fd in held:
            os.close(fd)


def _blocked_with_a_handler(started: Any) -> None:
    def bye(_signum: int, _frame: object) -> None:
        os._exit(23)

    signal.signal(signal.SIGTERM, bye)
    started.set()
    os.read(os.pipe()[0], 1)  # as a worker that waits for its next piece of work


def test_a_workers_own_handler_runs_though_it_waits_in_a_system_call() -> None:
    with catching(signal.SIGTERM), _worker(_blocked_with_a_handler) as worker:
        worker.join(0.1)
        worker.terminate()
        worker.join(10.0)
        assert worker.exitcode == 23, "as of a pool, whose end waits for its workers"


def _fork_and_wait(started: Any) -> None:
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(7)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        started.set()
    time.sleep(60.0)


def test_what_a_worker_forks_holds_nothing_back() -> None:
    with catching(signal.SIGTERM), _worker(_fork_and_wait):
        pass


def test_a_worker_that_outlives_a_guard_holds_signals_back_under_the_next() -> None:
    with catching(signal.SIGTERM) as (catcher, _), _worker() as worker:
        catcher.release()
        with catching(signal.SIGTERM):
            _signal_from_elsewhere(worker.pid, signal.SIGTERM)
            worker.join(0.3)
            assert worker.is_alive(), "as persistent workers do"


def _trainer_with_a_worker(connection: Any) -> None:
    def ended_by(started: Any) -> None:
        connection.send(os.getpid())
        _work(started)

    catcher = SignalCatcher([signal.SIGTERM], lambda _: None)
    catcher.install()
    context = multiprocessing.get_context("fork")
    started = context.Event()
    worker = context.Process(target=ended_by, args=(started,), daemon=False)
    worker.start()
    assert started.wait(10.0)
    _signal_from_elsewhere(worker.pid or 0, signal.SIGTERM)
    connection.send("signalled")
    time.sleep(60.0)


def test_a_signal_held_back_ends_the_worker_once_its_parent_is_gone() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    trainer = context.Process(target=_trainer_with_a_worker, args=(theirs,), daemon=False)
    trainer.start()
    theirs.close()
    assert isinstance(ours.recv(), int)
    assert ours.recv() == "signalled"
    assert not ours.poll(0.3), "it holds its end open"
    trainer.kill()
    trainer.join()
    assert ours.poll(10.0), "it stayed for ever"
    with pytest.raises(EOFError):
        ours.recv()


def test_a_wakeup_descriptor_that_its_owner_has_closed_is_left_alone() -> None:
    """As an event loop's that ends inside the guard: its number may be that of any file by then."""
    reader, writer = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(writer)
    with catching() as (catcher, ears):
        os.close(writer)
        other = os.memfd_create("other")
        os.dup2(other, writer)
        os.kill(os.getpid(), SIGNAL)
        assert ears.some.wait(5.0)
        catcher.release()
        assert os.fstat(writer).st_size == 0, "a byte was written into somebody's file"
    assert signal.set_wakeup_fd(-1) == -1
    for fd in {reader, writer, other}:
        os.close(fd)


def test_a_pipe_is_not_taken_from_a_listener_that_is_held_up() -> None:
    entered, go = threading.Event(), threading.Event()

    def heard(_signum: int) -> None:
        entered.set()
        assert go.wait(30.0)

    catcher = SignalCatcher([SIGNAL], heard)
    catcher.install()
    pipe = catcher._reader
    os.kill(os.getpid(), SIGNAL)
    assert entered.wait(5.0)
    catcher.release()  # waits a second in vain
    other = os.memfd_create("other")
    assert other != pipe, "the listener would read from somebody's file"
    go.set()
    os.close(other)


def test_once_the_time_is_up_a_signal_does_what_it_did_before() -> None:
    signal.signal(SIGNAL, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        SignalCatcher([SIGNAL], Ears(), is_past=lambda: True).install()
        os.kill(os.getpid(), SIGNAL)
        time.sleep(5.0)
        os._exit(7)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == SIGNAL
    signal.signal(SIGNAL, signal.SIG_IGN)
