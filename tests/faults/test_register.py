"""The commit register: what it says is true of the bytes, whatever fails around it (P4)."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from shardstore import SaveFailedError, list_snapshots
from shardstore.engine.catalog import Catalog
from shardstore.engine.sealed import manifest_of
from shardstore.tiers.disk import DiskTier
from shardstore.tiers.fileops import FileOps, use_ops
from tests.faults.scenario import open_store


class _NoSyncAfterLink(FileOps):
    """Folders cannot be synced once a manifest was linked."""

    def __init__(self, *, readable: bool) -> None:
        self.armed = self.linked = False
        self._readable = readable

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        self.linked = self.linked or (self.armed and "step-" in target)

    def fsync_folder(self, path: str) -> None:
        if self.linked:
            raise OSError(errno.EIO, "broken")
        super().fsync_folder(path)

    def open_existing(self, path: str, *, writable: bool = False) -> int:
        if self.linked and not self._readable and path.endswith("manifest.json"):
            raise OSError(errno.EIO, "broken")
        return super().open_existing(path, writable=writable)


@pytest.mark.parametrize("readable", [True, False], ids=["register readable", "unreadable"])
def test_an_error_after_the_manifest_was_linked_never_takes_the_bytes_from_under_it(
    folder: str, readable: bool
) -> None:
    ops = _NoSyncAfterLink(readable=readable)
    with use_ops(ops):
        store = open_store(folder)
    store.save({"w": torch.ones(2)}, step=1).wait()
    ops.armed = True
    live = {"w": torch.full((2,), 2.0)}
    handle = store.save(live, step=2)
    if readable:
        assert handle.wait() is not None, "the register says committed"
    else:
        with pytest.raises(SaveFailedError, match="unknown"):
            handle.wait()
    ops.linked = ops.armed = False
    store.take_leave("the test ends")
    assert [info.step for info in list_snapshots(Path(folder) / "root")] == [1, 2]
    reopened = open_store(folder, memory=0)
    live["w"].zero_()
    assert reopened.restore(live).step == 2
    assert live["w"].tolist() == [2, 2]
    reopened.close()


def test_a_late_publisher_of_a_removed_attempt_commits_nothing(folder: str) -> None:
    store = open_store(folder)
    store.save({"w": torch.ones(2)}, step=1).wait()
    store.close()
    catalog = Catalog(DiskTier(str(Path(folder) / "root"), name="root", ops=FileOps()))
    (snapshot_id,) = catalog.ids()
    shard = catalog.read_header(snapshot_id, 0)
    os.unlink(Path(folder) / "root" / snapshot_id.name / "manifest.json")
    assert catalog.abort(snapshot_id, reason="thought dead", writer={})
    catalog.remove_aborted()
    assert not catalog.publish(manifest_of({0: shard}, writer={}))
    assert catalog.ids() == []
