"""The root on OpenSSH's sftp server."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from shardstore.tiers.remote.link import Link
from shardstore.tiers.remote.sftp import SFTPStore
from tests.servers.openssh import SftpServer
from tests.unit.tiers.remote.store_suite import ObjectStoreSuite


class TestSFTPStore(ObjectStoreSuite):
    part_nbytes = 600_000

    @pytest.fixture(autouse=True)
    def _folder(self, sftp_server: SftpServer) -> None:
        self.server = sftp_server
        self.files = Path(sftp_server.files) / f"test-{uuid.uuid4().hex[:8]}"

    def make_store(self, root: str, link: Link) -> SFTPStore:
        return SFTPStore(
            "127.0.0.1",
            f"{self.files}/{root}",
            storage_options=self.server.storage_options,
            link=link,
        )

    def raw_objects(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.files)): path.read_bytes()
            for path in self.files.rglob("*")
            if path.is_file() and not path.name.endswith(".tmp")
        }
