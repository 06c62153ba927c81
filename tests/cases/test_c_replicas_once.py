"""Replicas stored once (C26), and what must never be taken for a replica (C03, C05)."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardstore import CoordinationError, SnapshotStore, list_snapshots
from tests.cases.bits import Outcomes, Refusal, assert_refused, bits, local_of, refusal, soil
from tests.cli.conftest import run_json
from tests.faults.scenario import open_store

NUM_RANKS = 4
READER = getattr(dcp, "HuggingFaceStorageReader", None)
TENSOR_BYTES = 4096


def _hybrid_mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard"))


def _save(folder: str, state: dict[str, Any], *, step: int = 1, **options: Any) -> None:
    with open_store(folder, replicas="once", **options) as store:
        store.save(state, step=step).wait(20)


def _restores(folder: str, state: dict[str, Any], **options: Any) -> bool:
    """Whether a new store, which has nothing near it, fills the state with what it has now."""
    saved = bits(state)
    soil(state)
    with open_store(folder, **{"memory": 0, **options}) as store:
        store.restore(state)
    return bits(state) == saved


def _refused(folder: str, state: dict[str, Any]) -> Refusal:
    with open_store(folder, memory=0) as store:
        return refusal(lambda: store.restore(state), state)


def _root_file(folder: str, rank: int, step: int = 1) -> Path:
    return next(Path(folder, "root").glob(f"step-{step:012d}*/rank-{rank:05d}.safetensors"))


def _manifest(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        next(Path(folder, "root").glob("step-*/manifest.json")).read_text()
    )
    return found


def _stored_bytes(folder: str, step: int = 1) -> list[int]:
    """Bytes of tensors in each rank's file on the root."""
    files = [_root_file(folder, rank, step).read_bytes() for rank in range(NUM_RANKS)]
    return [len(data) - 8 - int.from_bytes(data[:8], "little") for data in files]


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink()


def _on_rank_0(act: Callable[[], object]) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        act()
    dist.barrier()


def _lost_files(rank: int, folder: str) -> dict[str, Any]:
    state: dict[str, Any] = {
        "w": distribute_tensor(torch.arange(4.0), _hybrid_mesh(), [Replicate(), Shard(0)]),
        "note": "equal on all ranks",
    }
    _save(folder, state)
    found: dict[str, Any] = {
        "locals": local_of(state["w"]).tolist(),
        "stored": _stored_bytes(folder),
        "manifest": _manifest(folder),
        "equal": _restores(folder, state),
    }
    spare = [r for r, nbytes in enumerate(found["stored"]) if nbytes == 0]
    _on_rank_0(lambda: _unlink(_root_file(folder, r) for r in spare))
    found["listed"] = [info.step for info in list_snapshots(Path(folder, "root"))]
    found["equal without spare"] = _restores(folder, state)
    found["equal with slots"] = _restores(folder, state, memory="64MiB", name="other")
    _on_rank_0(lambda: _root_file(folder, 0).unlink())
    found["listed without writer"] = list_snapshots(Path(folder, "root"))
    found["refused"] = _refused(folder, state)
    return found


def _never_shared(rank: int, folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    equal = torch.full((TENSOR_BYTES // 4,), 7.0)
    state: dict[str, Any] = {
        "t": torch.tensor([2.0 * rank, 2.0 * rank + 1]),
        "equal": equal,
        "w": distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Shard(0)]),
        "mine": distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Shard(0)]),
        "rank": rank,
    }
    _save(folder, state)
    stored = _stored_bytes(folder)
    result: dict[str, Any] = {"w": local_of(state["w"]).tolist(), "stored": stored}
    result["equal"] = _restores(folder, state)
    _on_rank_0(lambda: _root_file(folder, 3).unlink())
    result["refused"] = _refused(folder, state)
    return result


