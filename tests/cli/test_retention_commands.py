"""`shardstore prune`, `gc`, `pin` and `unpin`: nothing is deleted unless --yes says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardstore import SnapshotStore
from tests.cli.conftest import Roots, run, run_json, snapshot

Copy = Callable[[Path], Path]


def tree(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def steps(root: Path) -> list[int]:
    return [s["step"] for s in run_json("list", root)["snapshots"]]


def test_prune_says_what_would_go_and_changes_nothing(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.one)
    before = tree(root)
    document = run_json("prune", root, "--keep", "1")
    assert document["done"] is False
    assert [d["step"] for d in document["deleted"]] == [100, 200]
    assert set(document["deleted"][0]) == {"step", "id", "nbytes", "why", "problem"}
    assert "add --yes" in run("prune", root, "--keep", "1").stdout
    assert tree(root) == before


def test_prune_with_yes_deletes_what_the_policy_lets_go(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.one)
    text = run("prune", root, "--keep", "2", "--yes").stdout
    assert "1 snapshot" in text
    assert "deleted" in text
    assert steps(root) == [200, 300]
    assert not list(root.glob("*000000000100*"))
    assert run("prune", root, "--keep", "2", "--yes").stdout == "there is nothing to delete\n"


def test_prune_keeps_pinned_and_every_so_many_steps(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.one)
    run("pin", root, "100")
    assert run_json("prune", root, "--keep", "1", "--every-steps", "200")["deleted"] == []
    run("unpin", root, "100")
    deleted = run_json("prune", root, "--keep", "1", "--every-steps", "200", "--yes")["deleted"]
    assert [d["step"] for d in deleted] == [100]
    assert steps(root) == [200, 300]


@pytest.mark.parametrize("options", [[], ["--keep", "0"], ["--keep", "x"], ["--keep", "-1"]])
def test_prune_without_a_policy_is_refused(roots: Roots, options: list[str]) -> None:
    run("prune", roots.one, *options, "--yes", code=2)
    assert steps(roots.one) == [100, 200, 300]


def test_pin_is_seen_everywhere_and_again_is_fine(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.one)
    document = run_json("pin", root, "200")
    (pinned,) = document["snapshots"]
    assert (pinned["step"], pinned["pinned"], pinned["changed"]) == (200, True, True)
    assert "was pinned before" in run("pin", root, "200").stderr
    assert [s["pinned"] for s in run_json("list", root)["snapshots"]] == [False, True, False]
    assert run_json("show", root, "--step", "200")["pinned"] is True
    assert run_json("unpin", root, snapshot(root, 200).name)["snapshots"][0]["changed"] is True
    assert "was not pinned before" in run("unpin", root, "200").stderr


def test_pin_takes_all_snapshots_of_a_step(folder: str) -> None:
    root = Path(folder) / "root"
    for _ in range(2):
        with SnapshotStore(root, memory=0) as store:
            store.save({"x": torch.ones(3)}, step=7).wait(20)
    assert len(run_json("pin", root, "7")["snapshots"]) == 2


def test_pin_of_what_is_not_committed_is_a_wrong_use(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.one)
    assert "there is no step 5" in run("pin", root, "5", code=2).stderr
    (snapshot(root, 300) / "manifest.json").unlink()
    assert "is torn" in run("pin", root, "300", code=2).stderr
    assert not list(root.rglob("pinned"))


def test_gc_of_a_clean_root_finds_nothing(roots: Roots) -> None:
    assert run_json("gc", roots.one, "--memory-dir", roots.memory)["orphans"] == []
    assert run("gc", roots.one, "--memory-dir", roots.memory).stdout == "nothing is left over\n"


def test_gc_removes_what_a_left_store_tore_and_only_with_yes(folder: str) -> None:
    root, memory = Path(folder) / "root", Path(folder) / "memory"
    memory.mkdir()
    with SnapshotStore(root, memory=0) as store:
        for step in (1, 2):
            store.save({"x": torch.ones(3)}, step=step).wait(20)
    (snapshot(root, 1) / "manifest.json").unlink()
    options = ("--memory-dir", memory)
    before = tree(root)
    (orphan,) = run_json("gc", root, *options)["orphans"]
    assert set(orphan) == {
        "kind", "path", "id", "nbytes", "run", "run_state", "may_go", "removed", "why", "problem",
    }  # fmt: skip
    assert (orphan["kind"], orphan["may_go"], orphan["removed"]) == ("torn", True, False)
    assert "1 leftover" in run("gc", root, *options).stdout
    assert tree(root) == before
    (orphan,) = run_json("gc", root, *options, "--yes")["orphans"]
    assert orphan["removed"] is True
    assert not list(root.glob("step-000000000001*"))
    assert steps(root) == [2]


def test_gc_leaves_a_living_run_alone(folder: str) -> None:
    root = Path(folder) / "root"
    with SnapshotStore(root, memory=0) as store:
        for step in (1, 2):
            store.save({"x": torch.ones(3)}, step=step).wait(20)
        (snapshot(root, 1) / "manifest.json").unlink()
        (orphan,) = run_json("gc", root, "--unknown", "--yes")["orphans"]
        assert (orphan["run_state"], orphan["may_go"]) == ("alive", False)
        assert snapshot(root, 1).is_dir()


def test_gc_of_what_nobody_can_judge_needs_the_callers_word(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.one)  # a copied root: its runs cannot be judged
    (snapshot(root, 100) / "manifest.json").unlink()
    result = run("gc", root, "--yes", "--memory-dir", roots.memory)
    assert "--unknown" in result.stderr
    assert snapshot(root, 100).is_dir()
    run("gc", root, "--yes", "--unknown", "--memory-dir", roots.memory)
    assert not list(root.glob("step-000000000100*"))
