"""One blob on its way to Azure: blocks, which nobody sees until they are committed as a list."""

from __future__ import annotations

import base64
import secrets
from typing import Any

from shardstore.tiers.remote.azure_client import AzureClient, AzureFault, pieces
from shardstore.tiers.remote.lent import Lent
from shardstore.tiers.remote.link import Watch


class BlockUpload:
    """A PartUpload as a list of blocks. One at a time for each name: committing drops all other blocks."""

    def __init__(self, client: AzureClient, name: str, nbytes: int, part_bytes: int) -> None:
        """Nothing is on the server yet."""
        self._client = client
        self._name = name
        self._nbytes = nbytes
        self._part_bytes = part_bytes
        self._nonce = secrets.token_hex(4)
        self._put: set[int] = set()
        self._is_complete = False

    def put(self, index: int, data: memoryview) -> None:
        """See PartUpload."""
        start = index * self._part_bytes
        assert len(data) == min(self._part_bytes, self._nbytes - start) > 0
        with Lent(data) as lent:

            async def request(client: Any, watch: Watch) -> None:
                blob = client.get_blob_client(self._name)
                await blob.stage_block(self._block(index), pieces(lent, watch), length=lent.nbytes)

            self._client.run(request, nbytes=lent.nbytes)
        self._put.add(index)

    def complete(self) -> None:
        """See PartUpload."""
        if self._is_complete:
            return
        num_parts = -(-self._nbytes // self._part_bytes)
        assert self._put >= set(range(num_parts)), "not all parts were put"

        async def request(client: Any, _watch: Watch) -> None:
            from azure.storage.blob import BlobBlock

            blocks = [BlobBlock(self._block(index)) for index in range(num_parts)]
            await client.get_blob_client(self._name).commit_block_list(blocks)

        self._client.run(request)
        self._is_complete = True

    def abort(self) -> None:
        """See PartUpload."""
        if not self._is_complete:
            drop_blocks(self._client, self._name)

    def _block(self, index: int) -> str:
        # All of one blob's have to be of one length.
        return base64.b64encode(f"{self._nonce}-{index:05d}".encode()).decode()


def drop_blocks(client: AzureClient, name: str) -> None:
    """Drop the blocks of a blob that was never committed; one that was keeps them for a week.

    Azure has no request for that: an empty blob is made, which drops them, and removed.
    """

    async def request(client: Any, _watch: Watch) -> None:
        blob = client.get_blob_client(name)
        made = await blob.upload_blob(b"", overwrite=False)
        from azure.core import MatchConditions

        await blob.delete_blob(etag=made["etag"], match_condition=MatchConditions.IfNotModified)

    try:
        client.run(request)
    except AzureFault as fault:
        # There is a blob of that name, or another one came between: they stay.
        if fault.status not in (404, 409, 412):
            raise


def remove(client: AzureClient, names: list[str]) -> None:
    """Delete blobs, many at the same time; absent ones are fine."""
    from azure.core.exceptions import ResourceNotFoundError

    async def delete(blob: Any) -> None:
        try:
            await blob.delete_blob()
        except ResourceNotFoundError as error:
            if getattr(error, "error_code", None) == "ContainerNotFound":
                raise

    client.each(delete, names)
