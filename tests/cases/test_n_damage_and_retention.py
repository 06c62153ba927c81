"""What damage in one tier, or under one rank, means for retention and listing (C09, C74, C112)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases.bits import Outcomes, bits, soil
from tests.faults.scenario import Job, open_store


def _flip(path: Path, offset: int) -> None:
    """Flip a bit in place, as the medium would."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def _payload(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little") + 5


@pytest.mark.parametrize("part", ["header", "payload"])
def test_a_damaged_copy_in_memory_does_not_exempt_the_good_one_on_disk_from_retention(
    folder: str, part: str
) -> None:
    """C09, C112: the snapshot is whole on the root, so it counts for keep and goes in its turn."""
    store = open_store(folder, keep=1)
    live: dict[str, Any] = {"w": torch.arange(6.0)}
    store.save(live, step=1).wait()
    store.drain()
    saved = bits(live)
    copy = next(Path(folder, "memory").rglob("rank-00000.safetensors"))
    _flip(copy, 200 if part == "header" else _payload(copy))
    soil(live)
    assert store.restore(live).tier == "root (1 rank)"
    assert bits(live) == saved
    for step in (2, 3):
        store.save(live, step=step).wait()
    store.drain()
    assert [info.step for info in store.snapshots()] == [3]
    store.close()


def _damage_under_rank_1(rank: int, folder: str) -> dict[str, Any]:
    store = open_store(folder, memory=0, keep=2)
    job = Job(rank)
    for step in (1, 2):
        job.fill(step)
        store.save(job.state, step=step).wait(20)
    store.drain()
    store.close()
    torch.distributed.barrier()
    if rank == 1:
        shard = max(Path(folder, "root").glob("step-*/rank-00001.safetensors"))
        _flip(shard, _payload(shard))
    torch.distributed.barrier()
    store = open_store(folder, memory=0, keep=2)
    restored = store.restore(job.state).step
    job.fill(3)
    store.save(job.state, step=3).wait(20)
    store.drain()
    torch.distributed.barrier()
    left = {info.step for info in store.snapshots()}
    store.close()
    return {"restored": restored, "left": left}


@pytest.fixture(scope="module")
def outcomes(shared_folder: str) -> Outcomes:
    return Outcomes(2, shared_folder, _damage_under_rank_1)


def test_a_snapshot_found_damaged_under_another_rank_does_not_count_for_keep(
    outcomes: Outcomes,
) -> None:
    """C112: two good ones are to be kept, and the damaged one is none of them."""
    for found in outcomes.of(_damage_under_rank_1):
        assert found["restored"] == 1
        assert {1, 3} <= found["left"], "the only other good snapshot was deleted"


def test_what_is_listed_is_what_a_restore_would_take(folder: str) -> None:
    """C74: after damage to the newest manifest, listing and restore say the same."""
    live: dict[str, Any] = {"w": torch.arange(6.0)}
    store = open_store(folder)
    for step in (1, 2):
        store.save(live, step=step).wait()
    store.close(keep_memory=True)
    _flip(next(Path(folder, "root").glob("step-000000000002.*/manifest.json")), 150)
    store = open_store(folder)
    listed = [info.step for info in store.snapshots()]
    restored = store.restore(live).step
    store.close()
    assert listed[-1] == restored
