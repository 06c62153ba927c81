"""The root on Google Cloud Storage, as fake-gcs-server has it."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from typing import Any

import pytest

from shardstore.tiers.remote.gcs import GCSStore
from shardstore.tiers.remote.gcs_upload import owner_of
from shardstore.tiers.remote.link import Link
from tests.servers.gcs import FakeGcsServer
from tests.unit.tiers.remote.store_suite import ObjectStoreSuite


class TestGCSStore(ObjectStoreSuite):
    part_nbytes = 600_000

    @pytest.fixture(autouse=True)
    def _bucket(self, gcs_server: FakeGcsServer) -> None:
        self.server = gcs_server
        self.bucket = gcs_server.fresh_bucket()

    def make_store(self, root: str, link: Link) -> GCSStore:
        return GCSStore(self.bucket, root, storage_options=self.server.storage_options, link=link)

    def raw_objects(self) -> dict[str, bytes]:
        names = [each["name"] for each in json.loads(self._fetch("")).get("items", ())]
        quoted = {name: urllib.parse.quote(name, safe="") for name in names if not owner_of(name)}
        return {name: self._fetch(f"/{path}?alt=media") for name, path in quoted.items()}

    def _fetch(self, path: str) -> bytes:
        url = f"http://127.0.0.1:{self.server.port}/storage/v1/b/{self.bucket}/o{path}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            data: Any = answer.read()
        return bytes(data)
