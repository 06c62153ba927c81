"""One of two ranks, or both, end by SIGKILL at every named point of every protocol.

The next life of two ranks finds the old or the new snapshot, the same on both; a survivor hears of it
within its deadline. Points are collected from the sources: one that no life comes to fails here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import pytest

from tests.faults.drivers import Drivers
from tests.faults.kill_ranks import FLUSHED, kill_at_the_point, points_of, points_of_the_package
from tests.faults.lives import SCENARIOS

_VICTIMS = (None, 0, 1)
_Passed = Mapping[str, list[str]]


@pytest.fixture(scope="module")
def passed(warm: Drivers) -> _Passed:
    """Lives that come to each named point."""
    names = list(SCENARIOS)
    found = defaultdict(list)
    for name, points in zip(names, warm.map(points_of, [(n,) for n in names]), strict=True):
        for point in points:
            found[point].append(name)
    for _ in range(10):
        if FLUSHED not in found and FLUSHED in warm.map(points_of, [("flush",)])[0]:
            found[FLUSHED].append("flush")
    return found


@pytest.mark.slow
def test_ranks_killed_at_every_named_point_in_turn(warm: Drivers, passed: _Passed) -> None:
    points = sorted(points_of_the_package())
    never = [point for point in points if point not in passed]
    assert not never, f"no life of tests/faults/lives.py comes to {never}"
    tasks = []
    for number, point in enumerate(points):
        name = passed[point][number % len(passed[point])]
        tasks += [(name, point, None), (name, point, number % 2)]
    assert len(warm.map(kill_at_the_point, tasks)) >= 50


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("victim", _VICTIMS, ids=["all ranks", "rank 0", "rank 1"])
def test_ranks_killed_at_every_named_point_of_every_life(
    warm: Drivers, passed: _Passed, victim: int | None
) -> None:
    tasks = [(name, point, victim) for point, names in passed.items() for name in names]
    assert len(warm.map(kill_at_the_point, tasks)) > 100
