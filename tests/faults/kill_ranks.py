"""Two real ranks over gloo, of which one or both end by SIGKILL at a named point of a protocol."""

from __future__ import annotations

import datetime
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

import shardstore
from shardstore.testing import CountingOps, kill_at_point, run_forked, start_forked
from tests.faults.crash_at import Places, live_before, look, on_ranks, places
from tests.faults.lives import SCENARIOS, Life, Scenario, Told, state_of

NUM_RANKS = 2
_OUTLIVED_S = 3.0
"""How long a survivor waits for the dead."""
_POINT = re.compile(r'\.point\("([^"]+)"\)')


class Killed(NamedTuple):
    """What was tried, and what came of it."""

    name: str
    point: str
    victim: int | None
    """None: all ranks."""
    restored: int | None


def points_of_the_package() -> set[str]:
    """Every named point, as the sources have them."""
    sources = Path(shardstore.__file__).parent.rglob("*.py")
    return {name for path in sources for name in _POINT.findall(path.read_text())}


def points_of(name: str) -> list[str]:
    """Named points that the armed part of a life comes to, by ranks that are threads of one child."""
    state_of(1)
    scenario = _of_two(name)
    with places() as where:
        live_before(where, scenario, name)
        ended = run_forked(lambda: _passed(where, scenario))
    assert not ended.error, f"{name}: {ended.error}"
    names: list[str] = ended.value
    return names


FLUSHED = "publish flushed"
"""A flush comes to it unless the commit behind is faster."""


def _passed(where: Places, scenario: Scenario) -> list[str]:
    ops, all_there = CountingOps(), threading.Barrier(NUM_RANKS)

    def one(rank: Any) -> None:
        scenario.act(Life(*where, ops, Told(), scenario.options, rank, all_there, rank.rank))

    on_ranks(NUM_RANKS, one)
    return sorted({n.removeprefix("point:") for n in ops.names if n.startswith("point:")})


def _of_two(name: str) -> Scenario:
    return replace(SCENARIOS[name], num_ranks=NUM_RANKS)


def kill_at_the_point(name: str, point: str, victim: int | None) -> Killed:
    """One life of two ranks that loses one or both at a point, and the next life."""
    state_of(1)
    scenario = _of_two(name)
    what = f"{name}: {'all ranks' if victim is None else f'rank {victim}'} killed at {point!r}"
    with places() as where:
        live_before(where, scenario, name)
        told = Told()
        options = {**scenario.options, "timeout_s": 20.0 if victim is None else _OUTLIVED_S}
        live = partial(_live, where, scenario, options, told, point, victim)
        started = [start_forked(partial(live, rank)) for rank in range(NUM_RANKS)]
        ended = [child.wait(40) for child in started]
        for rank, end in enumerate(ended):
            # A survivor is told so, within its deadline; or it never needed the dead.
            assert not end.error or "\nshardstore.errors." in end.error, (
                f"{what}: {rank}: {end.error}"
            )
        dead = [rank for rank, end in enumerate(ended) if end.was_killed]
        expected = {None: ([0, 1],), 0: ([0], []), 1: ([1], [])}[victim]
        if point == FLUSHED:
            expected = (*expected, [])
        assert dead in expected, f"{what}: dead are {dead}"
        after = run_forked(lambda: look(where, scenario))
        assert not after.error, f"{what}, in phase {told.phase}: {after.error}"
        allowed = scenario.found[told.phase]
        assert after.value in allowed, f"{what}: restored {after.value}, not one of {allowed}"
        return Killed(name, point, victim, after.value)


class _AllRanks:
    """A meeting of all ranks, before anybody dies."""

    def wait(self, timeout: float | None = None, /) -> None:
        del timeout
        dist.barrier()


def _live(
    where: Places,
    scenario: Scenario,
    options: Mapping[str, Any],
    told: Told,
    point: str,
    victim: int | None,
    rank: int,
) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch complains of the dead there
    pids = _connect(where, rank)
    dies = victim is None or victim == rank
    ops = CountingOps(kill_at_point(point, pids if victim is None else None) if dies else None)
    scenario.act(Life(*where, ops, told, options, None, _AllRanks(), rank))
    try:
        _AllRanks().wait()  # rank 0 hosts what the others are told by: it leaves last
    except RuntimeError:
        pass  # the other one is dead


def _connect(where: Places, rank: int) -> list[int]:
    """Join the others; process ids by rank."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank),
        WORLD_SIZE=str(NUM_RANKS), LOCAL_WORLD_SIZE=str(NUM_RANKS),
    )  # fmt: skip
    dist.init_process_group(
        "gloo",
        init_method=f"file://{where.folder}/rendezvous",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=datetime.timedelta(seconds=20),
    )
    (Path(where.folder) / f"pid-{rank}").write_text(str(os.getpid()))
    dist.barrier()
    return [int((Path(where.folder) / f"pid-{r}").read_text()) for r in range(NUM_RANKS)]
