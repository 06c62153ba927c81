"""Real bug reports on remote storage, with small file systems that have its habits (C81 to C91)."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardstore import SnapshotNotFoundError, TierError, list_snapshots
from tests.cases import fakes
from tests.faults.threaded import Ranks, Stores

_memory: list[Path] = []
"""Of stores: each has a folder of its own, as on hosts of their own."""


@pytest.fixture
def root(request: pytest.FixtureRequest, folder: str) -> Iterator[str]:
    """A root on the file system that the test names."""
    _memory[:] = [Path(folder)]
    with fakes.registered(request.param) as url:
        yield url


def on(*kinds: type[fakes.FakeFileSystem]) -> pytest.MarkDecorator:
    """Run a test on each of these file systems."""
    return pytest.mark.parametrize(
        "root", kinds, indirect=True, ids=[str(kind.protocol) for kind in kinds]
    )


def _open(root: str, **options: Any) -> Stores:
    place = tempfile.mkdtemp(dir=_memory[0])
    return Ranks().open(root, memory="1MiB", memory_dir=place, **options)


def _save(root: str, *steps: int, numel: int = 3000, **options: Any) -> None:
    stores = _open(root, **options)
    for step in steps:
        assert stores.save(step, numel=numel) == ["", ""]
    stores.drain()
    stores.close()


def _steps(root: str) -> list[int]:
    return [info.step for info in list_snapshots(root)]


def _shards(kind: type[fakes.FakeFileSystem]) -> list[str]:
    return [path for path in kind.objects if path.endswith(".safetensors")]


EVERY = (
    fakes.FakeFileSystem,
    fakes.CachedFileSystem,
    fakes.WithoutFileno,
    fakes.WithUnsupportedFileno,
    fakes.OldFileSystem,
)


@on(*EVERY)
def test_what_one_process_saved_another_restores(root: str) -> None:
    """C83, C84, C86: bytes that come with `close`, no `fileno`, no rename, no exclusive create."""
    _save(root, 1, 2, 3, keep=2)
    assert _steps(root) == [2, 3]
    stores = _open(root)
    assert (stores.restore(), stores.restore(step=2)) == (3, 2)
    stores.close()


@on(fakes.CachedFileSystem)
def test_what_was_committed_or_deleted_elsewhere_is_seen_in_spite_of_a_cached_listing(
    root: str,
) -> None:
    """C81."""
    looking = _open(root)
    with pytest.raises(SnapshotNotFoundError):
        looking.restore()
    assert looking.listed() == []
    _save(root, 1)
    assert looking.restore() == 1
    _save(root, 2, 3, keep=1)
    assert looking.listed() == [3]
    with pytest.raises(SnapshotNotFoundError):
        looking.restore(step=1)
    assert looking.restore() == 3
    looking.close()


@on(fakes.CachedFileSystem)
def test_a_longer_file_of_the_same_step_is_read_whole_in_spite_of_a_cached_size(root: str) -> None:
    """C82."""
    _save(root, 1, numel=10)
    looking = _open(root)
    assert looking.restore(numel=10) == 1
    _save(root, 1, numel=9000)
    assert looking.restore(numel=9000) == 1
    looking.close()


@on(fakes.CachedFileSystem)
def test_an_object_that_is_replaced_by_a_longer_one_is_read_whole_or_refused(root: str) -> None:
    """C82: the same name, as of a register."""
    _save(root, 1)
    looking = _open(root)
    assert looking.listed() == [1]
    other = _open(root)
    other.each(lambda store, _: store.delete(1))
    other.close()
    assert looking.listed() == []
    looking.close()


@on(fakes.FakeFileSystem)
def test_the_sizes_in_the_manifest_are_those_that_are_stored_when_save_returns(root: str) -> None:
    """C83."""
    stores = _open(root)
    assert stores.save(1) == ["", ""]
    (info,) = list_snapshots(root)
    stored = [
        len(fakes.FakeFileSystem.objects[path].data) for path in _shards(fakes.FakeFileSystem)
    ]
    assert (len(stored), sum(stored)) == (2, info.nbytes)
    stores.close()


@on(fakes.UnclosableFileSystem)
@pytest.mark.parametrize(
    "name", ["rank-00001", pytest.param("manifest", marks=pytest.mark.nightly)]
)
def test_what_close_raises_fails_the_save(
    root: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C83: nothing was stored, and nobody takes it for stored."""
    kind = fakes.UnclosableFileSystem
    _save(root, 1)
    stores = _open(root, timeout_s=3.0)
    monkeypatch.setattr(kind, "fails", staticmethod(lambda path: name in path))
    told = stores.save(2)
    assert all("SaveFailedError" in each and "the last part was not taken" in each for each in told)
    assert _steps(root) == [1]
    monkeypatch.setattr(kind, "fails", staticmethod(lambda _path: False))
    stores.drain()
    assert stores.save(3) == ["", ""]
    assert stores.restore() == 3
    assert _steps(root) == [1, 3]
    stores.close()


