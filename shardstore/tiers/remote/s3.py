"""A folder of a bucket on S3, or on what speaks its protocol."""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from shardstore.tiers.remote.lent import Lent
from shardstore.tiers.remote.link import Link, Watch
from shardstore.tiers.remote.objects import Entry, Listing, PartUpload, Unfinished
from shardstore.tiers.remote.s3_client import PIECE_BYTES, S3Client
from shardstore.tiers.remote.s3_errors import S3Fault, s3_fault
from shardstore.tiers.remote.s3_upload import PartsUpload, SmallUpload, abort

PART_BYTES: Final = 8 << 20
_MOST_PARTS: Final = 10_000
_DELETED_AT_ONCE: Final = 1_000
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_PROBE: Final = ".shardstore-probe"


class S3Store:
    """An ObjectStore on S3: exact buckets and keys, no listing from a cache, no retries of its own.

    An object that was put whole or completed is visible at once and whole; parts are not seen before.
    """

    kind = "S3"
    num_parallel = 12
    may_be_exclusive = True
    is_in_order = False

    def __init__(
        self, bucket: str, prefix: str, *, storage_options: Mapping[str, object], link: Link
    ) -> None:
        """Connects at the first request.

        Args:
            bucket: Its name, or the ARN of an access point.
            prefix: The root inside the bucket, without a slash at either end; may be empty.
            storage_options: s3fs's arguments; they win over ours.
            link: Deadlines and progress.

        Raises:
            ImportError: s3fs is not installed.
            ValueError: s3fs does not take these options.
        """
        self._client = S3Client(bucket, storage_options, link)
        self._start = f"{prefix}/" if prefix else ""
        self.location = f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"
        self._has_exclusive_put = True
        self._has_batch_delete = True

    def check(self) -> None:
        """See ObjectStore."""
        self._client.call("list_objects_v2", Prefix=self._start, MaxKeys=1)

    def check_writable(self) -> None:
        """See ObjectStore: begins an upload in parts, and drops it."""
        answer = self._client.call("create_multipart_upload", Key=self._start + _PROBE)
        self.abort_unfinished(Unfinished(_PROBE, answer["UploadId"]))

    # ----------------------------------------------------------------- looking

    def listing(self, prefix: str, *, is_flat: bool) -> Listing:
        """See ObjectStore."""
        objects: dict[str, Entry] = {}
        folders: set[str] = set()
        parameters = {"Prefix": self._start + prefix} | ({} if is_flat else {"Delimiter": "/"})
        for page in self._pages("list_objects_v2", parameters):
            for each in page.get("Contents") or ():
                if each["Key"] != self._start:  # consoles make such an object as "the folder"
                    objects[self._relative(each["Key"])] = _entry(each["Size"], each)
            for each in page.get("CommonPrefixes") or ():
                folders.add(self._relative(each["Prefix"]).removesuffix("/"))
        return Listing(objects, frozenset(folders))

    def entry(self, key: str) -> Entry | None:
        """See ObjectStore."""
        try:
            answer = self._client.call("head_object", Key=self._start + key)
        except S3Fault as fault:
            if fault.is_missing_key:
                return None
            raise
        return _entry(answer["ContentLength"], answer)

    def unfinished(self) -> list[Unfinished]:
        """See ObjectStore; none where the server cannot list them."""
        found: list[Unfinished] = []
        try:
            for page in self._pages("list_multipart_uploads", {"Prefix": self._start}):
                found += [
                    Unfinished(self._relative(each["Key"]), each["UploadId"])
                    for each in page.get("Uploads") or ()
                ]
        except S3Fault as fault:
            # rclone says NoSuchUpload where there are none.
            if not (fault.is_not_implemented or fault.code == "NoSuchUpload"):
                raise
        return found

    # ----------------------------------------------------------------- reading

    def get(self, key: str, start: int, into: memoryview) -> int:
        """See ObjectStore."""
        with Lent(into) as lent:
            try:
                return self._client.run(
                    lambda watch: self._read(key, start, lent, watch), nbytes=lent.nbytes
                )
            except S3Fault as fault:
                if fault.is_missing_key:
                    where = f"{self.location}/{key}"
                    raise FileNotFoundError(errno.ENOENT, "no such object", where) from fault
                if fault.status == 416 and (fault.size is None or fault.size <= start):
                    return 0
                raise

    async def _read(self, key: str, start: int, lent: Lent, watch: Watch) -> int:
        asked = f"bytes={start}-{start + lent.nbytes - 1}"
        answer = await self._client.send("get_object", Key=self._start + key, Range=asked)
        body = answer["Body"]
        try:
            is_whole, expected = _answered_range(answer, start, lent.nbytes)
            got = 0
            while got < expected:
                piece = await body.read(PIECE_BYTES)
                if not piece:
                    raise S3Fault("broken", f"the answer ended after {got} of {expected} bytes")
                if len(piece) > expected - got:
                    if not is_whole:
                        raise S3Fault("broken", f"the answer is longer than {expected} bytes")
                    piece = piece[: expected - got]
                lent.write(got, piece)
                got += len(piece)
                watch.moved(len(piece))
            if not is_whole and await body.read(1):
                raise S3Fault("broken", f"the answer is longer than {expected} bytes")
            return got
        finally:
            body.close()  # gives back a connection that was read to the end, else drops it

    # ----------------------------------------------------------------- writing

    def put(self, key: str, data: bytes) -> None:
        """See ObjectStore."""
        self._client.upload("put_object", memoryview(data), Key=self._start + key)

    def create(self, key: str, data: bytes) -> bool:
        """See ObjectStore: If-None-Match; without it where the server refuses to know it."""
        if self._has_exclusive_put:
            view = memoryview(data)
            try:
                self._client.upload("put_object", view, Key=self._start + key, IfNoneMatch="*")
                return True
            except S3Fault as fault:
                if fault.status == 412 or fault.code == "PreconditionFailed":
                    return False
                if not fault.is_not_implemented:
                    raise
            self._has_exclusive_put = False
        self.put(key, data)
        return True

    def begin(self, key: str, nbytes: int, part_bytes: int) -> PartUpload:
        """See ObjectStore. Parts are all of one size but the last, as R2 wants it."""
        if nbytes <= min(part_bytes, PART_BYTES):
            return SmallUpload(self._client, self._start + key, nbytes)
        return PartsUpload(self._client, self._start + key, nbytes, part_bytes)

    def part_bytes(self, nbytes: int) -> int:
        """See ObjectStore: S3 takes 10,000 parts."""
        return max(PART_BYTES, -(-nbytes // _MOST_PARTS))

    # ---------------------------------------------------------------- removing

    def delete(self, keys: Sequence[str]) -> None:
        """See ObjectStore."""
        for at in range(0, len(keys), _DELETED_AT_ONCE):
            names = [self._start + key for key in keys[at : at + _DELETED_AT_ONCE]]
            if not (self._has_batch_delete and self._deleted_together(names)):
                self._delete_each(names)

    def _deleted_together(self, names: list[str]) -> bool:
        """Delete with one request; False where that is not to be had."""
        wanted = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        try:
            answer = self._client.call("delete_objects", Delete=wanted)
        except S3Fault as fault:
            # Some servers lack it, and some want a Content-MD5 that newer clients do not send.
            if fault.kind != "refused":
                raise
            self._has_batch_delete = False
            return False
        failed = [e for e in answer.get("Errors") or () if e.get("Code") != "NoSuchKey"]
        if not failed:
            return True
        if len(failed) == len(names) and all(e.get("Code") == "NotImplemented" for e in failed):
            self._has_batch_delete = False
        return False  # one by one: what cannot be deleted says why

    def _delete_each(self, names: list[str]) -> None:
        for at in range(0, len(names), self.num_parallel):
            self._delete_batch(names[at : at + self.num_parallel])

    def _delete_batch(self, names: list[str]) -> None:
        async def request(_watch: Watch) -> None:
            deletes = [self._client.send("delete_object", Key=name) for name in names]
            for each in await asyncio.gather(*deletes, return_exceptions=True):
                if isinstance(each, Exception) and not s3_fault(each, frozenset()).is_missing_key:
                    raise each

        self._client.run(request)

    def abort_unfinished(self, upload: Unfinished) -> None:
        """See ObjectStore."""
        abort(self._client, self._start + upload.key, upload.token)

    def close(self) -> None:
        """See ObjectStore."""
        self._client.close()

    # --------------------------------------------------------------------- own

    def _pages(self, operation: str, parameters: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """All answers of a listing."""
        marks = {"NextContinuationToken": "ContinuationToken", "NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"}  # fmt: skip
        at: dict[str, str] = {}
        while True:
            page = self._client.call(operation, **parameters, **at)
            yield page
            if not page.get("IsTruncated"):
                return
            following = {ours: page[theirs] for theirs, ours in marks.items() if page.get(theirs)}
            if not following or following == at:
                raise S3Fault("broken", f"{operation} says there is more, and not where")
            at = following

    def _relative(self, name: str) -> str:
        if not name.startswith(self._start):
            raise S3Fault("broken", f"asked for {self._start!r}, the server listed {name!r}")
        return name[len(self._start) :]


def _entry(nbytes: int, described: Mapping[str, Any]) -> Entry:
    return Entry(nbytes, str(described.get("ETag") or "").strip('"'))


def _answered_range(answer: Mapping[str, Any], start: int, nbytes: int) -> tuple[bool, int]:
    """Whether the body may go on beyond what was asked for, and how many bytes of it are ours.

    A range must be the one that was asked for, up to the object's end. Some servers send it with status
    200, and some send the whole object: without a Content-Range nothing but a body from 0 on can be
    told from another one.
    """
    length = int(answer["ContentLength"])
    said = answer.get("ContentRange")
    if not said:
        if answer["ResponseMetadata"]["HTTPStatusCode"] == 206 or start > 0:
            raise S3Fault("broken", f"asked for bytes from {start} on, got bytes from nobody knows where")  # fmt: skip
        return length > nbytes, min(length, nbytes)
    match = _RANGE.fullmatch(said)
    first, last, total = match.groups() if match else ("", "", "")
    count = int(last) + 1 - start if match else 0
    is_right = match and int(first) == start and (count == nbytes or (0 < count < nbytes and total == str(start + count)))  # fmt: skip
    if not is_right or length != count:
        raise S3Fault("broken", f"asked for {nbytes} bytes from {start} on, got {length} bytes as {said!r}")  # fmt: skip
    return False, count
