"""Real bug reports on full, small and read-only disks, modes and syncing (C84 to C92, C102)."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardstore import SnapshotStore
from shardstore.tiers.fileops import use_ops
from tests.cases.bits import Refusal, assert_refused, bits, refusal, soil
from tests.faults.breaking_ops import WatchedOps, raise_at
from tests.faults.scenario import open_store

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="mounting a tmpfs needs root")


def _in_own_mounts(case: str, folder: Path) -> Any:
    run = subprocess.run(
        ["unshare", "-m", sys.executable, "-c",
         "from tests.cases.small_disks import main; main()", case, str(folder)],
        cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=80, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@needs_root
def test_a_full_disk_under_one_rank_fails_the_save_and_gives_the_space_back(tmp_path: Path) -> None:
    """C89."""
    results = _in_own_mounts("full_disk", tmp_path)
    failed = [Refusal(*result["failed"]) for result in results]
    named = ("rank 1", "ENOSPC", "rank-00001.safetensors", str(tmp_path))
    assert_refused(failed, *named, kind="SaveFailedError")
    for result in results:
        assert result["space"], "partial files were left"
        assert (result["step"], result["old_ok"]) == (1, True)
        assert result["listed"] == [1, 3]


def test_a_quota_that_is_used_up_is_told_like_a_full_disk(folder: str) -> None:
    """C89."""
    ops = WatchedOps(raise_at("write_at", OSError(errno.EDQUOT, "quota")))
    with use_ops(ops):
        store = open_store(folder, memory=0)
    live = {"w": torch.arange(4.0)}
    store.save(live, step=1).wait(20)
    saved = bits(live)
    ops.arm()
    found = refusal(lambda: store.save(live, step=2).wait(20), live)
    assert_refused([found], "EDQUOT", "rank 0", folder, kind="SaveFailedError")
    refusal(store.drain)
    soil(live)
    store.restore(live)
    assert bits(live) == saved
    store.close()
    assert len(list(Path(folder, "root").glob("step-*"))) == 1


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the cases of one process found, and where."""
    folder = tmp_path_factory.mktemp("alone")
    found: dict[str, Any] = _in_own_mounts("alone", folder)
    return {**found, "folder": folder}


@needs_root
def test_a_read_only_root_restores_and_refuses_to_save_with_its_path(alone: dict[str, Any]) -> None:
    """C91."""
    found = alone["read_only_root"]
    assert found["equal"]
    assert found["untouched"]
    assert found["listed"] == [1]
    assert_refused([Refusal(*found["failed"])], str(alone["folder"] / "root"), "EROFS")


@needs_root
def test_a_shared_memory_mount_that_is_too_small_is_no_bus_error(alone: dict[str, Any]) -> None:
    """C102."""
    found = alone["small_memory"]
    assert (found["step"], found["equal"]) == (2, True)
    named = (str(alone["folder"] / "shm"), "8,0", "--shm-size")
    assert_refused([Refusal(*found["failed"])], *named, kind="TierFullError")
    assert found["listed"] == 0


@pytest.mark.parametrize(
    ("umask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o007, 0o660, 0o770)]
)
def test_modes_follow_the_umask(folder: str, umask: int, file_mode: int, folder_mode: int) -> None:
    """C92."""
    before = os.umask(umask)
    try:
        with open_store(folder, memory=0) as store:
            store.save({"w": torch.ones(1)}, step=1).wait()
    finally:
        os.umask(before)
    found = list(Path(folder, "root").rglob("*"))
    assert len(found) == 4
    for path in found:
        expected = folder_mode if path.is_dir() else file_mode
        assert path.stat().st_mode & 0o777 == expected, path


def test_files_and_folders_are_synced_in_the_order_of_the_commit(folder: str) -> None:
    """C84. (Remote streams: not in this version.)"""
    order: list[str] = []

    class Ops(WatchedOps):
        def fsync(self, fd: int) -> None:
            order.append(f"fsync {os.path.basename(os.readlink(f'/proc/self/fd/{fd}'))}")
            super().fsync(fd)

        def rename(self, source: str, target: str) -> None:
            super().rename(source, target)
            order.append(f"name {os.path.basename(target)}")

        def link(self, source: str, target: str) -> None:
            super().link(source, target)
            order.append(f"name {os.path.basename(target)}")

    with use_ops(Ops()):
        store = SnapshotStore(Path(folder, "root"), memory=0)
    info = store.save({"w": torch.ones(1)}, step=1).wait(20)
    assert info is not None
    store.close()
    at = order.index
    named, published = at("name rank-00000.safetensors"), at("name manifest.json")
    assert at("fsync rank-00000.safetensors.tmp") < named < at(f"fsync {info.id}", named)
    assert at(f"fsync {info.id}", named) < published
    assert at(f"fsync {info.id}", published) > published
    assert any(text.startswith("fsync .manifest.json") for text in order[:published])
    assert "fsync root" in order[:published]


_COMMIT = """
import sys
from shardstore.format.records import SnapshotId
from shardstore.tiers.disk import DiskTier
from shardstore.tiers.fileops import FileOps
tier, attempt = DiskTier(sys.argv[1], name="root", ops=FileOps()), SnapshotId(1, 1, 1, "0" * 8)
writer = tier.create_shard(attempt, 0, 5)
writer.write(memoryview(b"shard"), 0)
writer.publish()
tier.create_manifest(attempt, b"manifest", make_folder=False)
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_the_kernel_is_really_asked_to_sync(folder: str) -> None:
    """C84."""
    log = Path(folder) / "trace"
    subprocess.run(
        ["strace", "-f", "-y", "-e", "trace=fsync", "-o", str(log),
         sys.executable, "-c", _COMMIT, str(Path(folder) / "root")],
        check=True, timeout=80, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    text = log.read_text()
    for synced in ("rank-00000.safetensors.tmp>", ".manifest.json.", "/root>"):
        assert synced in text
