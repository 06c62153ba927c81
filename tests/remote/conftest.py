"""Hosts with a remote root on S3, directly and through a proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.remote.job import Host, numbers, s3_options
from tests.servers.proxy import Proxy
from tests.servers.s3 import MotoServer

MakeHost = Callable[..., Host]


@pytest.fixture(scope="session")
def s3_proxy(s3_server: MotoServer) -> Iterator[Proxy]:
    """One proxy for all of these tests."""
    with Proxy(s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def proxy(s3_proxy: Proxy) -> Iterator[Proxy]:
    """The proxy, without faults before and after."""
    s3_proxy.clear()
    s3_proxy.forget()
    yield s3_proxy
    s3_proxy.clear()


@pytest.fixture
def make_host(s3_server: MotoServer, folder: str, disk_folder: Path) -> MakeHost:
    """Make hosts; those of one test share a root unless it is given."""
    root = s3_server.fresh("three")

    def make(proxy: Proxy | None = None, *, with_disk: bool = True, **options: Any) -> Host:
        number = next(numbers)
        return Host(
            Path(folder, f"memory-{number}"),
            disk_folder / f"disk-{number}" if with_disk else None,
            options.pop("root", root),
            s3_options(s3_server, proxy),
            options,
        )

    return make
