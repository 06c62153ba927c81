"""`shardstore list`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from shardstore import SnapshotStore
from tests.cli.conftest import Roots, run, run_json, snapshot

Copy = Callable[[Path], Path]

KEYS = {
    "step", "id", "state", "nbytes", "created", "pinned", "tiers", "world_size", "metadata", "why",
}  # fmt: skip


def test_text_has_every_step_and_whole_ids_when_nobody_watches(roots: Roots) -> None:
    lines = run("list", roots.one).stdout.splitlines()
    assert lines[0].split() == ["STEP", "ID", "SIZE", "CREATED", "RANKS", "PINNED", "TIERS"]
    for line, step in zip(lines[1:], (100, 200, 300), strict=True):
        assert line.split()[:2] == [str(step), snapshot(roots.one, step).name]
        assert line.endswith("root")
        assert "\x1b" not in line


def test_json_tells_everything_and_which_ranks_memory_has(roots: Roots) -> None:
    document = run_json("list", roots.two, "--memory-dir", roots.memory)
    assert set(document) == {"command", "root", "snapshots", "num_not_listed"}
    assert document["root"] == str(roots.two)
    first, second = document["snapshots"]
    assert set(first) == KEYS | {"memory_ranks"}
    assert (first["step"], second["step"]) == (10, 20)
    assert first["tiers"] == ["memory", "root"]
    assert first["memory_ranks"] == [0, 1]
    assert first["world_size"] == 2
    assert first["metadata"] == {"loss": 0.1}
    files = snapshot(roots.two, 10).glob("rank-*")
    assert first["nbytes"] == sum(file.stat().st_size for file in files)


def test_what_is_no_snapshot_is_listed_with_all_only_and_says_why(
    roots: Roots, copy_of: Copy
) -> None:
    root = copy_of(roots.one)
    (snapshot(root, 100) / "manifest.json").unlink()
    (snapshot(root, 100) / "rank-00000.safetensors").unlink()
    (snapshot(root, 200) / "manifest.json").write_text("{}")
    (snapshot(root, 300) / "rank-00000.safetensors").unlink()
    result = run("list", root)
    assert result.stdout == ""
    assert "not listed: 2 damaged, 1 torn" in result.stderr
    listed = run_json("list", root, "--all")["snapshots"]
    assert [(s["step"], s["state"]) for s in listed] == [
        (100, "torn"), (200, "damaged"), (300, "damaged"),
    ]  # fmt: skip
    assert listed[0]["why"] == "no manifest; no files of any rank"
    assert "breaks the format" in listed[1]["why"]
    assert listed[2]["why"] == "the file of rank 0 is missing"


def test_torn_attempt_says_which_rank_is_missing(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.two)
    (snapshot(root, 20) / "manifest.json").unlink()
    (snapshot(root, 20) / "rank-00001.safetensors").unlink()
    result = run("list", root, "--all")
    assert "root (1 of 2)" in result.stdout
    assert "no manifest; the file of rank 1 is missing" in result.stdout


def test_uncommitted_attempt_whose_files_are_all_near_is_restorable(
    roots: Roots, copy_of: Copy
) -> None:
    root = copy_of(roots.two)
    (snapshot(root, 20) / "manifest.json").unlink()
    listed = run_json("list", root)["snapshots"]
    assert [(s["step"], s["state"]) for s in listed] == [(10, "committed"), (20, "restorable")]
    assert listed[1]["root_ranks"] == [0, 1]


def test_snapshot_that_is_in_memory_alone_is_listed(folder: str) -> None:
    root, memory = Path(folder) / "root", Path(folder) / "memory"
    memory.mkdir()
    with SnapshotStore(root, memory="16MiB", memory_dir=memory) as store:
        store.save({"x": torch.ones(3)}, step=1).wait(20)
        store.save({"x": torch.ones(3)}, step=2, persist=False).wait(20)
        listed = run_json("list", root, "--memory-dir", memory)["snapshots"]
        assert [(s["step"], s["state"], s["tiers"]) for s in listed] == [
            (1, "committed", ["memory", "root"]),
            (2, "restorable", ["memory"]),
        ]
        assert listed[1]["why"] == "saved with persist=False"


def test_disk_between_memory_and_root_is_a_tier_once_it_is_told(
    folder: str, disk_folder: Path
) -> None:
    root, disk = disk_folder / "root", disk_folder / "disk"
    disk.mkdir()
    with SnapshotStore(root, memory="16MiB", memory_dir=folder, disk=disk) as store:
        store.save({"x": torch.ones(3)}, step=1).wait(20)
        store.drain(20)
        options = ("--memory-dir", folder)
        listed = run_json("list", root, "--disk", disk, *options)["snapshots"]
        assert listed[0]["tiers"] == ["memory", "disk", "root"]
        assert listed[0]["disk_ranks"] == [0]
        assert run_json("list", root, *options)["snapshots"][0]["tiers"] == ["memory", "root"]
        near = next((disk / f"shardstore-{os.getuid()}").iterdir())
        result = run("list", near, code=2)
        assert "looks like the disk= of a store" in result.stderr


def test_pinned_and_marked_snapshots_say_so(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.one)
    (snapshot(root, 100) / "pinned").touch()
    (snapshot(root, 200) / "damaged").touch()
    listed = run_json("list", root)["snapshots"]
    assert [s["pinned"] for s in listed] == [True, False, False]
    assert [s["why"] for s in listed] == ["", "marked: a restore or verify found it damaged", ""]


def test_order_is_that_of_saving_whatever_the_steps_say(folder: str) -> None:
    root = Path(folder) / "root"
    with SnapshotStore(root, memory=0) as store:
        for step in (500, 3, 70):
            store.save({"x": torch.ones(3)}, step=step).wait(20)
    assert [s["step"] for s in run_json("list", root)["snapshots"]] == [500, 3, 70]


def test_folder_of_a_snapshot_lists_that_one(roots: Roots) -> None:
    document = run_json("list", snapshot(roots.one, 200))
    assert document["root"] == str(roots.one)
    assert [s["step"] for s in document["snapshots"]] == [200]


def test_root_whose_snapshots_are_gone_says_so(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.one)
    for step in (100, 200, 300):
        shutil.rmtree(snapshot(root, step))
    result = run("list", root)
    assert result.stdout == ""
    assert f"there is no snapshot in {root}" in result.stderr
