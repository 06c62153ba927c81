"""Real bug reports on snapshots that are copied to another kind of storage (C119)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest

from shardstore import list_snapshots
from tests.cases import fakes
from tests.faults.threaded import Ranks, Stores

_numbers = itertools.count()


@pytest.fixture
def places(folder: str) -> Iterator[dict[str, str]]:
    """Empty roots of each kind."""
    number = next(_numbers)
    with fakes.registered(fakes.FakeFileSystem) as fake:
        yield {
            "file": f"file://{folder}/root",
            "memory": f"memory://copied-{number}/root",
            "fake": fake,
        }
    fsspec.filesystem("memory").store.clear()


def _open(root: str, folder: str, **options: Any) -> Stores:
    memory = Path(folder, f"memory-{next(_numbers)}")
    memory.mkdir()
    return Ranks().open(root, memory="1MiB", memory_dir=memory, keep=1, **options)


def _files(root: str) -> dict[str, bytes]:
    """Every file below a root, by its name there."""
    fs, path = fsspec.core.url_to_fs(root)
    found = {str(name): fs.cat_file(name) for name in fs.find(path)}
    return {name.partition(path.strip("/"))[2].lstrip("/"): data for name, data in found.items()}


def _put(root: str, name: str, data: bytes) -> None:
    fs, path = fsspec.core.url_to_fs(root)
    fs.makedirs(f"{path}/{name}".rpartition("/")[0], exist_ok=True)
    fs.pipe_file(f"{path}/{name}", data)


def _in_some_order(files: Mapping[str, bytes], seed: int) -> list[tuple[str, bytes]]:
    shuffled = sorted(files.items())
    random.Random(seed).shuffle(shuffled)
    return shuffled


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("source", "target"),
    [("file", "memory"), ("memory", "file"), ("file", "fake"), ("fake", "memory")],
)
def test_a_snapshot_copied_to_another_kind_of_storage_is_listed_once_it_is_whole(
    places: dict[str, str], folder: str, source: str, target: str, seed: int
) -> None:
    """C119: file by file, in any order, with fresh times."""
    stores = _open(places[source], folder)
    assert stores.save(5) == ["", ""]
    stores.close()
    inner = {name: data for name, data in _files(places[source]).items() if "/" in name}
    assert len(inner) == 3
    for name, data in _in_some_order(inner, seed):
        assert list_snapshots(places[target]) == []
        _put(places[target], name, data)
    assert [info.step for info in list_snapshots(places[target])] == [5]
    stores = _open(places[target], folder)
    assert stores.restore() == 5
    stores.close()


@pytest.mark.parametrize("target", ["memory", "fake"])
@pytest.mark.parametrize(
    "missing", ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
)
def test_a_job_that_saves_meanwhile_removes_nothing_of_a_half_copied_snapshot(
    places: dict[str, str], folder: str, target: str, missing: str
) -> None:
    """C119: clean-up never deletes what it did not create; what is missing may still come."""
    stores = _open(places["file"], folder)
    assert stores.save(5) == ["", ""]
    stores.close()
    files = {name: data for name, data in _files(places["file"]).items() if "/" in name}
    (late,) = (name for name in files if name.endswith(missing))
    for name in files.keys() - {late}:
        _put(places[target], name, files[name])
    stores = _open(places[target], folder)
    for step in (6, 7):
        assert stores.save(step) == ["", ""]
        stores.drain()
    if missing == "manifest.json":  # all shards are there: the first save commits it, P4
        assert [info.step for info in list_snapshots(places[target])] == [7]
    else:
        left = _files(places[target])
        assert {name: left.get(name) for name in files.keys() - {late}} == {
            name: files[name] for name in files.keys() - {late}
        }
        assert [info.step for info in list_snapshots(places[target])] == [7]
        _put(places[target], late, files[late])
        assert [info.step for info in list_snapshots(places[target])] == [5, 7]
        assert stores.restore(step=5) == 5
    assert stores.restore() == 7
    stores.close()


def test_a_root_copied_there_and_back_is_the_same_and_is_saved_to(
    places: dict[str, str], folder: str
) -> None:
    """C119: file:// to memory:// and back to another folder, run records and all."""
    stores = _open(places["file"], folder)
    assert stores.save(5) == ["", ""]
    stores.close()
    back = f"file://{folder}/back"
    for seed, (source, target) in enumerate(
        ((places["file"], places["memory"]), (places["memory"], back))
    ):
        for name, data in _in_some_order(_files(source), seed):
            _put(target, name, data)
    assert _files(back) == _files(places["file"])
    stores = _open(back, folder)
    assert stores.restore() == 5
    assert stores.save(6) == ["", ""]
    stores.drain()
    assert [info.step for info in list_snapshots(back)] == [6]
    stores.close()
