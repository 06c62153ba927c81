"""The benchmarks work: a short mode of each, whose figures mean nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "rows"),
    [
        ("compare", ("shardstore: save blocks", "DCP async_save: save until durable", "bare: cold read",
                     "restore from memory after SIGKILL, speed")),
        ("disk_paths", ("write: O_DIRECT, 64 MiB a call", "read: map and copy")),
        ("bookkeeping", ("plain tensors", "module and AdamW", "manifest of 4096 ranks")),
    ],
)  # fmt: skip
def test_a_short_run_prints_every_row(module: str, rows: tuple[str, ...]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--mib", "32", "--runs", "1"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    for row in rows:
        assert row in run.stdout
    assert not list(Path("/dev/shm").glob("benchmark-*"))
