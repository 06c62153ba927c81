"""What cannot be read just now, or not by this version, is not taken for worthless: nothing of it goes."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from shardstore import SnapshotStore
from shardstore.engine.orphans import find_orphans, remove_orphan
from shardstore.engine.pruning import prune
from shardstore.format.digests import BLANK, digest_around
from shardstore.format.header import DIGEST_AT
from shardstore.tiers.fileops import FileOps, use_ops
from tests.faults.orphans import WRITER, catalog_of, edit_record, save_steps, state, tear
from tests.faults.scenario import open_store
from tests.faults.threaded import Ranks, Stores


class _Failing(FileOps):
    """Files whose path has all of some texts in it cannot be opened."""

    def __init__(self, *texts: str, code: int = errno.EIO) -> None:
        self.texts, self.code = texts, code

    def open_existing(self, path: str, *, writable: bool = False) -> int:
        if self.texts and all(text in path for text in self.texts):
            raise OSError(self.code, os.strerror(self.code), path)
        return super().open_existing(path, writable=writable)


def _gc(folder: str, ops: FileOps | None = None, **options: Any) -> list[str]:
    """What `shardstore gc --yes` does; the names of what went."""
    catalog = catalog_of(folder, ops)
    found = find_orphans(catalog, memory_dirs=[str(Path(folder, "memory"))], **options)
    going = [orphan for orphan in found if orphan.may_go]
    return [o.path for o in going if not remove_orphan(catalog, o, writer=WRITER)]


# --------------------------------------------------------------------------- gc


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE], ids=errno.errorcode.get)
def test_gc_spares_a_newest_attempt_that_cannot_be_read_just_now(folder: str, code: int) -> None:
    _, second = save_steps(folder, 1, 2)
    tear(folder, second, whole=True)
    assert _gc(folder, _Failing(".safetensors", code=code), including_unknown=True) == []
    save_steps(folder, 3)
    assert [i.step for i in catalog_of(folder).ids()] == [1, 2, 3]
    assert catalog_of(folder).state(second) == "committed", "what the next start commits"


def test_gc_spares_a_newest_attempt_of_a_newer_version(folder: str) -> None:
    _, second = save_steps(folder, 1, 2)
    path = tear(folder, second, whole=True)
    _of_a_newer_version(path / "rank-00000.safetensors")
    assert _gc(folder, including_unknown=True) == []


def test_gc_spares_an_attempt_that_a_disk_has_a_part_of(folder: str, disk_folder: Path) -> None:
    """Once memory is gone, the files on the disks of the ranks are all that a restart has."""
    with open_store(folder, disk=disk_folder) as store:
        for step in (1, 2):
            store.save(state(step), step=step).wait()
    second = catalog_of(folder).ids()[-1]
    tear(folder, second, whole=False)
    assert _gc(folder) == []
    with open_store(folder, disk=disk_folder) as store:
        live = state(-1)
        assert store.restore(live).step == 2
        assert live["w"].tolist() == [2] * 4


def test_gc_looks_into_the_memory_of_runs_of_which_nothing_is_proven(folder: str) -> None:
    with open_store(folder) as store:
        for step in (1, 2):
            store.save(state(step), step=step).wait()
        store.drain()
        store.close(keep_memory=True)
    second = catalog_of(folder).ids()[-1]
    tear(folder, second, whole=False)
    edit_record(folder, 1, pid_namespace="pid:[1]")
    found = find_orphans(catalog_of(folder), memory_dirs=(), including_unknown=True)
    assert [o.may_go for o in found] == [False]


@pytest.mark.parametrize("broken", ["a file is missing", "cut", "marked"])
def test_gc_spares_a_whole_attempt_when_all_that_is_newer_is_broken(
    folder: str, broken: str
) -> None:
    _, second, third = save_steps(folder, 1, 2, 3)
    tear(folder, second, whole=True)
    path = Path(folder, "root", third.name, "rank-00000.safetensors")
    if broken == "marked":
        catalog_of(folder).mark_damaged(third)
        path.write_bytes(bytes(path.stat().st_size))
    elif broken == "cut":
        os.truncate(path, 100)
    else:
        path.unlink()
    assert _gc(folder) == []
    with open_store(folder, memory=0) as store:
        assert store.restore(state(-1)).step == 2


# ------------------------------------------------------------------------ prune


def test_prune_never_takes_the_last_good_one_for_a_copy_that_did_not_end(folder: str) -> None:
    """C119: the register comes before the rest of the files, in the order of their names."""
    first, second, third = save_steps(folder, 1, 2, 3)
    os.truncate(Path(folder, "root", third.name, "rank-00000.safetensors"), 5000)
    assert [p.id for p in prune(catalog_of(folder), 1, writer=WRITER, dry_run=False)] == [first]
    with open_store(folder, memory=0) as store:
        assert store.restore(state(-1)).step == 2
    assert catalog_of(folder).is_listed(second)


# ------------------------------------------------------------------------ disks


def _open(disk: Path, ops: FileOps | None = None) -> Stores:
    with use_ops(ops or FileOps()):
        return Ranks().open(None, disk=disk, name="job", memory=0)  # type: ignore[arg-type]


def _fill(disk: Path, *steps: int) -> None:
    stores = _open(disk)
    for step in steps:
        assert stores.save(step) == ["", ""]
    stores.drain()
    stores.close()


@pytest.mark.parametrize("step", [3, 4, 5], ids="step {}".format)
def test_a_disk_that_gives_no_answer_for_a_moment_loses_nothing_on_any_rank(
    disk_folder: Path, step: int
) -> None:
    _fill(disk_folder, 3, 4, 5)
    before = _files(disk_folder)
    stores = _open(disk_folder, _Failing(f"step-{step:012d}", "rank-00001.safetensors"))
    stores.abandon()
    assert _files(disk_folder) == before
    stores = _open(disk_folder)
    assert [stores.restore(step=s) for s in (3, 4, 5)] == [3, 4, 5]
    stores.close()


def test_a_file_that_can_be_read_again_is_used_without_another_start(disk_folder: Path) -> None:
    _fill(disk_folder, 3, 4)
    ops = _Failing("step-000000000004", "rank-00001.safetensors")
    stores = _open(disk_folder, ops)
    ops.texts = ()
    assert stores.restore() == 4
    stores.close()


def test_files_of_a_newer_version_stay_on_the_disk(disk_folder: Path) -> None:
    _fill(disk_folder, 3, 4)
    for path in disk_folder.rglob("step-000000000004*/*.safetensors"):
        _of_a_newer_version(path)
    before = _files(disk_folder)
    stores = _open(disk_folder)
    assert stores.restore() == 3
    stores.abandon()
    assert _files(disk_folder) == before


def test_a_file_that_is_damaged_on_every_rank_still_goes(disk_folder: Path) -> None:
    _fill(disk_folder, 3, 4)
    for path in disk_folder.rglob("step-000000000004*/*.safetensors"):
        os.truncate(path, 100)
    _open(disk_folder).abandon()
    assert not list(disk_folder.rglob("step-000000000004*/*.safetensors"))


# ----------------------------------------------------------------------- memory


def test_a_memory_folder_under_another_name_is_the_same_memory(folder: str) -> None:
    """A second store of the process takes over; it does not adopt slots that a live store works in."""
    memory = Path(folder, "memory")
    memory.mkdir(exist_ok=True)
    alias = Path(folder, "alias")
    alias.symlink_to(memory)
    root = Path(folder, "root")
    first = SnapshotStore(root, memory="1MiB", memory_dir=memory)
    first.save(state(1), step=1).wait()
    second = SnapshotStore(root, memory="1MiB", memory_dir=alias)
    with pytest.raises(Exception, match="took over"):
        first.save(state(2), step=2)
    live = state(-1)
    assert second.restore(live).step == 1
    second.close()


def _files(disk: Path) -> list[str]:
    return sorted(str(path) for path in disk.rglob("*.safetensors"))


def _of_a_newer_version(path: Path) -> None:
    """Rewrite a header as the next version of the format would, with a digest that is right."""
    data = bytearray(path.read_bytes())
    header = data[: 8 + struct.unpack_from("<Q", data)[0]]
    assert header.count(rb"\"format\":1") == 1
    header = header.replace(rb"\"format\":1", rb"\"format\":2")
    header[DIGEST_AT : DIGEST_AT + len(BLANK)] = digest_around(header, DIGEST_AT).encode()
    data[: len(header)] = header
    path.write_bytes(data)
