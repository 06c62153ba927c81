"""The real AgreedPoint, ranks as threads with seeded delays: one answer, at one call, no hang (P6)."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardstore.cluster.agreed import AgreedPoint, Patience
from tests.unit.cluster.threads import coordinators

NUM_CALLS = 25


@pytest.mark.parametrize("seed", range(25))
def test_all_ranks_reach_the_point_at_the_same_call(seed: int) -> None:
    rng = random.Random(seed)
    world_size = rng.choice([2, 3, 4])
    ranks = coordinators(world_size, timeout_s=10.0)
    points = [
        AgreedPoint(c, "raise/1", reached=None, patience=lambda: Patience(10.0)) for c in ranks
    ]
    coupled = rng.random() < 0.5
    meet = threading.Barrier(world_size)
    heard_at = [rng.uniform(0.0, 0.03) for _ in range(world_size)]
    paces = [rng.choice([0.0, 0.001, 0.004]) for _ in range(world_size)]
    flags = [rng.random() < 0.7 for _ in range(world_size)]
    pause = threading.Event()

    def hear(rank: int) -> None:
        pause.wait(heard_at[rank])
        points[rank].signal(flag=flags[rank])

    def train(rank: int) -> int | None:
        for call in range(1, NUM_CALLS + 1):
            if points[rank].reached(call):
                meet.abort()
                return call
            pause.wait(paces[rank])
            if coupled:
                try:
                    meet.wait(10.0)
                except threading.BrokenBarrierError:
                    coupled_off.set()
        return None

    coupled_off = threading.Event()
    with ThreadPoolExecutor(2 * world_size) as pool:
        hearing = [pool.submit(hear, rank) for rank in range(world_size)]
        training = [pool.submit(train, rank) for rank in range(world_size)]
        stopped = [future.result(30.0) for future in training]
        for future in hearing:
            future.result(30.0)
    assert len(set(stopped)) == 1, f"seed {seed}: ranks stopped at {stopped}"
    assert {point.all_flagged() for point in points} == {all(flags)}
    for rank in reversed(ranks):
        rank._owner.end("the test ends")


def test_without_an_answer_no_call_is_at_the_point() -> None:
    ranks = coordinators(2, timeout_s=0.3)
    point = AgreedPoint(ranks[0], "raise/1", reached=3, patience=lambda: Patience(0.3))
    point.signal()
    assert point.reached(3) is False
    assert point.reached(4) is False, "rank 1 never heard of it: nobody may act alone"
    for rank in reversed(ranks):
        rank._owner.end("the test ends")