def _many(mesh: Any, placements: list[Any], num: int, numel: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(num)
    return {
        str(i): distribute_tensor(torch.randn(numel, generator=generator), mesh, placements)
        for i in range(num)
    }


def _balanced(rank: int, folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = {
        "sharded": _many(mesh, [Replicate(), Shard(0)], 31, TENSOR_BYTES // 2),
        "norms": _many(mesh, [Replicate(), Replicate()], 8, TENSOR_BYTES // 4),
        "odd": _many(mesh, [Replicate(), Shard(0)], 3, 7),
        "halves": _many(mesh, [Shard(0), Replicate()], 6, TENSOR_BYTES // 2),
        "none": distribute_tensor(torch.zeros(0, 3), mesh, [Replicate(), Shard(0)]),
    }
    own = sum(local_of(t).nbytes for part in state.values() for t in _tensors(part))
    _save(folder, state)
    stored = _stored_bytes(folder)
    equal = [_restores(folder, state), _restores(folder, state, memory="64MiB", name="other")]
    damaged = _root_file(folder, 1)

    def flip() -> None:
        data = bytearray(damaged.read_bytes())
        data[-1] ^= 1
        damaged.write_bytes(data)

    _on_rank_0(flip)
    return {
        "own": own, "stored": stored, "equal": equal, "refused": _refused(folder, state),
        "file": damaged.name,
    }  # fmt: skip


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    yield from value.values() if isinstance(value, dict) else (value,)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                found.append(record.getMessage())

    found: list[str] = []
    handler = Keeper()
    logging.getLogger("shardstore").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("shardstore").removeHandler(handler)


def _diverged(rank: int, folder: str) -> dict[str, Any]:
    mesh = _hybrid_mesh()
    equal = distribute_tensor(torch.arange(2048.0), mesh, [Replicate(), Shard(0)])
    drifted = torch.arange(1024.0) + (rank == 2)
    state = {
        "equal": equal,
        "drifted": DTensor.from_local(drifted, mesh, [Replicate(), Shard(0)], run_check=False),
    }
    with _warnings() as found:
        _save(folder, state)
        with open_store(folder, replicas="once", name="second") as store:
            for step in (2, 3):
                store.save(state, step=step).wait(20)
    return {"warned": found, "stored": _stored_bytes(folder, 3), "equal": _restores(folder, state)}


def _mixed_tiers(rank: int, folder: str) -> dict[str, Any]:
    state = {
        "w": _many(_hybrid_mesh(), [Replicate(), Shard(0)], 9, 512),
        "mine": torch.full((64,), float(rank)),
    }
    with open_store(folder, replicas="once") as store:
        store.save(state, step=1).wait(20)
        store.close(keep_memory=True)
    memory = sorted(Path(folder).rglob("memory*/**/rank-*.safetensors"))
    near = sum(path.stat().st_size for path in memory)
    _on_rank_0(lambda: _unlink(path for path in memory if "rank-00000" not in path.name))
    saved = bits(state)
    soil(state)
    with open_store(folder, replicas="once") as store:
        report = store.restore(state)
    return {"tier": report.tier, "equal": bits(state) == saved, "near": near}


def _by_disk(rank: int, folder: str) -> dict[str, Any]:
    disk = Path(tempfile.gettempdir(), Path(folder).parent.name)
    state = {"w": _many(_hybrid_mesh(), [Replicate(), Shard(0)], 9, 512)}
    _save(folder, state, disk=disk)
    equal = _restores(folder, state, disk=disk)
    stored = _stored_bytes(folder)
    files = sorted(disk.rglob("rank-*.safetensors"))
    on_disk = [path.stat().st_size for path in files]
    dist.barrier()
    shutil.rmtree(disk, ignore_errors=True)
    on_root = [_root_file(folder, r).stat().st_size for r in range(NUM_RANKS)]
    return {
        "equal": [equal, _restores(folder, state, name="elsewhere")],
        "stored": stored, "on_disk": on_disk, "on_root": on_root,
    }  # fmt: skip


def _other_saves_file(rank: int, folder: str) -> dict[str, Any]:
    """The holder's file is swapped for that of a save with equal shapes and other values."""
    mesh = _hybrid_mesh()
    state = {"w": distribute_tensor(torch.zeros(64), mesh, [Replicate(), Shard(0)])}
    with open_store(folder, replicas="once") as store:
        store.save(state, step=1).wait(20)
        with torch.no_grad():
            local_of(state["w"]).fill_(1.0)
        store.save(state, step=2).wait(20)
    newer, older = _root_file(folder, 0, 2), _root_file(folder, 0, 1)
    _on_rank_0(lambda: newer.write_bytes(older.read_bytes()))
    soil(state)
    with open_store(folder, memory=0) as store:
        report = store.restore(state)
    return {"step": report.step, "values": set(local_of(state["w"]).tolist())}


def _not_committed(rank: int, folder: str) -> dict[str, Any]:
    """The run died before the manifest: the headers tell, and the next run commits it."""
    state: dict[str, Any] = {
        "w": _many(_hybrid_mesh(), [Replicate(), Shard(0)], 9, 512),
        "rank": rank,
    }
    _save(folder, state)
    manifest = next(Path(folder, "root").glob("step-*/manifest.json"))
    before = json.loads(manifest.read_text())
    dist.barrier()
    _on_rank_0(manifest.unlink)
    equal = _restores(folder, state)
    with torch.no_grad():
        local_of(state["w"]["3"]).view(torch.uint8).bitwise_not_()
    with open_store(folder, replicas="once", name="next") as store:
        store.save(state, step=2).wait(20)
    after = json.loads(manifest.read_text())
    for one in (before, after):
        one.pop("created")
        one.pop("digest")
    return {"equal": equal, "same": before == after, "again": _restores(folder, state)}


def _streamed(rank: int, folder: str) -> dict[str, Any]:
    """Rank 1 has no memory: its file is whole, the others leave pieces to it as ever."""
    state = {"w": _many(_hybrid_mesh(), [Replicate(), Shard(0)], 9, 512)}
    with _warnings() as found:
        _save(folder, state, memory=0)
    whole = _stored_bytes(folder)
    with open_store(folder, replicas="once", memory="4KiB" if rank == 1 else "64MiB") as store:
        store.save(state, step=2).wait(20)
    return {
        "whole": whole, "mixed": _stored_bytes(folder, 2), "equal": _restores(folder, state),
        "warned": sum("saves nothing" in text for text in found),
    }  # fmt: skip


def _spare(rank: int, folder: str) -> None:
    """A root for the commands, in which ranks 2 and 3 have nothing of their own."""
    _save(
        folder, {"w": distribute_tensor(torch.arange(4.0), _hybrid_mesh(), [Replicate(), Shard(0)])}
    )


def _arguments(rank: int, folder: str) -> list[str]:
    found = []
    root = f"{folder}/root"
    tried: list[tuple[str | None, Any]] = [
        (root, "twice"), (None, "once"), (root, "once" if rank == 1 else "all"),
    ]  # fmt: skip
    for place, replicas in tried:
        try:
            SnapshotStore(place, replicas=replicas, memory="8MiB", timeout_s=20)
        except (ValueError, CoordinationError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


_CASES = (
    _lost_files, _never_shared, _balanced, _diverged, _mixed_tiers, _by_disk, _other_saves_file,
    _not_committed, _streamed, _spare, _arguments,
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(shared_folder: str) -> Outcomes:
    return Outcomes(NUM_RANKS, shared_folder, *_CASES)


def test_a_lost_file_matters_only_if_it_was_written_to(outcomes: Outcomes) -> None:
    """C26."""
    results = outcomes.of(_lost_files)
    assert [r["locals"] for r in results] == [[0, 1], [2, 3], [0, 1], [2, 3]]
    for result in results:
        (table,) = result["manifest"]["tables"].values()
        assert [p["type"] for p in table[0]["placements"]] == ["Replicate", "Shard"]
        assert result["manifest"]["meshes"][0]["axis_names"] == ["rep", "shard"]
        assert result["manifest"]["replicas"] == "once"
        assert sum(result["stored"]) == 16
        assert result["equal"]
        assert result["listed"] == [1]
        assert result["equal without spare"]
        assert result["equal with slots"]
        assert result["listed without writer"] == []
    assert_refused([r["refused"] for r in results], "rank-00000.safetensors")


def test_plain_tensors_are_each_ranks_own_however_equal(outcomes: Outcomes) -> None:
    """C03, C05."""
    results = outcomes.of(_never_shared)
    assert [r["w"] for r in results] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
    for result in results:
        assert result["equal"]
        assert min(result["stored"]) > TENSOR_BYTES
        assert sum(result["stored"]) == 4 * (8 + TENSOR_BYTES + 8) + 32
    assert_refused([r["refused"] for r in results], "rank-00003.safetensors")


def test_replicas_write_in_turn_and_every_byte_is_stored_once(outcomes: Outcomes) -> None:
    results = outcomes.of(_balanced)
    result = results[0]
    once = sum(r["own"] for r in results) - 4 * 8 * TENSOR_BYTES  # norms, four times
    assert sum(result["stored"]) == once // 2 + 8 * TENSOR_BYTES
    assert max(result["stored"]) - min(result["stored"]) <= 2 * TENSOR_BYTES
    assert all(r["equal"] == [True, True] for r in results)
    assert_refused([r["refused"] for r in results], result["file"], "damaged")


def test_replicas_that_differ_are_stored_each_and_told_of_once(outcomes: Outcomes) -> None:
    results = outcomes.of(_diverged)
    assert all(r["equal"] for r in results)
    assert results[0]["stored"] == [8192, 6144, 8192, 6144] or sum(results[0]["stored"]) == 24576
    told = [text for r in results for text in r["warned"] if "replicas" in text]
    assert len(told) == 2, told  # one for each store
    assert "drifted" in told[0]
    assert "equal," not in told[0]
    assert "ranks 0, 2" in told[0]


def test_ranks_that_lost_their_memory_restore_from_the_root(outcomes: Outcomes) -> None:
    results = outcomes.of(_mixed_tiers)
    assert all(r["equal"] for r in results)
    assert results[0]["tier"] == "memory (1 rank), root (3 ranks)"


def test_disks_hold_whole_files(outcomes: Outcomes) -> None:
    for result in outcomes.of(_by_disk):
        assert result["equal"] == [True, True]
        assert sum(result["stored"]) == 9 * 512 * 4
        assert sum(result["on_disk"]) == sum(result["on_root"]) + 9 * 512 * 4


def test_commands_and_other_readers_find_every_tensor(
    outcomes: Outcomes, shared_folder: str
) -> None:
    """Of a root with steps 1 and 2: verify, show, diff; and what has lost a file that nobody needs."""
    outcomes.of(_not_committed)
    root = Path(shared_folder, "not_committed", "root")
    document = run_json("verify", root)
    assert [found["ok"] for found in document["snapshots"]] == [True, True]
    stored = sum(path.stat().st_size for path in root.glob("step-*1.*/rank-*"))
    assert document["snapshots"][0]["nbytes"] == stored
    shown = run_json("show", root, "--step", 1)
    assert shown["ok"]
    assert {tensor["nbytes"] for tensor in shown["tensors"]} == {2048}
    (differing,) = run_json("diff", root, 1, 2, code=1)["tensors"]
    assert (differing["name"], differing["differing_bytes"]) == ("w.3", 2 * 2048)
    lost = Path(shared_folder, "lost")
    shutil.copytree(Path(shared_folder, "spare", "root"), lost)
    (folder,) = lost.glob("step-*")
    (folder / "rank-00002.safetensors").unlink()
    assert run_json("show", lost, "--step", 1)["state"] == "committed"
    (found,) = run_json("verify", lost, code=1)["snapshots"]
    assert "a restore does without it" in found["findings"][0]["problem"]
    (folder / "rank-00000.safetensors").unlink()
    assert run_json("show", lost, "--step", 1, code=1)["state"] == "damaged"


@pytest.mark.skipif(READER is None, reason="this torch has no public safetensors reader")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_checkpoint_reader_loads_the_folder(outcomes: Outcomes, shared_folder: str) -> None:
    outcomes.of(_not_committed)
    (folder,) = Path(shared_folder, "not_committed", "root").glob("step-*1.*")
    tensors = {str(i): torch.zeros(512) for i in range(9)}
    assert READER is not None
    load({"w": tensors}, storage_reader=READER(str(folder)), no_dist=True)
    generator = torch.Generator().manual_seed(9)
    assert all(torch.equal(t, torch.randn(512, generator=generator)) for t in tensors.values())


def test_a_holders_file_of_another_save_is_never_read(outcomes: Outcomes) -> None:
    for result in outcomes.of(_other_saves_file):
        assert result == {"step": 1, "values": {0.0}}


def test_headers_are_enough_to_commit_it_late(outcomes: Outcomes) -> None:
    for result in outcomes.of(_not_committed):
        assert result == {"equal": True, "same": True, "again": True}


def test_what_is_streamed_is_whole_and_others_leave_pieces_to_it(outcomes: Outcomes) -> None:
    results = outcomes.of(_streamed)
    for result in results:
        assert result["equal"]
        assert result["whole"] == [9 * 1024] * 4
        assert result["mixed"][1] == 9 * 1024
        assert sum(result["mixed"]) in (9 * 2048 + 4 * 1024, 9 * 2048 + 5 * 1024)
        assert result["warned"] == 1


def test_wrong_or_differing_arguments_are_refused(outcomes: Outcomes) -> None:
    for wrong, without_root, differing in outcomes.of(_arguments):
        assert "replicas must be" in wrong
        assert "needs a root" in without_root
        assert "replicas is 'all' on rank 0 and 'once' on rank 1" in differing
