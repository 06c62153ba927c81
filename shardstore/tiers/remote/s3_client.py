"""Requests to S3, one attempt each: s3fs and aiobotocore, with their own retries off."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

from shardstore.tiers.remote.extras import client_module
from shardstore.tiers.remote.faults import Fault
from shardstore.tiers.remote.lent import Lent
from shardstore.tiers.remote.link import Link, Watch
from shardstore.tiers.remote.s3_errors import s3_fault, secrets_of

T = TypeVar("T")

PIECE_BYTES: Final = 256 << 10
"""What is handed to the connection, or taken from it, at a time."""
_NUM_CONNECTIONS: Final = 64


class S3Client:
    """One bucket's requests. Any thread; connects at the first one."""

    def __init__(self, bucket: str, options: Mapping[str, object], link: Link) -> None:
        """Args as for S3Store.

        Raises:
            ImportError: s3fs is not installed.
            ValueError: s3fs does not take these options.
        """
        s3fs = client_module("s3fs", "s3")
        self.bucket = bucket
        self.link = link
        self._secrets = secrets_of(options)
        ours: dict[str, Any] = {
            **options,
            "asynchronous": False,
            "use_listings_cache": False,
            "skip_instance_cache": True,
            "config_kwargs": _config(options, link),
        }
        try:
            self._fs = s3fs.S3FileSystem(**ours)
        except (TypeError, ValueError, KeyError) as error:
            fault = s3_fault(error, self._secrets)
            raise ValueError(f"s3fs does not take these storage_options: {fault.detail}") from error
        self._fs.retries = 1  # attempts
        self._hooked: object = None

    def call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """Make one request whose answer is small; `operation` and `parameters` as in botocore's client.

        Raises:
            S3Fault: It failed, or the answer is an error.
        """
        return self.run(lambda _watch: self.send(operation, **parameters))

    def upload(self, operation: str, data: memoryview, **parameters: Any) -> dict[str, Any]:
        """Make one request that sends `data`, which is not copied, nor used after this returned.

        Raises:
            S3Fault: It failed, or the answer is an error.
        """
        with Lent(data) as lent:

            def request(watch: Watch) -> Awaitable[dict[str, Any]]:
                return self.send(operation, Body=_Body(lent, watch), **parameters)

            return self.run(request, nbytes=lent.nbytes)

    def run(self, request: Callable[[Watch], Awaitable[T]], *, nbytes: int = 0) -> T:
        """Run a coroutine that makes requests, under the link's deadline.

        Raises:
            Fault: It failed: as S3Fault if the client says so.
        """
        try:
            return self.link.call(self._fs.loop, request, nbytes=nbytes)
        except Fault:
            raise
        except Exception as error:
            raise s3_fault(error, self._secrets) from error

    async def send(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """Make one request, inside `run`."""
        await self._fs.set_session()
        client = await self._fs.get_s3(self.bucket)
        if client is not self._hooked:
            client.meta.events.register("before-send.s3", _about_to_send)
            self._hooked = client
        answer: dict[str, Any] = await self._fs._call_s3(  # noqa: SLF001 - `call_s3` waits without a deadline
            operation, Bucket=self.bucket, **parameters
        )
        return answer

    def close(self) -> None:
        """Close the connections; a request after that opens new ones."""
        creator = getattr(self._fs, "_s3creator", None)
        if creator is not None:
            self.run(lambda _watch: creator.__aexit__(None, None, None))


class _Body:
    """Lent bytes as the client reads them: as a file to sign them, by iteration to send them.

    aiohttp hands each piece of a real file to a thread; iterating costs a tenth of that.
    """

    def __init__(self, lent: Lent, watch: Watch) -> None:
        self._lent = lent
        self._watch = watch
        self._at = 0

    def __len__(self) -> int:
        return self._lent.nbytes

    def __bool__(self) -> bool:
        return True

    def read(self, nbytes: int | None = -1) -> bytes:
        stop = self._lent.nbytes if nbytes is None or nbytes < 0 else self._at + nbytes
        data = self._lent.read(self._at, min(stop, self._lent.nbytes))
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._lent.nbytes}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while data := self.read(PIECE_BYTES):
            yield data
            self._watch.sent(len(data))  # the connection took it, or this would not go on


def _about_to_send(request: Any, **_kwargs: Any) -> None:
    """Send bodies without asking first.

    aiohttp waits for "100 Continue" without end, and not every server or proxy says it.
    """
    if isinstance(request.body, _Body) and "Expect" in request.headers:
        del request.headers["Expect"]


def _config(options: Mapping[str, object], link: Link) -> dict[str, Any]:
    """Settings of botocore's client: the user's win."""
    from botocore.config import Config

    given = options.get("config_kwargs") or {}
    if not isinstance(given, Mapping):
        raise ValueError("storage_options['config_kwargs'] must be a dict")
    ours: dict[str, Any] = {
        "connect_timeout": link.stall_s,
        "read_timeout": None,  # it counts also while a long body goes out; the link's deadline is by progress
        "max_pool_connections": _NUM_CONNECTIONS,
        "retries": {"total_max_attempts": 1},
        # Checksums of whole objects break reads of ranges on some servers, and ours are verified anyway.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    known = {name: value for name, value in ours.items() if name in Config.OPTION_DEFAULTS}
    s3 = {} if _is_plain_http(options) else {"payload_signing_enabled": False}  # TLS guards it
    return {**known, **given, "s3": {**s3, **(given.get("s3") or {})}}


def _is_plain_http(options: Mapping[str, object]) -> bool:
    inner = options.get("client_kwargs") or {}
    endpoints = [
        options.get("endpoint_url"),
        inner.get("endpoint_url") if isinstance(inner, Mapping) else None,
        os.environ.get("AWS_ENDPOINT_URL_S3"),
        os.environ.get("AWS_ENDPOINT_URL"),
    ]
    endpoint = next((each for each in endpoints if each), "https:")
    return options.get("use_ssl") is False or not str(endpoint).startswith("https:")
