"""A client that is not installed is named, with what to install."""

from __future__ import annotations

import pytest

from shardstore.tiers.remote.extras import client_module


def test_a_missing_client_is_named_with_the_extra_that_brings_it() -> None:
    with pytest.raises(ImportError, match=r"no_such_client.*pip install 'shardstore\[s3\]'"):
        client_module("no_such_client", "s3")


def test_a_client_that_is_there_is_imported() -> None:
    assert client_module("json", "s3").dumps(1) == "1"
