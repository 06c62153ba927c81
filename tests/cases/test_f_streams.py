"""Real bug reports on random streams, data positions and saving again (C53 to C56)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from shardstore import RNGState
from tests.cases.bits import Outcomes, bits, soil
from tests.faults.scenario import Job, open_store


def _streams(rank: int, folder: str) -> dict[str, Any]:
    """Streams of each rank go on where they were; leaves and lengths are the rank's own."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)

    def draw() -> list[float]:
        return [torch.rand(()).item(), random.random(), float(np.random.random())]

    for _ in range(3 + rank):
        draw()
    state: dict[str, Any] = {
        "rng": RNGState(),
        "loader": {"pos": 100 + rank, "buf": torch.arange(3.0 + rank)},
    }
    store = open_store(folder)
    store.save(state, step=1).wait(20)
    expected = draw()
    store.close()
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    state["loader"] = {"pos": -1, "buf": torch.full((3 + rank,), -1.0)}
    store = open_store(folder)
    store.restore(state)
    store.close()
    return {
        "expected": expected,
        "drawn": draw(),
        "pos": state["loader"]["pos"],
        "buf": state["loader"]["buf"].tolist(),
    }


def _save_right_after_restore(rank: int, folder: str) -> dict[str, Any]:
    store = open_store(folder)
    job = Job(rank)
    job.fill(1)
    store.save(job.state, step=1).wait(20)
    soil(job.state)
    store.restore(job.state, step=1)
    store.save(job.state, step=2).wait(20)
    other = Job(rank)
    soil(other.state)
    store.restore(other.state, step=2)
    store.close()
    return {
        "equal": bits(other.state) == bits(job.state),
        "values": other.progress == {"step": 1, "history": [0.5]},
        "seen": other.steps_seen(),
    }


@pytest.fixture(scope="module")
def outcomes(shared_folder: str) -> Outcomes:
    return Outcomes(2, shared_folder, _streams, _save_right_after_restore)


def test_each_rank_goes_on_with_its_own_random_streams(outcomes: Outcomes) -> None:
    """C53."""
    results = outcomes.of(_streams)
    for found in results:
        assert found["drawn"] == found["expected"]
    assert results[0]["drawn"] != results[1]["drawn"]


def test_each_rank_gets_its_own_loader_position_and_length(outcomes: Outcomes) -> None:
    """C54."""
    for rank, found in enumerate(outcomes.of(_streams)):
        assert found["pos"] == 100 + rank
        assert found["buf"] == [float(i) for i in range(3 + rank)]


def test_saving_right_after_a_restore_stores_the_same(outcomes: Outcomes) -> None:
    """C56."""
    for found in outcomes.of(_save_right_after_restore):
        assert found == {"equal": True, "values": True, "seen": {1}}
