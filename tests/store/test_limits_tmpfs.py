"""A tmpfs of 64 MB, of 1 MB, full, read-only or none at all: said with figures, and the job goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardstore import SnapshotStore, TierError
from tests.store.tmpfs_cases import MIB, STATE_BYTES

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="mounting a tmpfs needs root")
REMEDIES = ("--shm-size", "--ipc=host", "{medium: Memory}")
_ROOT = Path(__file__).parents[2]


def _run(
    folder: Path, options: str, num_ranks: int, *cases: tuple[str, Any, int]
) -> list[list[dict[str, Any]]]:
    run = subprocess.run(
        ["unshare", "-m", sys.executable, "-m", "tests.store.tmpfs_cases",
         str(folder), options, str(num_ranks), *map(json.dumps, cases)],
        capture_output=True, text=True, timeout=110, check=False, cwd=_ROOT,
    )  # fmt: skip
    assert run.returncode == 0, f"{run.returncode} (a signal if negative): {run.stderr}"
    found: list[list[dict[str, Any]]] = json.loads(run.stdout.splitlines()[-1])
    return found


def _assert_went_on(ranks: list[dict[str, Any]], *named: str) -> None:
    for found in ranks:
        assert found["step"] == 3
    said = "".join(found["said"] for found in ranks)
    for name in named:
        assert name in said, said


def _assert_refused(ranks: list[dict[str, Any]], *named: str, free: int) -> None:
    for found in ranks:
        kind, text = found["refused"]
        assert (kind, found["listed"]) == ("TierFullError", 0), found
        for name in (*named, *REMEDIES):
            assert name in text, text
        assert found["numbers"][0] > STATE_BYTES
        assert found["numbers"][1] <= free


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("size_mib", [64, 1])
def test_a_tmpfs_too_small_for_the_state(disk_folder: Path, size_mib: int, num_ranks: int) -> None:
    """The figures: what was needed (83,886,080 and a header), and what there is."""
    auto, explicit, alone, alone_auto = _run(
        disk_folder, f"size={size_mib}m", num_ranks,
        ("save_and_restore", "auto", STATE_BYTES), ("save_and_restore", "1GiB", STATE_BYTES),
        ("save_without_root", "1GiB", STATE_BYTES), ("save_without_root", "auto", STATE_BYTES),
    )  # fmt: skip
    size, needed = f"{size_mib * MIB:,}", f"{STATE_BYTES:,}"[:4]
    _assert_went_on(auto, size, needed, str(disk_folder / "0" / "shm"), *REMEDIES)
    assert all(found["num_streamed"] == 3 for found in auto)
    _assert_went_on(explicit, size, needed, str(disk_folder / "1" / "shm"), *REMEDIES)
    _assert_refused(alone, needed, free=size_mib * MIB)
    _assert_refused(alone_auto, needed, size, free=size_mib * MIB)
    for found in (*alone, *alone_auto):
        assert found["small"], "what fits is taken afterwards"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_tmpfs_that_others_fill_while_the_job_runs(disk_folder: Path, num_ranks: int) -> None:
    nbytes = 8 * MIB
    between, staging, again = _run(
        disk_folder, "size=64m", num_ranks,
        ("filled_between", "1GiB", nbytes), ("filled_while_staging", "1GiB", nbytes),
        ("filled_between", "auto", nbytes),
    )  # fmt: skip
    _assert_went_on(between)
    _assert_went_on(staging)
    _assert_went_on(again)


def test_a_tmpfs_that_is_read_only_or_has_no_inodes_or_is_full(disk_folder: Path) -> None:
    for options, expected in (("ro,size=64m", "is read-only"), ("size=64m,nr_inodes=12", "ENOSPC")):
        own = disk_folder / options.replace(",", "-")
        own.mkdir()
        case = "no_inodes" if "inodes" in options else "save_and_restore"
        auto, explicit = _run(own, options, 1, (case, "auto", 8 * MIB), (case, "1GiB", 8 * MIB))
        for ranks in (auto, explicit):
            _assert_went_on(ranks, expected, str(own))
        assert "--shm-size" in auto[0]["said"] or expected == "ENOSPC"


def test_no_tmpfs_at_all(disk_folder: Path) -> None:
    """Missing, with two ranks; without a root nobody can open the store."""
    auto, explicit, alone = _run(
        disk_folder, "", 2,
        ("save_and_restore", "auto", 8 * MIB), ("save_and_restore", "1GiB", 8 * MIB),
        ("save_without_root", "1GiB", 8 * MIB),
    )  # fmt: skip
    for ranks in (auto, explicit):
        _assert_went_on(ranks, "does not exist", *REMEDIES)
    for found in alone:
        assert found["where"] == "construction"
        assert found["refused"][0] == "TierError"
        assert "does not exist" in found["refused"][1]


def test_a_disk_is_no_tmpfs(disk_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (disk_folder / "memory").mkdir()
    if os.stat(disk_folder).st_dev == os.stat("/dev/shm").st_dev:
        pytest.skip("temporary files are on a tmpfs here")
    with SnapshotStore(
        disk_folder / "root", memory="8MiB", memory_dir=disk_folder / "memory"
    ) as store:
        store.save({"w": [1]}, step=1).wait(20)
    assert "is not on a tmpfs" in caplog.text
    assert not list((disk_folder / "memory").iterdir())
    with pytest.raises(TierError, match="is not on a tmpfs"):
        SnapshotStore(name="alone", memory="8MiB", memory_dir=disk_folder / "memory")
