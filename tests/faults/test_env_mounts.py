"""File systems that are full to various degrees, read-only or unmounted, under two ranks that save."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="mounting a tmpfs needs root")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the cases of tests/faults/mounts.py saw."""
    run = subprocess.run(
        ["unshare", "-m", sys.executable, "-m", "tests.faults.mounts",
         str(tmp_path_factory.mktemp("mounts"))],
        capture_output=True, text=True, timeout=110, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    seen: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return seen


@pytest.mark.parametrize("case", ["full", "full_with_memory", "inodes"])
def test_what_does_not_fit_fails_on_both_ranks_and_takes_no_space(
    found: dict[str, Any], case: str
) -> None:
    failed = 0
    for one in found[case]:
        first, second = one["told"]
        assert bool(first) == bool(second), one
        assert one["restored"], one
        assert one["listed"], one
        if first:
            failed += 1
            assert first == second
            assert "SaveFailedError" in first
            assert "ENOSPC" in first
            assert one["after"] == one["before"], f"space is lost: {one}"
        assert one.get("next", ["", ""]) == ["", ""], one
    assert 0 < failed < len(found[case])


def test_a_remount_fails_saves_with_the_path_and_restores_go_on(found: dict[str, Any]) -> None:
    seen = found["read_only"]
    for text in (*seen["told"], *seen["told again"]):
        assert "EROFS" in text
        assert "read-only/root/" in text
    assert (seen["restored"], seen["again"]) == (1, 1)
    assert seen["back"] == [["", ""], 4, [1, 4]]


def test_an_unmounted_root_is_told(found: dict[str, Any]) -> None:
    seen = found["unmounted"]
    assert seen["told"] == ["", ""]
    assert (seen["restored"], seen["listed"]) == (2, [2])
    assert found["heard"].count("its file system was unmounted") == 1
