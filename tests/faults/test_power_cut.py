"""After a power cut at any operation, every snapshot that was committed by then is whole.

A job saves on a file system in an image file, which is copied, while mounted, around every operation.
Each copy is mounted, so that the file system repairs itself, and looked at.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.power.images import FILE_SYSTEMS, why_impossible


def _cut(kind: str, folder: Path, every: int, sync: str) -> dict[str, Any]:
    reason = why_impossible(kind, folder)
    if reason is not None:
        pytest.skip(reason)
    run = subprocess.run(
        ["unshare", "-m", sys.executable, "-m", "tests.faults.power.cut",
         kind, str(folder), str(every), sync],
        capture_output=True, text=True, timeout=550, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    print({key: value for key, value in found.items() if key != "wrong"})
    return found


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_every_committed_snapshot_is_whole_after_a_power_cut_at_any_operation(
    disk_folder: Path, kind: str
) -> None:
    found = _cut(kind, disk_folder, 1, "sync")
    assert found["wrong"] == []
    assert found["num_cuts"] > 200
    assert found["num_committed"] == 5


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_disk_that_only_pretends_to_sync_is_caught_by_the_same_cuts(disk_folder: Path) -> None:
    """So the test above can fail."""
    found = _cut("ext4", disk_folder, 4, "pretend")
    assert any("was committed and is gone" in text for text in found["wrong"])
