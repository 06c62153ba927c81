"""Real bug reports on snapshots that are copied file by file (C119, on local file systems)."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from shardstore import list_snapshots
from tests.faults.threaded import Ranks, Stores, names


def _open(root: Path) -> Stores:
    return Ranks().open(root, memory=0, keep=1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("with_run_records", [True, False])
def test_a_snapshot_is_listed_once_all_its_files_are_copied_and_never_removed_before(
    folder: str, seed: int, with_run_records: bool
) -> None:
    """C119: in any order, with fresh times, while another job saves there with keep=1."""
    source, target = Path(folder, "source"), Path(folder, "target")
    stores = _open(source)
    assert stores.save(5) == ["", ""]
    stores.close()
    files = [path for path in source.rglob("*") if path.is_file()]
    if not with_run_records:
        files = [path for path in files if path.parent != source]
    random.Random(seed).shuffle(files)
    inner = {path for path in files if path.parent != source}
    copied: set[Path] = set()
    for path in files:
        assert list_snapshots(target) == []
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
        copied.add(path)
        if inner <= copied:
            break
    assert [info.step for info in list_snapshots(target)] == [5]
    stores = _open(target)
    assert stores.restore() == 5
    stores.close()


@pytest.mark.parametrize("missing", ["manifest.json", "rank-00001.safetensors"])
def test_a_job_that_saves_meanwhile_removes_nothing_of_a_half_copied_snapshot(
    folder: str, missing: str
) -> None:
    """C119: what is missing may still come."""
    source, target = Path(folder, "source"), Path(folder, "target")
    stores = _open(source)
    assert stores.save(5) == ["", ""]
    stores.close()
    (snapshot,) = source.glob("step-*")
    shutil.copytree(snapshot, target / snapshot.name)
    (target / snapshot.name / missing).unlink()
    before = names(target)
    stores = _open(target)
    for step in (6, 7):
        assert stores.save(step) == ["", ""]
        stores.drain()
    left = names(target)
    is_whole = missing == "manifest.json"  # all shards are there: the first save commits it, P4
    assert is_whole or set(before) <= set(left), "what another run made was removed"
    shutil.copyfile(snapshot / missing, target / snapshot.name / missing) if not is_whole else None
    assert stores.restore() == 7
    if not is_whole:
        assert [info.step for info in list_snapshots(target)] == [5, 7]
        assert stores.restore(step=5) == 5
    stores.close()
