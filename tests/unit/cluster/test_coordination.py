"""Joint decisions: one answer on all ranks, within the deadline, with names."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from shardstore.cluster.coordination import Coordinator, Stopped
from shardstore.cluster.kv import LocalKeyValueStore
from shardstore.cluster.owner import StoreOwner
from shardstore.errors import CoordinationError, CoordinationTimeoutError
from tests.unit.cluster.threads import FrozenStore, coordinators, on_all


def _end(ranks: list[Coordinator]) -> None:
    for rank in reversed(ranks):
        rank._owner.end("the test ends")


def test_every_rank_gets_what_rank_0_decides_from_all_values() -> None:
    ranks = coordinators(3)
    answers = on_all(
        ranks,
        lambda c: c.gather_decide(
            "sum", str(c.rank).encode(), lambda values: b",".join(values), phase="adding"
        ),
    )
    assert answers == [b"0,1,2"] * 3
    _end(ranks)


def test_an_exception_in_the_decision_is_raised_on_all_ranks() -> None:
    ranks = coordinators(3)

    def decide(_values: list[bytes]) -> bytes:
        raise ValueError("no such thing")

    answers = on_all(ranks, lambda c: c.gather_decide("x", b"", decide, phase="choosing"))
    for answer in answers:
        assert isinstance(answer, CoordinationError)
        assert "choosing failed on rank 0: ValueError: no such thing" in str(answer)
        assert answer.failed_ranks == (0,)
    _end(ranks)


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_an_absent_rank_is_named_by_all_others_within_the_deadline(absent: int) -> None:
    ranks = coordinators(3, timeout_s=0.6)
    there = [c for c in ranks if c.rank != absent]
    started = time.monotonic()
    answers = on_all(there, lambda c: c.gather_decide("x", b"", lambda _: b"", phase="meeting"))
    assert time.monotonic() - started < 5
    for answer in answers:
        assert isinstance(answer, CoordinationTimeoutError)
        assert answer.missing_ranks == (absent,)
        assert "meeting" in str(answer)
    late = on_all([ranks[absent]], lambda c: c.gather_decide("x", b"", lambda _: b"", phase="m"))
    assert isinstance(late[0], CoordinationTimeoutError), "who comes late must get the same answer"
    _end(ranks)


def test_progress_of_a_slow_rank_moves_the_deadline() -> None:
    ranks = coordinators(2, timeout_s=1.0)
    done = threading.Event()

    def call(c: Coordinator) -> bytes:
        if c.rank == 1:
            for _ in range(30):
                c.progress(1000)
                done.wait(0.1)
        return c.gather_decide("x", b"", lambda _: b"ok", phase="writing")

    assert on_all(ranks, call) == [b"ok", b"ok"]
    _end(ranks)


def test_a_stopped_store_host_is_told_as_unreachable() -> None:
    store = FrozenStore()
    ranks = coordinators(2, timeout_s=0.5, store=store)
    store.running.clear()
    started = time.monotonic()
    answers = on_all(
        [ranks[1]], lambda c: c.gather_decide("x", b"", lambda _: b"", phase="meeting")
    )
    assert isinstance(answers[0], CoordinationTimeoutError)
    assert "store host (rank 0) unreachable" in str(answers[0])
    assert answers[0].missing_ranks == ()
    assert time.monotonic() - started < 10
    store.running.set()
    _end(ranks)


def test_a_broken_connection_fails_every_wait_with_its_cause() -> None:
    class Broken(LocalKeyValueStore):
        def get(self, key: str) -> bytes | None:
            raise RuntimeError("connection reset")

    (rank,) = coordinators(1, store=Broken())
    with pytest.raises(CoordinationError, match="connection reset"):
        rank.wait(["a"], phase="waiting", ranks=[0])
    with pytest.raises(CoordinationError, match="connection reset"):
        rank.propose("b", b"")
    _end([rank])


def test_a_key_is_written_once_and_everybody_obeys_it() -> None:
    ranks = coordinators(8)
    answers = on_all(ranks, lambda c: c.propose("outcome", str(c.rank).encode()))
    assert len(set(map(bytes, answers))) == 1  # type: ignore[arg-type]
    _end(ranks)


def test_the_stop_key_ends_a_wait_with_its_value() -> None:
    ranks = coordinators(2)
    ranks[1].post("fail", b"why")
    answer = ranks[0].wait(["never"], phase="p", ranks=[1], stop="fail")
    assert answer == Stopped(b"why")
    _end(ranks)


def test_keys_of_finished_decisions_do_not_pile_up() -> None:
    store = LocalKeyValueStore()
    ranks = coordinators(3, store=store)
    sizes = []

    def one_round(rank: Coordinator, number: int) -> None:
        rank.gather_decide(f"round/{number}", b"x" * 100, lambda _: b"", phase="p")
        rank.propose(f"flush/{rank.rank}", b"")

    for number in range(20):
        on_all(ranks, partial(one_round, number=number))
        sizes.append(len(store))
    assert max(sizes) <= 8, sizes
    _end(ranks)


def test_leaving_together_is_clean_and_leaving_alone_is_not() -> None:
    ranks = coordinators(3, timeout_s=1.0)
    assert on_all(ranks, lambda c: c.close(1.0)) == [True, True, True]
    ranks = coordinators(2, timeout_s=0.5)
    ranks[1].abandon()
    assert ranks[0].close(0.5) is False


def test_calls_after_leaving_say_so() -> None:
    (rank,) = coordinators(1)
    rank.abandon()
    with pytest.raises(CoordinationError, match="left the store"):
        rank.propose("key", b"")


def test_waiting_for_many_ranks_is_linear_in_ranks() -> None:
    """Each key is looked up a bounded number of times, whatever the number of ranks."""

    class Counting(LocalKeyValueStore):
        gets = 0

        def get(self, key: str) -> bytes | None:
            self.gets += 1
            return super().get(key)

    store = Counting()
    world_size = 4096
    rank = Coordinator(store, rank=0, world_size=world_size, timeout_s=20.0)
    for other in range(1, world_size):
        store.set(f"x/in/{other}", b"v")
    answer = rank.gather_decide("x", b"v", lambda values: str(len(values)).encode(), phase="p")
    assert answer == b"4096"
    assert store.gets < 2 * world_size
    _end([rank])


def test_who_hears_of_an_end_gets_an_error_of_its_own() -> None:
    """One for all would collect the frames, and so the state, of everybody who raises it."""
    owner = StoreOwner(LocalKeyValueStore(), 0)
    owner.end("this rank has left the store")
    first, second = (owner.call(lambda _: None).exception() for _ in range(2))
    assert first is not second
    assert str(first) == str(second)
    assert "this rank has left the store" in str(first)
