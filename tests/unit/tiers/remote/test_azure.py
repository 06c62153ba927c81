"""The root on Azure's blob storage, as Azurite has it."""

from __future__ import annotations

import pytest

from shardstore.tiers.remote.azure import AzureStore
from shardstore.tiers.remote.link import Link
from tests.servers.azure import AzuriteServer
from tests.unit.tiers.remote.store_suite import ObjectStoreSuite


class TestAzureStore(ObjectStoreSuite):
    part_nbytes = 600_000
    separates_uploads = False

    @pytest.fixture(autouse=True)
    def _container(self, azure_server: AzuriteServer) -> None:
        self.server = azure_server
        self.container = azure_server.fresh_bucket()

    def make_store(self, root: str, link: Link) -> AzureStore:
        options = self.server.storage_options
        return AzureStore(self.container, root, storage_options=options, link=link)

    def raw_objects(self) -> dict[str, bytes]:
        container = self.server.client.get_container_client(self.container)
        names = [blob.name for blob in container.list_blobs()]
        return {name: container.download_blob(name).readall() for name in names}
