"""A folder of a container in Azure's blob storage."""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from shardstore.tiers.remote.azure_client import AzureClient, AzureFault
from shardstore.tiers.remote.azure_upload import BlockUpload, drop_blocks, remove
from shardstore.tiers.remote.faults import Fault
from shardstore.tiers.remote.lent import Lent
from shardstore.tiers.remote.link import Link, Watch
from shardstore.tiers.remote.objects import Entry, Listing, Unfinished

PART_NBYTES: Final = 8 << 20
_MOST_PARTS: Final = 10_000
"""Azure takes 50,000."""
_DELETED_AT_ONCE: Final = 100
_NONCE: Final = "shardstore_nonce"
"""In the metadata of what was created exclusively: by which request."""
_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class AzureStore:
    """An ObjectStore on Azure: exact names, no listing from a cache, no retries of its own.

    One upload of a name at a time: committing one drops the blocks of all others.
    """

    kind = "Azure"
    num_parallel = 12
    may_be_exclusive = True
    is_in_order = False

    def __init__(
        self, container: str, prefix: str, *, storage_options: Mapping[str, object], link: Link
    ) -> None:
        """Connects at the first request.

        Args:
            container: Its name.
            prefix: The root inside the container, without a slash at either end; may be empty.
            storage_options: adlfs's arguments; the environment's AZURE_STORAGE_* stand in for absent ones.
            link: Deadlines and progress.

        Raises:
            ImportError: adlfs is not installed.
            ValueError: adlfs does not take these options, or they lead to no account.
        """
        self._client = AzureClient(container, storage_options, link)
        self._start = f"{prefix}/" if prefix else ""
        self.location = f"az://{container}/{prefix}" if prefix else f"az://{container}"

    # ------------------------------------------------------------------- check

    def check(self) -> None:
        """See ObjectStore: lists at most one blob."""
        next(self._pages(self._start, is_flat=True, page_size=1))

    def check_writable(self) -> None:
        """See ObjectStore: commits a block that is not there, which only who may write is told."""
        block = base64.b64encode(b"no such block").decode()

        async def request(client: Any, _watch: Watch) -> None:
            from azure.storage.blob import BlobBlock

            probe = client.get_blob_client(f"{self._start}.shardstore-probe")
            await probe.commit_block_list([BlobBlock(block)])

        try:
            self._client.run(request)
        except AzureFault as fault:
            if fault.code not in ("InvalidBlockList", "InvalidBlockId"):
                raise

    # ----------------------------------------------------------------- reading

    def listing(self, prefix: str, *, is_flat: bool) -> Listing:
        """See ObjectStore."""
        objects: dict[str, Entry] = {}
        folders: set[str] = set()
        for page in self._pages(self._start + prefix, is_flat=is_flat):
            for each in page:
                key = self._relative(each.name)
                if not is_flat and key.endswith("/"):
                    folders.add(key.removesuffix("/"))
                elif not (key.endswith("/") or _is_folder(each)):
                    objects[key] = _entry(each)
        return Listing(objects, frozenset(folders))

    def entry(self, key: str) -> Entry | None:
        """See ObjectStore."""

        async def request(client: Any, _watch: Watch) -> Any:
            return await client.get_blob_client(self._start + key).get_blob_properties()

        try:
            found = self._client.run(request)
        except AzureFault as fault:
            if fault.is_missing_blob:
                return None
            raise
        return None if _is_folder(found) else _entry(found)

    def get(self, key: str, start: int, into: memoryview) -> int:
        """See ObjectStore."""
        with Lent(into) as lent:
            try:
                return self._client.run(
                    lambda client, watch: _read(client, watch, self._start + key, start, lent),
                    nbytes=lent.nbytes,
                )
            except AzureFault as fault:
                if fault.is_missing_blob:
                    raise FileNotFoundError(key) from fault
                if fault.status == 416:
                    return 0
                raise

    # ----------------------------------------------------------------- writing

    def put(self, key: str, data: bytes) -> None:
        """See ObjectStore."""

        async def request(client: Any, _watch: Watch) -> None:
            blob = client.get_blob_client(self._start + key)
            await blob.upload_blob(data, length=len(data), overwrite=True)

        self._client.run(request, nbytes=len(data))

    def create(self, key: str, data: bytes) -> bool:
        """See ObjectStore: only where there is no blob of that name."""
        nonce = secrets.token_hex(8)

        async def request(client: Any, _watch: Watch) -> bool:
            blob = client.get_blob_client(self._start + key)
            details = {"length": len(data), "metadata": {_NONCE: nonce}}
            try:
                await blob.upload_blob(data, overwrite=False, **details)
                return True
            except ResourceExistsError:
                # Perhaps by this very request: aiohttp repeats a PUT whose connection broke.
                found = await blob.get_blob_properties()
                return bool(found.metadata.get(_NONCE) == nonce)

        from azure.core.exceptions import ResourceExistsError

        return self._client.run(request, nbytes=len(data))

    def begin(self, key: str, nbytes: int, part_bytes: int) -> BlockUpload:
        """See ObjectStore; makes no request."""
        return BlockUpload(self._client, self._start + key, nbytes, part_bytes)

    def part_bytes(self, nbytes: int) -> int:
        """8 MiB, and more for objects of more than 10,000 parts."""
        return max(PART_NBYTES, -(-nbytes // _MOST_PARTS))

    def delete(self, keys: Sequence[str]) -> None:
        """See ObjectStore."""
        for at in range(0, len(keys), _DELETED_AT_ONCE):
            remove(self._client, [self._start + key for key in keys[at : at + _DELETED_AT_ONCE]])

    # --------------------------------------------------------------- unfinished

    def unfinished(self) -> list[Unfinished]:
        """See ObjectStore: blobs that have blocks and were never committed."""
        all_names = self._names(
            "uncommittedblobs"
        )  # first, or what is committed now would seem not to be
        names = all_names - self._names("metadata") if all_names else all_names
        return [Unfinished(self._relative(name), "uncommitted blocks") for name in sorted(names)]

    def abort_unfinished(self, upload: Unfinished) -> None:
        """See ObjectStore."""
        drop_blocks(self._client, self._start + upload.key)

    def close(self) -> None:
        """See ObjectStore."""
        self._client.close()

    # ----------------------------------------------------------------- helpers

    def _names(self, include: str) -> set[str]:
        pages = self._pages(self._start, is_flat=True, include=include)
        return {each.name for page in pages for each in page}

    def _pages(
        self, prefix: str, *, is_flat: bool, page_size: int | None = None, include: str = "metadata"
    ) -> Iterator[list[Any]]:
        marker: str | None = None

        async def request(client: Any, _watch: Watch) -> tuple[list[Any], str | None]:
            details = {
                "name_starts_with": prefix,
                "include": [include],
                "results_per_page": page_size,
            }
            paged = client.list_blobs(**details) if is_flat else client.walk_blobs(**details)
            pages = paged.by_page(continuation_token=marker)
            async for page in pages:
                return [each async for each in page], pages.continuation_token
            return [], None

        while True:
            page, marker = self._client.run(request)
            yield page
            if not marker:
                return

    def _relative(self, name: str) -> str:
        if not name.startswith(self._start):
            raise Fault("broken", f"asked for names from {self._start!r} on, got {name!r}")
        return name[len(self._start) :]


async def _read(client: Any, watch: Watch, name: str, start: int, lent: Lent) -> int:
    # Below `download_blob`, which holds whole parts in memory and says nothing until one is there.
    operations = client.get_blob_client(name)._client.blob  # noqa: SLF001
    response, stream = await operations.download(
        range=f"bytes={start}-{start + lent.nbytes - 1}",
        cls=lambda pipeline_response, stream, _headers: (pipeline_response.http_response, stream),
    )
    try:
        expected = _expected(response, start, lent.nbytes)
        got = 0
        async for piece in stream:
            if got + len(piece) > expected:
                raise Fault("broken", f"more than {expected:,} bytes came")
            lent.write(got, piece)
            got += len(piece)
            watch.moved(len(piece))
    finally:
        response.internal_response.close()  # gives back a connection that was read to the end
    if got != expected:
        raise Fault("broken", f"{got:,} of {expected:,} bytes came")
    return got


def _expected(response: Any, start: int, nbytes: int) -> int:
    """How many bytes are to come; checks that they are from where they were asked for."""
    told = response.headers.get("Content-Range", "")
    found = _RANGE.fullmatch(told)
    if response.status_code != 206 or found is None:
        length = response.headers.get("Content-Length")
        if response.status_code == 200 and start == 0 and length and int(length) <= nbytes:
            return int(length)
        raise Fault("broken", f"asked for a range, got HTTP {response.status_code} and {told!r}")
    first, last, size = (int(number) for number in found.groups())
    if first != start or last >= start + nbytes or (last + 1 < min(size, start + nbytes)):
        raise Fault("broken", f"asked for {nbytes:,} bytes from {start:,} on, got {told!r}")
    return last + 1 - start


def _is_folder(properties: Any) -> bool:
    """Whether it is a folder of an account with a hierarchical namespace."""
    metadata = getattr(properties, "metadata", None) or {}
    return str(metadata.get("hdi_isfolder", metadata.get("Hdi_isfolder"))).lower() == "true"


def _entry(properties: Any) -> Entry:
    return Entry(int(properties.size), str(properties.etag or "").strip('"'))
