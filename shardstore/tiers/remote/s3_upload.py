"""Objects on their way to S3, in parts or whole; nobody sees them before the end."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from shardstore.tiers.remote.s3_client import S3Client
from shardstore.tiers.remote.s3_errors import S3Fault

_MD5_DIGITS: Final = 32


class SmallUpload:
    """A PartUpload of one part: a copy of it is kept until `complete`, which sends it."""

    def __init__(self, client: S3Client, name: str, nbytes: int) -> None:
        """`name` is the whole key."""
        self._client = client
        self._name = name
        self._nbytes = nbytes
        self._data: bytes | None = None if nbytes else b""
        self._is_complete = False

    def put(self, index: int, data: memoryview) -> None:
        """See PartUpload."""
        assert index == 0
        assert len(data) == self._nbytes
        self._data = bytes(data)

    def complete(self) -> None:
        """See PartUpload."""
        if self._is_complete:
            return
        assert self._data is not None, "its part was not put"
        self._client.upload("put_object", memoryview(self._data), Key=self._name)
        self._is_complete = True
        self._data = None

    def abort(self) -> None:
        """See PartUpload."""
        self._data = None


class PartsUpload:
    """A PartUpload as S3's multipart upload."""

    def __init__(self, client: S3Client, name: str, nbytes: int, part_bytes: int) -> None:
        """Begins it: one request. `name` is the whole key."""
        self._client = client
        self._name = name
        self._nbytes = nbytes
        self._part_bytes = part_bytes
        self._tags: dict[int, str] = {}
        self._is_complete = False
        answer = client.call("create_multipart_upload", Key=name)
        self._token: str = answer["UploadId"]

    def put(self, index: int, data: memoryview) -> None:
        """See PartUpload."""
        start = index * self._part_bytes
        assert len(data) == min(self._part_bytes, self._nbytes - start) > 0
        answer = self._client.upload(
            "upload_part", data, Key=self._name, UploadId=self._token, PartNumber=index + 1
        )
        self._tags[index] = answer["ETag"]

    def complete(self) -> None:
        """See PartUpload: if the upload is gone, an object that can only be ours says that it was done."""
        if self._is_complete:
            return
        num_parts = -(-self._nbytes // self._part_bytes)
        assert len(self._tags) == num_parts, "not all parts were put"
        parts = [{"PartNumber": i + 1, "ETag": self._tags[i]} for i in range(num_parts)]
        try:
            self._client.call(
                "complete_multipart_upload",
                Key=self._name,
                UploadId=self._token,
                MultipartUpload={"Parts": parts},
            )
        except S3Fault as fault:
            if not _is_gone(fault) or not self._is_there(fault):
                raise
        self._is_complete = True

    def abort(self) -> None:
        """See PartUpload."""
        if not self._is_complete:
            abort(self._client, self._name, self._token)

    def _is_there(self, gone: S3Fault) -> bool:
        """Whether the object is what these parts make; an error that may pass if it is not (yet)."""
        try:
            found = self._client.call("head_object", Key=self._name)
        except S3Fault as fault:
            if not fault.is_missing_key:
                raise
            found = {}
        if found and found["ContentLength"] == self._nbytes and self._may_be_ours(found):
            return True
        # A server may show an object late: whoever asks again finds it.
        text = f"the upload is gone, and the object is not there: {gone.detail}"
        raise S3Fault("broken", text, gone.status, gone.code) from gone

    def _may_be_ours(self, found: Mapping[str, Any]) -> bool:
        """Compare the tag, where the server makes it as S3 does: the MD5 of the parts' MD5s, and their number."""
        tag = str(found.get("ETag") or "").strip('"')
        tags = [self._tags[index].strip('"') for index in range(len(self._tags))]
        has_scheme = "-" in tag and all(len(each) == _MD5_DIGITS for each in tags)
        is_encrypted = "SSECustomerAlgorithm" in found or "kms" in found.get("ServerSideEncryption", "")  # fmt: skip
        if not has_scheme or is_encrypted:
            return True
        try:
            joined = b"".join(bytes.fromhex(each) for each in tags)
        except ValueError:
            return True
        return tag == f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(tags)}"


def abort(client: S3Client, name: str, token: str) -> None:
    """Drop an upload in parts; that it is gone is fine."""
    try:
        client.call("abort_multipart_upload", Key=name, UploadId=token)
    except S3Fault as fault:
        if not _is_gone(fault):
            raise


def _is_gone(fault: S3Fault) -> bool:
    return fault.code == "NoSuchUpload" or (fault.status == 404 and fault.kind == "refused")
