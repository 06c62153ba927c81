"""The servers as fixtures: one of each per test session, started by the first test that wants it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import pytest

from tests.servers.azure import AzuriteServer
from tests.servers.gcs import FakeGcsServer
from tests.servers.openssh import SftpServer
from tests.servers.process import ServerUnavailableError
from tests.servers.s3 import MotoServer, RcloneServer


class _Stoppable(Protocol):
    def stop(self) -> None: ...


S = TypeVar("S", bound=_Stoppable)


def served(name: str, start: Callable[[], S]) -> Iterator[S]:
    """Start a server and stop it at the end; one that cannot run skips, unless it is required.

    SHARDSTORE_REQUIRE_SERVERS names required ones, by commas: s3, deviant, azure, gcs, sftp.
    """
    try:
        server = start()
    except ServerUnavailableError as reason:
        if name in os.environ.get("SHARDSTORE_REQUIRE_SERVERS", "").split(","):
            raise
        pytest.skip(str(reason))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[MotoServer]:
    """S3 as it should be: moto."""
    yield from served("s3", MotoServer)


@pytest.fixture(scope="session")
def deviant_s3_server() -> Iterator[RcloneServer]:
    """S3 that ignores exclusive create: rclone."""
    yield from served("deviant", RcloneServer)


@pytest.fixture(scope="session")
def azure_server() -> Iterator[AzuriteServer]:
    """Azure: Azurite."""
    yield from served("azure", AzuriteServer)


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[FakeGcsServer]:
    """Google Cloud Storage: fake-gcs-server."""
    yield from served("gcs", FakeGcsServer)


@pytest.fixture(scope="session")
def sftp_server() -> Iterator[SftpServer]:
    """OpenSSH's sftp, with a key."""
    yield from served("sftp", SftpServer)
