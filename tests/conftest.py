"""Folders on the tmpfs, so that the memory tier is really one; nightly tests run only where asked for."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest_plugins = ("tests.servers.fixtures",)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave nightly tests out, unless `-m` names the marker or SHARDSTORE_NIGHTLY=1."""
    if "nightly" in config.option.markexpr or os.environ.get("SHARDSTORE_NIGHTLY") == "1":
        return
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    if nightly:
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if item not in nightly]


@pytest.fixture
def folder() -> Iterator[str]:
    """A fresh folder on the tmpfs, removed afterwards."""
    path = tempfile.mkdtemp(prefix="shardstore-test-", dir="/dev/shm")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def disk_folder() -> Iterator[Path]:
    """A fresh folder where temporary files go, which is a disk as a rule; removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="shardstore-test-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
