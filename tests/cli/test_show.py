"""`shardstore show`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from shardstore import SnapshotStore
from tests.cli.conftest import Roots, run, run_json, snapshot

Copy = Callable[[Path], Path]

KEYS = {
    "command", "root", "id", "step", "run", "count", "state", "ok", "problems", "reason", "created",
    "metadata", "writer", "persist", "pinned", "marked_damaged", "world_size", "nbytes", "tiers", "meshes",
    "ranks", "tensors", "saved_by",
}  # fmt: skip


def test_newest_snapshot_is_shown_whole(roots: Roots) -> None:
    document = run_json("show", roots.two, "--memory-dir", roots.memory)
    assert set(document) == KEYS
    assert (document["step"], document["state"], document["ok"]) == (20, "committed", True)
    assert document["world_size"] == 2
    assert document["tiers"] == {"memory": [0, 1], "root": [0, 1]}
    (mesh,) = document["meshes"]
    assert mesh == {"shape": [2], "axis_names": ["dp"], "device_type": "cpu", "ranks": [0, 1]}
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    assert document["writer"]["torch"] == torch.__version__
    tensors = {tensor["name"]: tensor for tensor in document["tensors"]}
    weight = tensors["model.0.weight"]
    assert weight["shape"] == [6, 5]
    assert weight["dtype"] == "float32"
    assert weight["placements"] == [{"type": "Shard", "dim": 0, "split_factor": None}]
    assert weight["mesh"] == "dp 2 (cpu)"
    assert weight["nbytes"] == 120
    assert weight["ranks"] == [0, 1]
    assert tensors["rng.torch"]["private"] is True


def test_text_says_topology_ranks_tensors_and_health(roots: Roots) -> None:
    text = run("show", roots.two, "--step", "10", "--memory-dir", roots.memory).stdout
    for part in (
        snapshot(roots.two, 10).name,
        "world size  2",
        "meshes      dp 2 (cpu)",
        "tiers       memory, root",
        'metadata    {"loss": 0.1}',
        "ok    every rank's file is there",
        "Shard(0) on dp 2 (cpu)",
    ):
        assert part in text


def test_tied_parameters_are_shown_as_one_tensor_under_two_names(folder: str) -> None:
    shared = torch.nn.Parameter(torch.ones(4))
    with SnapshotStore(Path(folder) / "root", memory=0) as store:
        module = torch.nn.ParameterDict({"a": shared, "b": shared})
        store.save({"m": module}, step=1).wait(20)
    tensors = run_json("show", Path(folder) / "root")["tensors"]
    assert [(t["name"], t["alias_of"], t["nbytes"]) for t in tensors] == [
        ("m.a", None, 16),
        ("m.b", "m.a", 0),
    ]


def test_torn_attempt_says_what_is_missing_from_which_rank(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.two)
    torn = snapshot(root, 20)
    (torn / "manifest.json").unlink()
    (torn / "rank-00001.safetensors").rename(torn / "rank-00001.safetensors.tmp")
    document = run_json("show", root, "--step", "20", code=1)
    assert (document["state"], document["world_size"]) == ("torn", 2)
    assert document["problems"][0].startswith("there is no manifest")
    assert document["problems"][1].startswith("rank 1: its file was not finished")
    assert document["tensors"], "the header of rank 0 tells"
    (torn / "rank-00001.safetensors.tmp").unlink()
    text = run("show", root, "--step", "20", code=1).stdout
    assert "rank 1: its file is missing" in text


def test_sizes_are_compared_with_the_manifest(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.two)
    file = snapshot(root, 20) / "rank-00001.safetensors"
    full = file.stat().st_size
    with file.open("r+b") as cut:
        cut.truncate(1000)
    document = run_json("show", root, code=1)
    assert document["state"] == "damaged"
    assert document["problems"] == [
        f"rank-00001.safetensors: has 1,000 bytes, the manifest says {full:,}"
    ]


def test_link_in_place_of_a_file_is_a_problem(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.two)
    file = snapshot(root, 20) / "rank-00001.safetensors"
    target = file.rename(root / "elsewhere")
    file.symlink_to(target)
    assert "is no file: a link" in run("show", root, code=1).stdout


def test_damaged_manifest_is_explained_and_headers_are_shown_instead(
    roots: Roots, copy_of: Copy
) -> None:
    root = copy_of(roots.two)
    manifest = snapshot(root, 20) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"world_size":2', b'"world_size":3'))
    document = run_json("show", root, "--step", "20", code=1)
    assert document["state"] == "damaged"
    assert "manifest digest is" in document["problems"][0]
    assert document["world_size"] == 2
    assert document["tensors"]


def test_folder_as_manifest_is_shown_and_hides_nothing_else(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.one)
    broken = snapshot(root, 300)
    (broken / "manifest.json").unlink()
    (broken / "manifest.json").mkdir()
    document = run_json("show", root, "--step", "300", code=1)
    assert document["state"] == "damaged"
    assert "manifest.json failed: EINVAL (not a regular file)" in document["problems"][0]
    assert run_json("show", root)["step"] == 200, "the newest that can be relied on"
    assert [s["step"] for s in run_json("list", root)["snapshots"]] == [100, 200]
    states = [s["state"] for s in run_json("list", root, "--all")["snapshots"]]
    assert states == ["committed", "committed", "damaged"]
    assert [s["ok"] for s in run_json("verify", root, code=1)["snapshots"]] == [True, True, False]
    run("diff", root, "100", "200", code=1)


def test_file_in_place_of_a_folder_is_no_snapshot_and_is_named(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.one)
    broken = snapshot(root, 300)
    shutil.rmtree(broken)
    broken.touch()
    assert "there is no step 300" in run("show", root, "--step", "300", code=2).stderr
    result = run("show", root)
    assert "step        200" in result.stdout
    assert f"{broken} has a snapshot's name and is no folder" in result.stderr


def test_aborted_attempt_says_why(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.one)
    run("prune", root, "--keep", "2")  # a dry run changes nothing
    assert run_json("show", root, "--step", "100")["ok"]
    from shardstore.engine.catalog import Catalog
    from shardstore.format.records import SnapshotId
    from shardstore.tiers.disk import DiskTier
    from shardstore.tiers.fileops import FileOps

    snapshot_id = SnapshotId.parse(snapshot(root, 100).name)
    assert snapshot_id is not None
    catalog = Catalog(DiskTier(str(root), name="root", ops=FileOps()))
    catalog.unlist(snapshot_id, reason="rank 3 failed", writer={})
    document = run_json("show", root, "--step", "100", code=1)
    assert (document["state"], document["reason"]) == ("aborted", "rank 3 failed")
    assert "rank 3 failed" in run("show", root, "--step", "100", code=1).stdout


def test_foreign_names_in_the_folder_are_told(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.one)
    (snapshot(root, 300) / "notes.txt").touch()
    assert "also in the folder: notes.txt" in run("show", root).stdout


def test_step_that_several_runs_saved_needs_an_id(folder: str) -> None:
    root = Path(folder) / "root"
    for _ in range(2):
        with SnapshotStore(root, memory=0) as store:
            store.save({"x": torch.ones(3)}, step=7).wait(20)
    result = run("show", root, "--step", "7", code=2)
    ids = sorted(path.name for path in root.glob("step-*"))
    assert "is there 2 times" in result.stderr
    assert all(name in result.stderr for name in ids)
    assert run_json("show", root, "--id", ids[0])["id"] == ids[0]
    assert run_json("show", root, "--id", ids[1][-8:])["id"] == ids[1]
    assert run_json("show", root)["run"] == 2


def test_step_that_is_not_there_names_the_nearest(roots: Roots) -> None:
    result = run("show", roots.one, "--step", "150", code=2)
    assert "there is no step 150" in result.stderr
    assert "100, 200, 300" in result.stderr


def test_many_tensors_are_cut_with_a_hint_and_shown_with_full(folder: str) -> None:
    root = Path(folder) / "root"
    with SnapshotStore(root, memory=0) as store:
        store.save({f"t{i:03d}": torch.ones(1) for i in range(60)}, step=1).wait(20)
    result = run("show", root)
    assert "20 tensors more: add --full" in result.stderr
    assert "t059" not in result.stdout
    assert "t059" in run("show", root, "--full").stdout
    assert len(run_json("show", root)["tensors"]) == 60
