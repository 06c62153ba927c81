"""`shardstore diff`: counted against NumPy on the stored bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardstore import SnapshotStore
from shardstore.cli.app import cli
from shardstore.format.digests import digest_around
from tests.cli.conftest import Roots, flip_byte, run, run_json, snapshot
from tests.ranks import run_ranks

Copy = Callable[[Path], Path]


def save(root: Path, step: int, state: dict[str, Any], metadata: object = None) -> None:
    with SnapshotStore(root, memory=0) as store:
        store.save(state, step=step, metadata=metadata).wait(20)


def start_of(tensor: str, file: Path) -> int:
    data = file.read_bytes()
    num_header = int.from_bytes(data[:8], "little")
    start: int = json.loads(data[8 : 8 + num_header])[tensor]["data_offsets"][0]
    return 8 + num_header + start


def test_snapshot_equals_itself(roots: Roots) -> None:
    document = run_json("diff", roots.two, "10", "10")
    assert set(document) == {
        "command", "a", "b", "equal", "num_equal_tensors", "topology", "tensors", "leaves", "metadata",
    }  # fmt: skip
    assert document["equal"] is True
    assert document["tensors"] == document["leaves"] == document["metadata"] == []
    assert run("diff", roots.two, "10", "10").stdout.splitlines()[-1].startswith("equal: ")


def test_differing_bytes_are_counted_tensor_by_tensor(roots: Roots) -> None:
    document = run_json("diff", roots.one, "100", "300", code=1)
    assert [(t["name"], t["kind"]) for t in document["tensors"]] == [("model.weight", "bytes")]
    assert 0 < document["tensors"][0]["differing_bytes"] <= 4
    assert document["tensors"][0]["total_bytes"] == 256
    assert document["leaves"] == [{"path": "progress.step", "a": "100", "b": "300", "ranks": [0]}]
    assert document["metadata"] == [{"path": "step", "a": "100", "b": "300", "ranks": []}]
    text = run("diff", roots.one, "100", "300", code=1).stdout
    assert "1 tensor differs" in text


def test_count_is_that_of_the_bytes(folder: str) -> None:
    root = Path(folder) / "root"
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(0, 4, (3_000_017,), dtype=torch.uint8, generator=generator)
    b = torch.randint(0, 4, (3_000_017,), dtype=torch.uint8, generator=generator)
    save(root, 1, {"x": a, "same": a})
    save(root, 2, {"x": b, "same": a})
    (tensor,) = run_json("diff", root, "1", "2", code=1)["tensors"]
    assert tensor["differing_bytes"] == int((a != b).sum())
    assert tensor["total_bytes"] == 3_000_017


def test_names_shapes_and_dtypes_are_compared_before_bytes(folder: str) -> None:
    root = Path(folder) / "root"
    save(root, 1, {"gone": torch.ones(2), "shape": torch.ones(2), "dtype": torch.ones(2)})
    save(root, 2, {"new": torch.ones(3), "shape": torch.ones(3), "dtype": torch.ones(2).double()})
    found = run_json("diff", root, "1", "2", code=1)["tensors"]
    assert {(t["name"], t["kind"], t["a"], t["b"]) for t in found} == {
        ("gone", "only_a", "float32 [2]", ""),
        ("new", "only_b", "", "float32 [3]"),
        ("shape", "shape", "float32 [2]", "float32 [3]"),
        ("dtype", "dtype", "float32 [2]", "float64 [2]"),
    }
    text = run("diff", root, "1", "2", code=1).stdout
    assert "only in A: float32 [2]" in text
    assert "dtype: float32 [2] in A, float64 [2] in B" in text


def test_leaves_of_every_kind_are_compared_by_path(folder: str) -> None:
    root = Path(folder) / "root"
    save(
        root, 1, {"s": {"list": [1, 2], "nan": float("nan"), 5: "a", "x": {"y": 1.5}, "blob": b"1"}}
    )
    save(
        root, 2, {"s": {"list": [1, 3], "nan": float("nan"), 5: "b", "x": {"y": 2.5}, "new": None}}
    )
    leaves = run_json("diff", root, "1", "2", code=1)["leaves"]
    found = {leaf["path"]: (leaf["a"], leaf["b"]) for leaf in leaves}
    assert found.pop('s."blob"' if 's."blob"' in found else "s.blob")[1] is None
    assert {path.replace('"', ""): sides for path, sides in found.items()} == {
        "s.list.1": ("2", "3"),
        "s.5": ('"a"', '"b"'),
        "s.x.y": ("1.5", "2.5"),
        "s.new": (None, "null"),
    }


def test_snapshots_of_two_roots_are_compared(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.one)
    document = run_json("diff", roots.one, "300", "newest", "--other", root)
    assert document["equal"] is True
    assert document["b"]["root"] == str(root)


def test_damage_is_told_and_not_taken_for_a_difference(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.one)
    file = snapshot(root, 300) / "rank-00000.safetensors"
    flip_byte(file, start_of("model.weight", file))
    result = run("diff", root, "100", "300", code=1)
    assert "tensor model.weight of rank 0 is damaged" in result.stderr
    assert result.stdout == ""


def test_torn_attempt_cannot_be_compared(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.one)
    (snapshot(root, 300) / "manifest.json").unlink()
    result = run("diff", root, "100", "300", code=1)
    assert "is torn, not a committed snapshot" in result.stderr


@pytest.mark.parametrize("missing", ["1000", "step-000000000999.00000001-000001-00000000"])
def test_unknown_side_is_a_wrong_use(roots: Roots, missing: str) -> None:
    assert "there is no" in run("diff", roots.one, "100", missing, code=2).stderr


def _save_sharded(rank: int, folder: str) -> None:
    """The tensor of `_global`, sharded by rows and by columns, and one replica that lies."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    values = _global()
    state: dict[str, Any] = {
        "rows": distribute_tensor(values, mesh, [Shard(0)]),
        "columns": distribute_tensor(values, mesh, [Shard(1)]),
        "replica": DTensor.from_local(values.clone(), mesh, [Replicate()], run_check=False),
        "own": torch.full((rank + 1,), float(rank)),
    }
    with SnapshotStore(Path(folder) / "two", memory=0, timeout_s=20) as store:
        store.save(state, step=1).wait(20)
        with torch.no_grad():
            state["rows"].to_local()[0, 0] += 1  # one element on each rank
            state["own"] += 1
            if rank == 1:
                state["replica"].to_local()[2] += 1
        store.save(state, step=2).wait(20)


