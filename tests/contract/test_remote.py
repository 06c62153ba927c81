"""The published suite over remote storage: memory://, a file system of which nothing is known, real servers."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
import uuid
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shardstore.testing import TierContract
from shardstore.tiers.base import RootTier
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.remote.generic import GenericStore
from shardstore.tiers.remote.link import Link
from shardstore.tiers.remote.objects import ObjectStore
from shardstore.tiers.remote.opening import open_store
from shardstore.tiers.remote.requests import Patience, Requests
from shardstore.tiers.remote.tier import RemoteTier
from tests.servers.azure import AzuriteServer
from tests.servers.gcs import FakeGcsServer
from tests.servers.openssh import SftpServer
from tests.servers.s3 import MotoServer, RcloneServer


class RemoteContract(TierContract):
    """What is stored is looked at through another client, past the tier."""

    uses_file_ops = False
    has_folders = False

    # What only a file system has: system calls to break, and to find the syncs among.
    test_a_register_is_synced_before_it_is_named_and_its_folder_after = None  # type: ignore[assignment]
    test_a_register_that_cannot_be_written_is_a_tier_error_and_does_not_exist = None  # type: ignore[assignment]
    test_an_answer_in_doubt_is_settled_by_reading_the_register = None  # type: ignore[assignment]
    test_an_error_of_the_system_is_a_tier_error_and_leaves_nothing = None  # type: ignore[assignment]
    test_an_error_while_reading_is_a_tier_error = None  # type: ignore[assignment]
    test_publish_syncs_the_file_before_it_is_named_and_the_folders_after = None  # type: ignore[assignment]
    test_removal_takes_the_bytes_before_the_register = None  # type: ignore[assignment]
    test_shards_of_another_run_are_synced_with_their_folders = None  # type: ignore[assignment]

    @cached_property
    def store(self) -> ObjectStore:
        """One client for a test: making one takes longer than all that it does."""
        return self.make_store()

    def make_store(self) -> ObjectStore:
        raise NotImplementedError

    def make_tier(self, ops: FileOps) -> RootTier:
        requests = Requests(self.store, name="root", ops=ops, patience=Patience(5.0, 5.0))
        return RemoteTier(requests, keep_closed_s=0.0, visible_s=0.05)

    def raw_truncate(self, name: str, nbytes: int) -> None:
        self.raw_write(name, self.raw_files()[name][:nbytes])


class TestMemory(RemoteContract):
    fs: ClassVar[Any] = fsspec.filesystem("memory")

    @property
    def root(self) -> str:
        return f"/{self.folder.parent.parent.name}/tier"

    def make_store(self) -> ObjectStore:
        return open_store(f"memory:/{self.root}", {}, Link())

    def raw_files(self) -> dict[str, bytes]:
        start, store = f"{self.root}/", self.fs.store
        found = [path for path in list(store) if path.startswith(start)]
        return {path.removeprefix(start): store[path].getvalue() for path in found}

    def raw_write(self, name: str, data: bytes) -> None:
        self.fs.pipe_file(f"{self.root}/{name}", data)


class _Stranger(MemoryFileSystem):  # type: ignore[misc]
    """A file system with what every one has, and nothing else: files whose bytes come with `close`."""

    protocol = "stranger"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]


class TestStranger(TestMemory):
    fs = _Stranger()

    def make_store(self) -> ObjectStore:
        return GenericStore(
            self.fs, self.root, kind="stranger", location=f"stranger:/{self.root}", link=Link()
        )

    # What is being written is visible there: sizes and digests tell, see tests/cases.
    test_a_shard_is_absent_until_published_and_then_whole = None  # type: ignore[assignment]
    test_parts_may_come_in_any_order_and_size = None  # type: ignore[assignment]


class _OnS3(RemoteContract):
    server: MotoServer | RcloneServer
    bucket: str

    def make_store(self) -> ObjectStore:
        return open_store(f"s3://{self.bucket}/a/run", self.server.storage_options, Link())

    def raw_files(self) -> dict[str, bytes]:
        client = self.server.client
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        keys = [each["Key"] for page in pages for each in page.get("Contents", ())]
        bodies = {key: client.get_object(Bucket=self.bucket, Key=key)["Body"] for key in keys}
        return {key.removeprefix("a/run/"): body.read() for key, body in bodies.items()}

    def raw_write(self, name: str, data: bytes) -> None:
        self.server.client.put_object(Bucket=self.bucket, Key=f"a/run/{name}", Body=data)


class TestS3(_OnS3):
    @pytest.fixture(autouse=True)
    def _server(self, s3_server: MotoServer) -> None:
        self.server = s3_server
        self.bucket = self.server.fresh_bucket()


class TestDeviantS3(_OnS3):
    @pytest.fixture(autouse=True)
    def _server(self, deviant_s3_server: RcloneServer) -> None:
        self.server = deviant_s3_server
        self.bucket = self.server.fresh_bucket()

    # Exclusive create is ignored there: the last one wins, which the tier finds out and says.
    test_the_first_content_of_a_register_stands = None  # type: ignore[assignment]
    test_of_many_who_create_a_register_one_wins_and_all_hear_the_same = None  # type: ignore[assignment]
    test_a_run_number_is_claimed_once = None  # type: ignore[assignment]
    # And a file that is replaced is gone for a moment.
    test_readers_see_the_old_or_the_new_content_while_it_is_replaced = None  # type: ignore[assignment]

    def test_that_exclusive_create_is_ignored_is_found_out(self) -> None:
        tier = self.make_tier(FileOps())
        before = tier.is_exclusive
        tier.make_location()
        assert (before, tier.is_exclusive) == (None, False)
        assert self.raw_files() == {}


class TestSftp(RemoteContract):
    @pytest.fixture(autouse=True)
    def _server(self, sftp_server: SftpServer) -> None:
        self.server = sftp_server
        self.files = Path(sftp_server.files) / f"test-{uuid.uuid4().hex[:8]}"

    def make_store(self) -> ObjectStore:
        return open_store(f"sftp://127.0.0.1{self.files}", self.server.storage_options, Link())

    def raw_files(self) -> dict[str, bytes]:
        found = [path for path in self.files.rglob("*") if path.is_file()]
        return {str(p.relative_to(self.files)): p.read_bytes() for p in found if p.suffix != ".tmp"}

    def raw_write(self, name: str, data: bytes) -> None:
        path = self.files / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o777)
        for folder in (path.parent, self.files):
            folder.chmod(0o777)
        path.write_bytes(data)


class TestGcs(RemoteContract):
    @pytest.fixture(autouse=True)
    def _server(self, gcs_server: FakeGcsServer) -> None:
        self.server = gcs_server
        self.bucket = gcs_server.fresh_bucket()

    def make_store(self) -> ObjectStore:
        return open_store(f"gs://{self.bucket}/run", self.server.storage_options, Link())

    def raw_files(self) -> dict[str, bytes]:
        names = [each["name"] for each in json.loads(self._fetch("")).get("items", ())]
        whole = [name for name in names if not name.endswith(".tmp")]
        quoted = {name: urllib.parse.quote(name, safe="") for name in whole}
        return {n.removeprefix("run/"): self._fetch(f"/{q}?alt=media") for n, q in quoted.items()}

    def raw_write(self, name: str, data: bytes) -> None:
        quoted = urllib.parse.quote(f"run/{name}", safe="")
        url = f"http://127.0.0.1:{self.server.port}/upload/storage/v1/b/{self.bucket}/o"
        request = urllib.request.Request(
            f"{url}?uploadType=media&name={quoted}", data, method="POST"
        )
        urllib.request.urlopen(request, timeout=30).close()

    def _fetch(self, path: str) -> bytes:
        url = f"http://127.0.0.1:{self.server.port}/storage/v1/b/{self.bucket}/o{path}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return bytes(answer.read())


class TestAzure(RemoteContract):
    @pytest.fixture(autouse=True)
    def _server(self, azure_server: AzuriteServer) -> None:
        self.server = azure_server
        self.bucket = azure_server.fresh_bucket()

    def make_store(self) -> ObjectStore:
        return open_store(f"az://{self.bucket}/run", self.server.storage_options, Link())

    @property
    def _container(self) -> Any:
        return self.server.client.get_container_client(self.bucket)

    def raw_files(self) -> dict[str, bytes]:
        container = self._container
        names = [blob.name for blob in container.list_blobs()]
        return {n.removeprefix("run/"): container.download_blob(n).readall() for n in names}

    def raw_write(self, name: str, data: bytes) -> None:
        self._container.upload_blob(f"run/{name}", data, overwrite=True)
