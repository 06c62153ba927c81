"""The package for tests costs nobody anything who does not use it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_IMPORTS = """
import sys
import shardstore.testing as testing
for name in testing.__all__:
    if name not in ("TierContract", "ShardContract"):
        getattr(testing, name)
print([name for name in ("torch", "pytest") if name in sys.modules])
testing.TierContract
print("pytest" in sys.modules)
"""


def test_only_the_suite_of_tiers_needs_pytest_and_nothing_needs_torch() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _IMPORTS],
        capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert ended.stdout.splitlines() == ["[]", "True"], ended.stderr
