"""Arguments that make no sense, on all ranks or on one: the same end everywhere, and the store goes on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardstore import SaveFailedError, ShardStoreError, SnapshotStore
from tests.cases.bits import Outcomes, assert_group_works
from tests.faults.scenario import open_store

BAD_STEPS: list[Any] = [1.5, "7", -1, 10**18, True, None]


def _error_of(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except (ShardStoreError, ValueError) as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


def _goes_on(store: SnapshotStore, state: dict[str, torch.Tensor], step: int) -> list[int]:
    """Save and restore once more, and close; returns what was listed."""
    assert_group_works()
    state["w"].fill_(step)
    try:
        handle = store.save(state, step=step)
    except SaveFailedError:  # of before; this one is taken
        handle = None
    if handle is not None:
        assert handle.wait(20) is not None
    store.drain()
    state["w"].fill_(-1)
    assert store.restore(state).step == step
    assert set(state["w"].tolist()) == {step}
    listed = [info.step for info in store.snapshots()]
    store.close()
    return listed


def all_give_bad_steps(rank: int, folder: str) -> dict[str, Any]:
    store = open_store(folder)
    state = {"w": torch.ones(10)}
    found = []
    for step in BAD_STEPS:
        found.append(_error_of(partial(store.save, state, step=step)))
        if step is not None:
            found.append(_error_of(partial(store.restore, state, step=step)))
        found.append(_error_of(partial(store.delete, step)))
    store.drain()
    return {"found": found, "listed": _goes_on(store, state, 3), "same": set(state["w"].tolist())}


def one_saves_a_bad_step(rank: int, folder: str) -> dict[str, Any]:
    store = open_store(folder)
    state = {"w": torch.ones(10)}
    store.save(state, step=1).wait(20)
    mine = _error_of(lambda: store.save(state, step="two" if rank == 1 else 2))  # type: ignore[arg-type]
    _error_of(store.drain)
    return {"mine": mine, "listed": _goes_on(store, state, 3)}


def one_restores_a_bad_step(rank: int, folder: str) -> dict[str, Any]:
    store = open_store(folder)
    state = {"w": torch.ones(10)}
    store.save(state, step=1).wait(20)
    state["w"].fill_(7)
    mine = _error_of(lambda: store.restore(state, step=-5 if rank == 1 else 1))
    kept = set(state["w"].tolist())
    return {"mine": mine, "kept": kept, "listed": _goes_on(store, state, 3)}


def one_gives_bad_metadata(rank: int, folder: str) -> dict[str, Any]:
    store = open_store(folder)
    state = {"w": torch.ones(10)}
    mine = _error_of(lambda: store.save(state, step=1, metadata={"a": {1}} if rank == 0 else None))
    _error_of(store.drain)
    return {"mine": mine, "listed": _goes_on(store, state, 3)}


def root_is_a_file(rank: int, folder: str) -> dict[str, Any]:
    file = Path(folder) / "root"
    if rank == 0:
        file.write_text("mine")
    dist.barrier()
    found = {"mine": _error_of(lambda: open_store(folder))}
    dist.barrier()
    assert file.read_text() == "mine"
    return found


def memory_dir_is_a_file_for_one(rank: int, folder: str) -> dict[str, Any]:
    own = Path(folder) / f"memory-{rank}"
    if rank == 1:
        own.write_text("mine")
    else:
        own.mkdir()
    found = {
        "mine": _error_of(
            lambda: SnapshotStore(
                Path(folder) / "root", memory="1MiB", memory_dir=own, timeout_s=20
            )
        )
    }
    dist.barrier()
    state = {"w": torch.ones(10)}
    return found | {"listed": _goes_on(open_store(folder), state, 3)}


def memory_dir_is_missing_for_one(rank: int, folder: str) -> dict[str, Any]:
    """With a root all go on; without one nobody can."""
    own = Path(folder) / f"memory-{rank}"
    if rank == 0:
        own.mkdir()
    alone = _error_of(
        lambda: SnapshotStore(name="alone", memory="1MiB", memory_dir=own, timeout_s=20)
    )
    dist.barrier()
    state = {"w": torch.ones(10)}
    root = Path(folder) / "root"
    listed = _goes_on(SnapshotStore(root, memory="1MiB", memory_dir=own, timeout_s=20), state, 3)
    dist.barrier()
    again = SnapshotStore(root, memory="1MiB", memory_dir=own, timeout_s=20)
    state["w"].fill_(-1)
    report = again.restore(state)
    again.close()
    return {"alone": alone, "listed": listed, "step": report.step, "tier": report.tier}


CASES = (all_give_bad_steps, one_saves_a_bad_step, one_restores_a_bad_step, one_gives_bad_metadata,
         root_is_a_file, memory_dir_is_a_file_for_one, memory_dir_is_missing_for_one)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes() -> Iterator[Outcomes]:
    with tempfile.TemporaryDirectory(prefix="shardstore-test-", dir="/dev/shm") as folder:
        yield Outcomes(2, folder, *CASES, timeout_s=100.0)


def test_the_same_bad_step_on_all_ranks_is_the_same_value_error_at_every_call(
    outcomes: Outcomes,
) -> None:
    one, other = outcomes.of(all_give_bad_steps)
    assert one == other
    assert {kind for kind, _ in one["found"]} == {"ValueError"}
    assert all("step must be" in text for _, text in one["found"])
    assert one["listed"] == [3]


def test_a_bad_step_of_one_rank_fails_that_save_alone(outcomes: Outcomes) -> None:
    one, other = outcomes.of(one_saves_a_bad_step)
    assert other["mine"] == ["ValueError", "step must be an integer, got 'two' (str)"]
    assert one["mine"][0] in ("none", "SaveFailedError")
    assert one["listed"] == other["listed"] == [1, 3]


def test_a_bad_step_of_one_rank_is_told_at_the_restore_of_all(outcomes: Outcomes) -> None:
    one, other = outcomes.of(one_restores_a_bad_step)
    assert other["mine"][0] == "ValueError"
    assert one["mine"][0] == "CoordinationError"
    assert "rank 1: ValueError: step must be at least 0" in one["mine"][1]
    for found in (one, other):
        assert (found["kept"], found["listed"]) == ({7}, [1, 3])


def test_bad_metadata_of_one_rank_fails_that_save_alone(outcomes: Outcomes) -> None:
    one, other = outcomes.of(one_gives_bad_metadata)
    assert one["mine"][0] == "UnsupportedStateError"
    assert "metadata.a" in one["mine"][1]
    assert one["listed"] == other["listed"] == [3]


def test_a_root_that_is_a_file_is_a_tier_error_on_all(outcomes: Outcomes) -> None:
    for found in outcomes.of(root_is_a_file):
        assert found["mine"][0] == "TierError"
        assert "is a file" in found["mine"][1]


def test_a_memory_dir_that_is_a_file_for_one_rank_ends_the_opening_of_all(
    outcomes: Outcomes,
) -> None:
    one, other = outcomes.of(memory_dir_is_a_file_for_one)
    assert other["mine"][0] == "TierError"
    assert one["mine"][0] == "CoordinationError"
    for found in (one, other):
        assert "memory-1 is a file" in found["mine"][1]
        assert found["listed"] == [3]
    assert "rank 1" in one["mine"][1]


def test_a_memory_dir_that_is_missing_for_one_rank_ends_nothing_if_there_is_a_root(
    outcomes: Outcomes,
) -> None:
    one, other = outcomes.of(memory_dir_is_missing_for_one)
    assert (one["alone"][0], other["alone"][0]) == ("CoordinationError", "TierError")
    for found in (one, other):
        assert "memory-1 does not exist" in found["alone"][1]
        assert (found["listed"], found["step"], found["tier"]) == ([3], 3, "root (2 ranks)")
