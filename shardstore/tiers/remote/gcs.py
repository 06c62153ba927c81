"""A folder of a bucket on Google Cloud Storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from shardstore.tiers.remote.faults import Fault
from shardstore.tiers.remote.gcs_client import GCSClient, fault_of_reply, is_missing, object_path
from shardstore.tiers.remote.gcs_upload import ComposedUpload, SmallGCSUpload, owner_of, remove
from shardstore.tiers.remote.lent import Lent
from shardstore.tiers.remote.link import Link
from shardstore.tiers.remote.objects import Entry, Listing, PartUpload, Unfinished

PART_NBYTES: Final = 8 << 20
_MOST_PARTS: Final = 10_000
_DELETED_AT_ONCE: Final = 100


class GCSStore:
    """An ObjectStore on Google Cloud Storage: exact names, no listing from a cache, no retries of its own.

    Parts may be sent in any order: they are objects until the last one is there. Listings leave them out.
    """

    kind = "Google Cloud Storage"
    num_parallel = 12
    may_be_exclusive = True
    is_in_order = False

    def __init__(
        self, bucket: str, prefix: str, *, storage_options: Mapping[str, object], link: Link
    ) -> None:
        """Gets credentials; connects to the bucket at the first request.

        Args:
            bucket: Its name.
            prefix: The root inside the bucket, without a slash at either end; may be empty.
            storage_options: gcsfs's arguments.
            link: Deadlines and progress.

        Raises:
            ImportError: gcsfs is not installed.
            ValueError: gcsfs does not take these options.
            Fault: It cannot get credentials.
        """
        self._client = GCSClient(bucket, storage_options, link)
        self._start = f"{prefix}/" if prefix else ""
        self.location = f"gs://{bucket}/{prefix}" if prefix else f"gs://{bucket}"

    # ------------------------------------------------------------------- check

    def check(self) -> None:
        """See ObjectStore: lists at most one object."""
        params = {"prefix": self._start, "maxResults": "1"}
        self._bucket_must_be_there("GET", "/storage/v1", "/o", params=params)

    def check_writable(self) -> None:
        """See ObjectStore: begins a resumable upload, and cancels it."""
        params = {"uploadType": "resumable", "name": f"{self._start}.shardstore-probe"}
        self._bucket_must_be_there("POST", "/upload/storage/v1", "/o", params=params, body={})

    # ----------------------------------------------------------------- reading

    def listing(self, prefix: str, *, is_flat: bool) -> Listing:
        """See ObjectStore."""
        objects: dict[str, Entry] = {}
        folders: set[str] = set()
        for page in self._pages(self._start + prefix, is_flat=is_flat):
            for each in page.get("items") or ():
                key = self._relative(each["name"])
                if owner_of(key) is None and not key.endswith("/"):  # as consoles make "folders"
                    objects[key] = _entry(each)
            folders.update(self._relative(p).removesuffix("/") for p in page.get("prefixes") or ())
        return Listing(objects, frozenset(folders))

    def entry(self, key: str) -> Entry | None:
        """See ObjectStore."""
        path = object_path(self._start + key)
        params = {"fields": "size,generation"}
        reply = self._client.call("GET", "/storage/v1", path, params=params, accept=(404,))
        if reply.status != 404:
            return _entry(reply.record())
        if is_missing(reply):
            return None
        raise fault_of_reply(reply)

    def get(self, key: str, start: int, into: memoryview) -> int:
        """See ObjectStore."""
        with Lent(into) as lent:
            return self._client.run(
                lambda watch: self._client.read(watch, self._start + key, start, lent),
                nbytes=lent.nbytes,
            )

    # ----------------------------------------------------------------- writing

    def put(self, key: str, data: bytes) -> None:
        """See ObjectStore."""
        self._client.upload(self._writable(key), memoryview(data))

    def create(self, key: str, data: bytes) -> bool:
        """See ObjectStore: only where the name has no generation yet."""
        return self._client.upload_new(self._writable(key), data)

    def begin(self, key: str, nbytes: int, part_bytes: int) -> PartUpload:
        """See ObjectStore; makes no request."""
        name = self._writable(key)
        if nbytes <= part_bytes:
            return SmallGCSUpload(self._client, name)
        return ComposedUpload(self._client, name, nbytes, part_bytes)

    def part_bytes(self, nbytes: int) -> int:
        """8 MiB, and more for objects of more than 10,000 parts."""
        return max(PART_NBYTES, -(-nbytes // _MOST_PARTS))

    def delete(self, keys: Sequence[str]) -> None:
        """See ObjectStore."""
        for at in range(0, len(keys), _DELETED_AT_ONCE):
            remove(self._client, [self._start + key for key in keys[at : at + _DELETED_AT_ONCE]])

    # --------------------------------------------------------------- unfinished

    def unfinished(self) -> list[Unfinished]:
        """See ObjectStore: one for the parts of each upload."""
        found: set[tuple[str, str]] = set()
        for page in self._pages(self._start, is_flat=True):
            for each in page.get("items") or ():
                owner = owner_of(self._relative(each["name"]))
                if owner is not None:
                    found.add(owner)
        return [Unfinished(key, start) for key, start in sorted(found)]

    def abort_unfinished(self, upload: Unfinished) -> None:
        """See ObjectStore."""
        names = [
            key
            for page in self._pages(self._start + upload.token, is_flat=True)
            for each in page.get("items") or ()
            if owner_of(key := self._relative(each["name"])) == (upload.key, upload.token)
        ]
        self.delete(names)

    def close(self) -> None:
        """See ObjectStore."""
        self._client.close()

    # ----------------------------------------------------------------- helpers

    def _pages(self, prefix: str, *, is_flat: bool) -> Iterator[dict[str, Any]]:
        params = {"prefix": prefix, "fields": "items(name,size,generation),prefixes,nextPageToken"}
        if not is_flat:
            params["delimiter"] = "/"
        while True:
            page = self._bucket_must_be_there("GET", "/storage/v1", "/o", params=params).record()
            yield page
            if not page.get("nextPageToken"):
                return
            params["pageToken"] = page["nextPageToken"]

    def _bucket_must_be_there(self, method: str, base: str, path: str, **details: Any) -> Any:
        reply = self._client.call(method, base, path, accept=(404,), **details)
        self._client.check_bucket(reply)
        return reply

    def _relative(self, name: str) -> str:
        if not name.startswith(self._start):
            raise Fault("broken", f"asked for names from {self._start!r} on, got {name!r}")
        return name[len(self._start) :]

    def _writable(self, key: str) -> str:
        if owner_of(key) is not None:
            raise Fault("refused", f"{key!r} is how parts are called until their object is whole")
        return self._start + key


def _entry(record: Mapping[str, Any]) -> Entry:
    return Entry(int(record.get("size", 0)), str(record.get("generation", "")))
