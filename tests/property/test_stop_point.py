"""The real StopPoint under the faults of its model: one answer at one step, no deadlock, no overshoot (P6).

Ranks are threads with seeded delays: late and stalled listeners, ranks that begin late or have left, strides,
training collectives of all ranks, of neighbours, or none.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardstore.cluster.preemption import Grace, StopPoint
from tests.unit.cluster.threads import coordinators

_HANG_S = 30.0


class _Collectives:
    """What ranks wait for in a step: arrivals of others at the same step."""

    def __init__(self, style: str, world_size: int) -> None:
        self._style = style
        self._world_size = world_size
        self._arrived: set[tuple[int, int]] = set()
        self._changed = threading.Condition()

    def step(self, step: int, rank: int) -> None:
        with self._changed:
            self._arrived.add((step, rank))
            self._changed.notify_all()
            others = {
                "all": range(self._world_size),
                "pipeline": range(max(0, rank - 1), rank),
                "none": range(0),
            }[self._style]
            needed = {(step, other) for other in others}
            assert self._changed.wait_for(lambda: needed <= self._arrived, _HANG_S), (
                f"rank {rank} waits for ever in step {step}"
            )


@pytest.mark.parametrize("seed", range(40))
def test_all_ranks_stop_at_the_same_step(seed: int) -> None:
    rng = random.Random(seed)
    world_size, num_steps = rng.choice([2, 3, 4]), rng.choice([10, 30])
    stride, first = rng.choice([1, 1, 3]), rng.choice([0, 1000])
    style = rng.choice(["all", "pipeline", "none"])
    ranks = coordinators(world_size, timeout_s=10.0)
    graces = [Grace(30.0) for _ in ranks]
    points = [StopPoint(c, "preempt/0", g) for c, g in zip(ranks, graces, strict=True)]
    collectives = _Collectives(style, world_size)
    late = [rng.choice([0.0, 0.0, 0.02]) for _ in ranks]
    heard_after = [rng.uniform(0.0, 0.03) + rng.choice([0.0, 0.0, 0.1]) for _ in ranks]
    paces = [rng.choice([0.0, 0.001, 0.003]) for _ in ranks]
    asked: list[list[int]] = [[] for _ in ranks]
    pause = threading.Event()

    def listen(rank: int) -> None:
        pause.wait(heard_after[rank])
        graces[rank].begin()
        points[rank].hear()

    def train(rank: int) -> int | None:
        pause.wait(late[rank])
        stopped = None
        for step in range(first, first + num_steps):
            collectives.step(step, rank)
            pause.wait(paces[rank])
            if (step - first) % stride == 0:
                if points[rank].ask(step):
                    stopped = step
                    break
                asked[rank].append(step)
        points[rank].leave()
        return stopped

    with ThreadPoolExecutor(2 * world_size) as pool:
        listening = [pool.submit(listen, rank) for rank in range(world_size)]
        training = [pool.submit(train, rank) for rank in range(world_size)]
        stopped = [future.result(_HANG_S) for future in training]
        for future in listening:
            future.result(_HANG_S)
    what = f"seed {seed}, {style}: stopped at {stopped}"
    assert len(set(stopped)) == 1, what
    if stopped[0] is not None:
        latest = max((steps[-1] for steps in asked if steps), default=first - stride)
        assert stopped[0] <= latest + stride, f"overshoot, {what}"
    for rank in reversed(ranks):
        rank._owner.end("the test ends")


def test_steps_may_begin_again_after_a_rollback() -> None:
    ranks = coordinators(2, timeout_s=10.0)
    points = [StopPoint(c, "preempt/0", Grace(30.0)) for c in ranks]
    for point in points:
        assert not any(point.ask(step) for step in (100, 101, 102, 50, 51))
    assert points[0].ask(52) is False, "one rank is a step ahead"
    for point in points:
        point.hear()
    assert points[1].ask(52) is False, "the other follows it"
    assert [point.ask(53) for point in points] == [True, True], "not only after step 102"
    for rank in reversed(ranks):
        rank._owner.end("the test ends")


def test_without_an_answer_nobody_stops_and_nobody_waits_beyond_the_margin() -> None:
    ranks = coordinators(2, timeout_s=60.0)
    grace = Grace(0.5)
    point = StopPoint(ranks[1], "preempt/0", grace)
    grace.begin()
    point.hear()  # rank 0 never does
    assert point.ask(7) is False
    assert grace.remaining_s > 0.0, "there is time left to end in"
    for rank in reversed(ranks):
        rank._owner.end("the test ends")


def test_a_rank_that_has_left_does_not_hold_up_the_others() -> None:
    ranks = coordinators(2, timeout_s=10.0)
    points = [StopPoint(c, "preempt/0", Grace(30.0)) for c in ranks]
    assert not points[0].ask(4)
    points[0].leave()
    assert not points[1].ask(2)
    for point in points:
        point.hear()
    assert [points[1].ask(step) for step in (3, 4, 5)] == [False, False, True]
    for rank in reversed(ranks):
        rank._owner.end("the test ends")
