"""A training of 300 MiB that has a few hundred MiB more: it goes on, and stays below the limit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.store.limited_process import NUM_STEPS

MIB = 1 << 20
_ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("above_mib", "memory", "in_memory"),
    [(128, "auto", False), (212, "8GiB", False), (600, "8GiB", True), (1000, "auto", True)],
)
def test_a_training_under_a_memory_limit_never_comes_to_it(
    disk_folder: Path, folder: str, above_mib: int, memory: str, in_memory: bool
) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.store.limited_process",
         str(disk_folder), folder, str(above_mib * MIB), memory],
        capture_output=True, text=True, timeout=100, check=False, cwd=_ROOT,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["steps"] == list(range(1, NUM_STEPS + 1))
    assert (found["restored"], found["same"]) == (NUM_STEPS, True)
    assert found["peak"] < found["limit"], found
    assert (found["num_streamed"] < NUM_STEPS) == in_memory, found
    if not in_memory:
        assert "memory.max" in run.stderr
        assert "resources.limits.memory" in run.stderr