@on(fakes.ShortFileSystem)
@pytest.mark.parametrize("can_remove", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_write_that_raises_in_the_middle_leaves_nothing_that_counts(
    root: str, can_remove: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C85, C89: three bytes are visible under the final name. A full quota is named, with place and rank."""
    kind = fakes.ShortFileSystem
    _save(root, 1)
    stores = _open(root, timeout_s=2.0)
    monkeypatch.setattr(kind, "can_remove", can_remove)
    monkeypatch.setattr(kind, "fails", staticmethod(lambda path: "rank-00001" in path))
    told = stores.save(2)
    for each in told:
        assert "TierFullError" in each
        assert "quota exceeded" in each
        assert f"{root}/step-000000000002." in each
        assert "rank 1" in each
    assert _steps(root) == [1]
    left = [path for path in _shards(kind) if "step-000000000002" in path]
    assert can_remove != bool(left), "it was removed where that works"
    stores.close()
    monkeypatch.setattr(kind, "fails", staticmethod(lambda _path: False))
    monkeypatch.setattr(kind, "can_remove", True)
    stores = _open(root)
    assert stores.restore() == 1
    assert stores.save(3) == ["", ""]
    assert _steps(root) == [1, 3]
    stores.close()


@on(fakes.FakeFileSystem)
def test_a_short_object_under_a_final_name_is_refused_by_its_size_and_its_digests(
    root: str,
) -> None:
    """C85: cut after the commit, then filled up with other bytes."""
    kind = fakes.FakeFileSystem
    for filling in (b"", b"\0wxyz"):
        kind.objects.clear()
        _save(root, 1, 2)
        (path,) = (p for p in _shards(kind) if "step-000000000002" in p and "rank-00001" in p)
        kind.objects[path] = fakes.Stored(kind.objects[path].data[:-5] + filling, None)
        stores = _open(root)
        assert stores.restore() == 1
        stores.close()


@on(fakes.LateFileSystem)
@pytest.mark.parametrize(
    "delay_s", [0.5, pytest.param(5.0, marks=pytest.mark.nightly)], ids=["short", "5s"]
)
def test_objects_that_become_visible_late_are_waited_for(
    root: str, delay_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C87: the commit waits for the other rank's file; a restart restores a whole one, or says that it cannot."""
    monkeypatch.setattr(fakes.LateFileSystem, "delay_s", delay_s)
    stores = _open(root, timeout_s=60.0)
    for step in (1, 2):
        assert stores.save(step) == ["", ""]
    stores.close()
    restarted = _open(root, timeout_s=60.0)
    assert restarted.restore() == 2
    restarted.close()


@on(fakes.StickyFileSystem)
def test_an_old_snapshot_that_cannot_be_removed_once_goes_the_next_time(
    root: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """C88: ENOTEMPTY once."""
    kind = fakes.StickyFileSystem
    monkeypatch.setattr(kind, "num_failures", 0)
    stores = _open(root, keep=1)
    assert stores.save(1) == ["", ""]
    assert stores.save(2) == ["", ""]  # what earlier runs left was looked at by now
    stores.drain()
    kind.num_failures = 1
    assert stores.save(3) == ["", ""]
    stores.drain()
    assert _steps(root) == [3]
    assert "tried again" in caplog.text
    assert stores.save(4) == ["", ""]
    stores.drain()
    assert {path.split("step-")[1][:12] for path in _shards(kind)} == {"000000000004"}
    stores.close()


@on(fakes.StickyFileSystem)
def test_training_goes_on_where_nothing_can_ever_be_removed(
    root: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """C88: ENOTEMPTY always; what is half deleted is not listed, and the next run tries again."""
    kind = fakes.StickyFileSystem
    monkeypatch.setattr(kind, "num_failures", 10**9)
    stores = _open(root, keep=1)
    for step in (1, 2, 3, 4):
        assert stores.save(step) == ["", ""]
    stores.drain()
    assert _steps(root) == [4]
    assert stores.restore() == 4
    assert "ENOTEMPTY" in caplog.text or "not empty" in caplog.text
    stores.close()
    kind.num_failures = 0
    _save(root, 5, keep=1)
    assert {path.split("step-")[1][:12] for path in _shards(kind)} == {"000000000005"}


@on(fakes.StickyFileSystem)
def test_a_folder_that_vanishes_while_it_is_removed_is_no_problem(
    root: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """C88: two of them remove the same one."""
    kind = fakes.StickyFileSystem
    monkeypatch.setattr(kind, "num_failures", 0)
    monkeypatch.setattr(kind, "is_gone_meanwhile", True)
    with caplog.at_level(logging.WARNING, "shardstore"):
        _save(root, 1, 2, 3, keep=1)
    assert _steps(root) == [3]
    assert {path.split("step-")[1][:12] for path in _shards(kind)} == {"000000000003"}
    assert caplog.text == ""


@on(fakes.ReadOnlyFileSystem)
def test_a_read_only_one_is_restored_from_and_nothing_is_written_there(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C91."""
    kind = fakes.ReadOnlyFileSystem
    _save(root, 1, keep=1)
    before = dict(kind.objects)
    monkeypatch.setattr(kind, "is_on", True)
    monkeypatch.setattr(kind, "num_refused", 0)
    stores = _open(root, keep=1)
    assert stores.restore() == 1
    assert stores.listed() == [1]
    assert kind.num_refused == 0, "nothing was tried"
    for told in stores.save(2):
        assert "EROFS" in told or "Read-only" in told
        assert root in told
        assert "denied" in told
    assert stores.restore() == 1
    stores.close()
    assert kind.objects == before


@on(fakes.FakeFileSystem)
def test_a_free_space_that_nobody_can_tell_blocks_nothing(
    root: str, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    """C90: remote storage says nothing of how much room there is."""
    stores = Ranks().open(root, memory="1MiB", memory_dir=Path(folder), keep=3)
    stores.each(lambda store, rank: store.warmup({"rank": rank}))
    assert stores.save(1) == ["", ""]
    stores.close()
    assert "bytes free" not in caplog.text


def test_an_unknown_protocol_is_refused_before_anything_is_done(folder: str) -> None:
    """C41."""
    with pytest.raises(ValueError, match=r"nobody://.*no storage is known"):
        Ranks().open("nobody://bucket/run", memory="1MiB", memory_dir=Path(folder))
    assert list(Path(folder).iterdir()) == []


@on(fakes.FakeFileSystem)
def test_what_cannot_be_told_apart_is_no_fault_of_the_ranks(root: str) -> None:
    """A client's own bug is told with its name, and is no outage to be waited for."""
    stores = _open(root, timeout_s=20.0)

    def broken(_self: Any, _path: str) -> Any:
        raise KeyError("bug")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fakes.FakeFileSystem, "writer", broken)
        told = stores.save(1)
    assert all("KeyError" in each for each in told)
    stores.close()
    with pytest.raises((SnapshotNotFoundError, TierError)):
        _open(root).restore()