def _global() -> torch.Tensor:
    return torch.arange(35.0).reshape(7, 5)


def test_other_topologies_are_compared_element_by_element(folder: str) -> None:
    run_ranks(2, _save_sharded, folder)
    changed = _global()
    changed[3:5] = -1.0  # rows of both ranks
    whole = {"rows": changed, "columns": changed, "replica": _global(), "own": torch.zeros(1)}
    save(Path(folder) / "one", 1, whole)
    sharded = Path(folder) / "two"
    document = run_json("diff", sharded, "1", "1", "--other", Path(folder) / "one", code=1)
    assert document["topology"] == [
        "world size is 2 in A and 1 in B",
        "meshes are dp 2 (cpu) in A and none in B",
    ]
    expected = int((_global().view(torch.uint8) != changed.view(torch.uint8)).sum())
    found = {
        t["name"]: (t["kind"], t["differing_bytes"], t["total_bytes"]) for t in document["tensors"]
    }
    assert found == {
        "rows": ("bytes", expected, 7 * 5 * 4),
        "columns": ("bytes", expected, 7 * 5 * 4),
    }
    # A replica that differs from the others is seen as well.
    document = run_json("diff", sharded, "2", "1", "--other", Path(folder) / "one", code=1)
    found = {t["name"]: (t["kind"], t["differing_bytes"], t["ranks"]) for t in document["tensors"]}
    assert found["replica"][0] == "bytes"
    assert 0 < found["replica"][1] <= 4 * 5
    assert found["replica"][2] == [1]
    # The same topology: each rank's copy by itself, so a replica that differs is seen.
    document = run_json("diff", sharded, "1", "2", code=1)
    ranks = {t["name"]: t["ranks"] for t in document["tensors"]}
    assert ranks == {"rows": [0, 1], "replica": [1], "own": [0, 1]}


@pytest.mark.parametrize("depth", [60, 400, 5000])
def test_metadata_nested_however_deeply_ends_in_an_answer(
    roots: Roots, copy_of: Copy, depth: int
) -> None:
    root = copy_of(roots.one)
    for step in (100, 200):
        manifest = snapshot(root, step) / "manifest.json"
        nested = b"[" * depth + str(step).encode() + b"]" * depth
        data = manifest.read_bytes().replace(b'{"step":%d}' % step, nested)
        assert nested in data
        at = data.index(b":") + 2
        manifest.write_bytes(data[:at] + digest_around(data, at).encode() + data[at + 32 :])
    for words in (
        ["list", root, "--all"],
        ["show", root, "--step", "100"],
        ["diff", root, "100", "200"],
    ):
        for extra in ([], ["--json"]):
            result = CliRunner().invoke(cli, [str(word) for word in [*words, *extra]])
            assert isinstance(result.exception, SystemExit | None)
            assert result.exit_code in (0, 1)
            assert result.output
