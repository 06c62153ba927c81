"""Folders that live as long as the cases of one file."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def shared_folder() -> Iterator[str]:
    """A folder on the tmpfs for all cases of a file."""
    path = tempfile.mkdtemp(prefix="shardstore-test-", dir="/dev/shm")
    yield path
    shutil.rmtree(path, ignore_errors=True)
