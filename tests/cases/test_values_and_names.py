"""Real bug reports of systems like this one, as tests of their kind: values, shapes, names and paths."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardstore import (
    SaveFailedError,
    ShardStoreError,
    SnapshotStore,
    StateMismatchError,
    TopologyMismatchError,
    UnsupportedStateError,
    list_snapshots,
)
from tests.faults.scenario import open_store
from tests.ranks import run_ranks


def _local(tensor: torch.Tensor) -> list[float]:
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        return [float(v) for v in tensor.to_local().reshape(-1)]


def _ranks_differ(rank: int, folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    shared = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    state: dict[str, Any] = {
        "t": torch.tensor([0.0, 1.0]) + 2 * rank,  # C03
        "experts": {"w": torch.full((2, 2), 10.0 + rank)},  # C04
        "layers": {"weight": torch.full((2 + rank, 2 + rank), float(rank))},  # C34
        "loader": {"pos": 100 + rank, "buf": torch.arange(3.0 + rank)},  # C54
        "shared": shared,
    }
    store = open_store(folder)
    store.save(state, step=1).wait(20)
    store.close()
    store = open_store(folder)
    for tensor in (state["t"], state["experts"]["w"], state["layers"]["weight"]):
        tensor.fill_(-1)
    with torch.no_grad():
        shared.to_local().fill_(-1)
    state["loader"]["pos"] = -1
    state["loader"]["buf"].fill_(-1)
    report = store.restore(state)
    store.close()
    return {
        "t": state["t"].tolist(),
        "w": state["experts"]["w"].unique().tolist(),
        "layer": (tuple(state["layers"]["weight"].shape), state["layers"]["weight"].max().item()),
        "pos": state["loader"]["pos"],
        "buf": state["loader"]["buf"].tolist(),
        "shared": _local(shared),
        "tier": report.tier,
    }


def test_values_that_differ_by_rank_come_back_to_their_rank(folder: str) -> None:
    """C03, C04, C34, C54."""
    results = run_ranks(2, _ranks_differ, folder)
    for rank, found in enumerate(results):
        assert found["t"] == [2.0 * rank, 2.0 * rank + 1]
        assert found["w"] == [10.0 + rank]
        assert found["layer"] == ((2 + rank, 2 + rank), float(rank))
        assert found["pos"] == 100 + rank
        assert found["buf"] == [float(i) for i in range(3 + rank)]
        assert found["shared"] == [[0.0, 1, 2], [3.0, 4, 5]][rank]
        assert found["tier"] == "root (2 ranks)"


def _wrong_global_shape(rank: int, folder: str) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    uneven = DTensor.from_local(torch.ones(3 - rank), mesh, [Shard(0)], run_check=False)
    store = open_store(folder)
    with pytest.raises(ShardStoreError) as caught:
        store.save({"uneven": uneven}, step=1).wait(20)
    with pytest.raises(SaveFailedError):
        store.drain()
    assert store.snapshots() == []
    store.close()
    return str(caught.value)


def test_a_tensor_whose_ranks_disagree_on_its_global_shape_is_refused(folder: str) -> None:
    """C06."""
    for text in run_ranks(2, _wrong_global_shape, folder):
        for named in ("uneven", "6", "4"):
            assert named in text


def _empty_shards(rank: int, folder: str) -> list[Any]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    sub_mesh = DeviceMesh("cpu", [0, 1])
    found = []
    store = open_store(folder)
    for step, size in enumerate((6, 5), start=1):
        tensor = distribute_tensor(torch.arange(float(size)), mesh, [Shard(0)])
        state: dict[str, Any] = {"w": tensor}
        if rank < 2:
            part = distribute_tensor(torch.arange(4.0), sub_mesh, [Shard(0)])
        else:
            part = DTensor.from_local(
                torch.zeros(0),
                sub_mesh,
                [Shard(0)],
                run_check=False,
                shape=torch.Size([4]),
                stride=(1,),
            )
        state["part"] = part
        store.save(state, step=step).wait(20)
        with torch.no_grad():
            for t in (tensor, part):
                t.to_local().fill_(-1)
        store.restore(state, step=step)
        found.append((_local(tensor), _local(part)))
    store.close()
    return found


def test_ranks_with_nothing_of_a_tensor_save_and_restore(folder: str) -> None:
    """C13, C14, C27."""
    results = run_ranks(4, _empty_shards, folder)
    assert [found[0][0] for found in results] == [[0, 1], [2, 3], [4, 5], []]
    assert [found[1][0] for found in results] == [[0, 1], [2, 3], [4], []]
    assert [found[0][1] for found in results] == [[0, 1], [2, 3], [], []]


def _replicas(rank: int, folder: str) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor = distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Shard(0)])
    store = open_store(folder)
    store.save({"w": tensor}, step=1).wait(20)
    with torch.no_grad():
        tensor.to_local().fill_(-1)
    store.restore({"w": tensor})
    store.close()
    return _local(tensor)


def test_replicated_and_sharded_axes_are_not_taken_for_each_other(folder: str) -> None:
    """C05, C26."""
    assert run_ranks(4, _replicas, folder) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


def test_dtype_is_never_cast(folder: str) -> None:
    """C01."""
    store = open_store(folder)
    store.save({"w": torch.tensor([1.2345678])}, step=1).wait()
    live = torch.full((1,), -1.0, dtype=torch.bfloat16)
    with pytest.raises(StateMismatchError) as caught:
        store.restore({"w": live})
    for named in ("w", "float32", "bfloat16"):
        assert named in str(caught.value)
    assert live.item() == -1
    store.close()


def test_odd_keys_come_back_and_stay_inside_the_folder(folder: str) -> None:
    """C39."""
    keys = ["a/b", "../x", "层.权重", "k" * 300, "", "Case", "case", "__metadata__", "a b\n"]
    state = {key: torch.full((2,), float(i)) for i, key in enumerate(keys)}
    store = open_store(folder)
    store.save(state, step=1).wait()
    before = {p for p in Path(folder).rglob("*") if p.is_file()}
    for tensor in state.values():
        tensor.fill_(-1)
    store.restore(state)
    assert [t.tolist() for t in state.values()] == [[float(i)] * 2 for i in range(len(keys))]
    assert all(len(p.name) <= 255 for p in before)
    (shard,) = Path(folder, "root").glob("step-*/rank-00000.safetensors")
    with safe_open(str(shard), "pt") as reader:
        assert len(reader.keys()) == len(keys)
    store.close()


@pytest.mark.parametrize(
    "name", ["with space", "a#b?c", "per%20cent", "p+lus", "ü", "trail/", "exp::1", "[glob]*"]
)
def test_legal_path_characters_are_taken_as_they_are(folder: str, name: str) -> None:
    """C41."""
    store = open_store(folder, root=name)
    store.save({"w": torch.ones(1)}, step=1).wait()
    assert (Path(folder) / name.rstrip("/")).is_dir()
    assert [info.step for info in list_snapshots(Path(folder) / name)] == [1]
    store.close()


def test_links_are_followed_at_the_root_only(folder: str) -> None:
    """C42."""
    real = Path(folder) / "real"
    real.mkdir()
    (Path(folder) / "root").symlink_to(real)
    outside = Path(folder) / "outside"
    outside.mkdir()
    (outside / "rank-00000.safetensors").write_text("precious")
    link = real / "step-000000000001.00000001-000001-00000000"
    link.symlink_to(outside)
    (real / "latest").symlink_to(real / "nowhere")
    store = open_store(folder, keep=1)
    for step in (2, 3):
        store.save({"w": torch.full((1,), float(step))}, step=step).wait()
    store.drain()
    assert [info.step for info in store.snapshots()] == [3]
    assert (outside / "rank-00000.safetensors").read_text() == "precious"
    store.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("wrap", ["compile", "data parallel", "compiled inside"])
def test_wrappers_are_transparent_in_both_directions(folder: str, wrap: str) -> None:
    """C35, C36."""

    def wrapped(model: Any) -> Any:
        if wrap == "compile":
            return torch.compile(model)
        if wrap == "data parallel":
            return nn.DataParallel(model)
        inner: Any = torch.compile(model[0])
        return nn.Sequential(inner, model[1])

    first, second = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)) for _ in range(2))
    store = open_store(folder)
    store.save({"model": wrapped(first)}, step=1).wait()
    store.restore({"model": second})
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    store.save({"model": first}, step=2).wait()
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.zero_()
    store.restore({"model": wrapped(second)})
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    store.close()


def test_every_file_replaced_by_a_pickle_runs_nothing(folder: str) -> None:
    """C116."""
    marker = Path(folder) / "marker"
    bomb = b"cposix\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    store = open_store(folder, memory=0)
    store.save({"w": torch.ones(2)}, step=1).wait()
    store.close()
    for name in ("rank-00000.safetensors", "manifest.json"):
        copy = Path(folder) / f"copy-{name}"
        shutil.copytree(Path(folder) / "root", copy)
        next(copy.glob(f"step-*/{name}")).write_bytes(bomb)
        with SnapshotStore(copy, memory=0) as broken, pytest.raises(ShardStoreError):
            broken.restore({"w": torch.zeros(2)})
    assert not marker.exists()
    package = Path(__file__).parents[2] / "shardstore"
    for source in package.rglob("*.py"):
        text = source.read_text()
        assert "import pickle" not in text
        assert "torch.load(" not in text


def test_a_moved_root_restores_and_the_old_place_stays_gone(folder: str) -> None:
    """C118."""
    store = open_store(folder)
    store.save({"w": torch.arange(3.0)}, step=1).wait()
    store.close()
    moved = Path(folder) / "other parent" / "b"
    moved.parent.mkdir()
    (Path(folder) / "root").rename(moved)
    text = next(moved.glob("step-*/manifest.json")).read_text()
    assert folder not in text
    live = {"w": torch.zeros(3)}
    with SnapshotStore(moved, memory="1MiB", memory_dir=folder) as store:
        assert store.restore(live).step == 1
        store.save(live, step=2).wait()
    assert live["w"].tolist() == [0, 1, 2]
    assert [info.step for info in list_snapshots(moved)] == [1, 2]
    assert not (Path(folder) / "root").exists()


def test_retention_goes_by_order_of_saves_not_by_time_or_text(folder: str) -> None:
    """C113, C114."""
    store = open_store(folder, keep=2)
    (Path(folder) / "root").mkdir()
    (Path(folder) / "root" / "step_abc").mkdir()
    for step in (9000, 9900, 10000):
        store.save({"w": torch.ones(1)}, step=step).wait()
        for path in Path(folder, "root").rglob("*"):
            os.utime(path, (2_145_916_800 - step, 2_145_916_800 - step))
    store.drain()
    assert [info.step for info in store.snapshots()] == [9900, 10000]
    assert (Path(folder) / "root" / "step_abc").is_dir()
    store.close()


def test_modes_follow_the_umask(folder: str) -> None:
    """C92."""
    before = os.umask(0o007)
    try:
        store = open_store(folder, memory=0)
        store.save({"w": torch.ones(1)}, step=1).wait()
        store.close()
    finally:
        os.umask(before)
    for path in Path(folder, "root").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o770 if path.is_dir() else 0o660), path


def test_a_small_view_of_a_large_buffer_stores_the_view_only(folder: str) -> None:
    """C19."""
    store = open_store(folder)
    info = store.save({"v": torch.zeros(1_000_000)[10:14]}, step=1).wait()
    assert info is not None
    assert info.nbytes < 8192
    store.close()


def test_partial_placements_and_subclasses_are_refused(folder: str) -> None:
    """C23."""

    class Quantized(torch.Tensor):
        pass

    store = open_store(folder)
    with pytest.raises(UnsupportedStateError, match="Quantized"):
        store.save({"q": torch.ones(2).as_subclass(Quantized)}, step=1)
    store.close()


def test_errors_of_topology_are_state_mismatches() -> None:
    assert issubclass(TopologyMismatchError, StateMismatchError)
    assert dist.is_available()
