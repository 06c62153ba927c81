"""The process ends at any operation: the next life finds the old or the new snapshot, whole, and cleans up.

Each life is a forked child that SIGKILL ends before its n-th operation, n from 1 on, until a life comes
through: see `lives.py` for what they do, `crash_at.py` for what is true after each.
"""

from __future__ import annotations

import pytest

from tests.faults.crash_at import Crash, crashes_of
from tests.faults.drivers import Drivers
from tests.faults.lives import SCENARIOS, Scenario

_NUM_TASKS = 4
_EVERY = 4
_EVERY_OF_SEVERAL_RANKS = 11
_EVERY_OF_SEVERAL_ROOTS = 71
"""Each of these lives takes seconds: roots are asked over the key-value store."""


@pytest.mark.slow
def test_every_few_operations_of_every_kind_of_life(warm: Drivers) -> None:
    tried = [
        (name, 1 + number % every, every)
        for number, (name, scenario) in enumerate(SCENARIOS.items())
        for every in [_every(scenario)]
    ]
    tried.sort(key=lambda task: SCENARIOS[task[0]].num_ranks, reverse=True)  # the longest first
    found = dict(zip([task[0] for task in tried], warm.map(crashes_of, tried), strict=True))
    assert sum(map(len, found.values())) > 150
    _check_deleted_stays_deleted(found["delete"])
    for name in ("save, retention", "save, streamed", "save, memory alone", "save, two ranks"):
        assert _restored(found[name]) == {1, 2}, f"{name}: one side of the commit was never tried"


def _every(scenario: Scenario) -> int:
    if scenario.options.get("shared") is False:
        return _EVERY_OF_SEVERAL_ROOTS
    return _EVERY if scenario.num_ranks == 1 else _EVERY_OF_SEVERAL_RANKS


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_operation(warm: Drivers, name: str) -> None:
    tasks = [(name, 1 + n, _NUM_TASKS) for n in range(_NUM_TASKS)]
    crashes = [crash for found in warm.map(crashes_of, tasks) for crash in found]
    assert any(not crash.was_killed for crash in crashes)
    if name == "delete":
        _check_deleted_stays_deleted(*warm.map(crashes_of, [(name, 1, 1)]))
    sides = set().union(*SCENARIOS[name].found.values())
    assert _restored(crashes) == sides, f"not all of {sides} were ever restored"


def _check_deleted_stays_deleted(crashes: list[Crash]) -> None:
    """`delete` works on one thread: the later it ends, the more of it is done, and nothing comes back."""
    restored = [crash.restored for crash in crashes]
    assert restored == sorted(restored, key=lambda version: version != 2), restored


def _restored(crashes: list[Crash]) -> set[int | None]:
    return {crash.restored for crash in crashes}
