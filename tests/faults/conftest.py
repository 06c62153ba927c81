"""Warm processes that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.drivers import Drivers, drivers

_NUM_DRIVERS = 4
"""More than processors: who outlives another rank waits for a deadline."""


@pytest.fixture(scope="package")
def warm() -> Iterator[Drivers]:
    """Processes of one thread that have torch, and fork."""
    with drivers(_NUM_DRIVERS) as started:
        yield started
