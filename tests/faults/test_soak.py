"""A job that is killed and broken over and over trains exactly as one that is not, and nothing grows.

SHARDSTORE_SOAK_SEED repeats a run; SHARDSTORE_SOAK_S says for how many seconds.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.faults.soak.driver import soak

_SEED = int(os.environ.get("SHARDSTORE_SOAK_SEED", random.randrange(10**6)))
_DURATION_S = float(os.environ.get("SHARDSTORE_SOAK_S", "0"))


@pytest.mark.timeout(300)
def test_a_job_that_is_killed_and_broken_over_and_over_trains_as_if_it_were_not(
    folder: str, disk_folder: Path
) -> None:
    print(soak(Path(folder), disk_folder, seed=_SEED, duration_s=_DURATION_S or 60.0))


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_the_same_for_ten_minutes(folder: str, disk_folder: Path) -> None:
    print(soak(Path(folder), disk_folder, seed=_SEED + 1, duration_s=_DURATION_S or 600.0))
