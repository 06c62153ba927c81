"""Hosts in URLs are taken apart as everywhere."""

from __future__ import annotations

import pytest

from shardstore.tiers.remote.link import Link
from shardstore.tiers.remote.opening import open_store

pytest.importorskip("paramiko", reason="paramiko is not installed: pip install -e '.[servers]'")


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("sftp://host/a", "sftp://host/a"),
        ("sftp://me@host:2222/a b", "sftp://me@host:2222/a b"),
        ("sftp://me@[::1]:2222/a", "sftp://me@[::1]:2222/a"),
    ],
)
def test_user_host_and_port_are_found(url: str, location: str) -> None:
    assert open_store(url, {}, Link()).location == location


@pytest.mark.parametrize("url", ["sftp://host:ssh/a", "sftp://[::1/a", "sftp://host:70000/a"])
def test_a_host_that_is_none_is_refused_by_name(url: str) -> None:
    with pytest.raises(ValueError, match="is no URL that can be used"):
        open_store(url, {}, Link())
