"""Folders on the tmpfs, so that the memory tier is really one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


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
