"""Requests to Google Cloud Storage's JSON API, one attempt each.

gcsfs brings credentials, endpoints and the session; its own requests are repeated up to six times with
pauses, and hold whole bodies in memory, so they are not used.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

from shardstore.tiers.remote.extras import client_module
from shardstore.tiers.remote.faults import Fault, FaultKind
from shardstore.tiers.remote.lent import Lent
from shardstore.tiers.remote.link import Link, Watch

T = TypeVar("T")

PIECE_BYTES: Final = 64 << 10
"""What is handed to the connection, or taken from it, at a time: progress is told so often."""
_UPLOAD: Final = "/upload/storage/v1"
NUM_SMALL: Final = 16
"""Small requests at the same time."""
_STATUSES: Final[dict[int, FaultKind]] = {
    401: "denied", 403: "denied", 408: "slow", 429: "throttled", 500: "broken", 502: "broken",
    503: "throttled", 504: "broken", 507: "full",
}  # fmt: skip
_RATE: Final = re.compile(r"rate ?limit", re.IGNORECASE)
_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")

_inherited: list[object] = []


@dataclass(frozen=True, slots=True)
class Reply:
    """What the server answered to a request whose answer is small."""

    status: int
    content: bytes
    headers: Mapping[str, str]

    def record(self) -> dict[str, Any]:
        """The answer as JSON.

        Raises:
            Fault: "broken": it is none.
        """
        try:
            found = json.loads(self.content)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise Fault("broken", f"the answer is no JSON object: {self.content[:80]!r}")
        return found


class GCSClient:
    """One bucket's requests. Any thread; a forked child gets a client of its own."""

    def __init__(self, bucket: str, options: Mapping[str, object], link: Link) -> None:
        """Args as for GCSStore.

        Raises:
            ImportError: gcsfs is not installed.
            ValueError: gcsfs does not take these options.
            Fault: It cannot get credentials.
        """
        core = client_module("gcsfs.core", "gcs")
        self._aiohttp: Any = client_module("aiohttp", "gcs")
        self._yarl: Any = client_module("yarl", "gcs")
        # Not `gcsfs.GCSFileSystem`: that one asks about the bucket by gRPC first, in vain for minutes
        # where there is only the JSON API.
        self._make: Callable[..., Any] = core.GCSFileSystem
        self._link = link
        self._bucket = bucket
        self._options = {
            **options,
            "asynchronous": False,
            "use_listings_cache": False,
            "skip_instance_cache": True,
        }
        self._pid = -1
        self._fs: Any = None
        self._own()

    def run(self, request: Callable[[Watch], Awaitable[T]], *, nbytes: int = 0) -> T:
        """Run a coroutine that makes requests, under the link's deadline.

        Raises:
            Fault: It failed.
        """
        fs = self._own()
        try:
            return self._link.call(fs.loop, request, nbytes=nbytes)
        except (Fault, FileNotFoundError):
            raise
        except Exception as error:
            raise self._fault_of(error) from error

    def call(self, method: str, base: str, path: str, **details: Any) -> Reply:
        """Make one request whose answer is small; `details` as for `send`."""
        return self.run(lambda watch: self.send(watch, method, base, path, **details))

    def upload(self, name: str, data: memoryview) -> Reply:
        """Store an object in one request; `data` is not copied, nor used after this returned.

        Raises:
            Fault: It failed, or the server stored another number of bytes.
        """
        params = {"uploadType": "media", "name": name}
        with Lent(data) as lent:
            reply = self.run(
                lambda watch: self.send(
                    watch, "POST", _UPLOAD, "/o", params=params, lent=lent, accept=(404,)
                ),
                nbytes=lent.nbytes,
            )
        self.check_bucket(reply)
        check_size(reply.record(), lent.nbytes)
        return reply

    def upload_new(self, name: str, data: bytes) -> bool:
        """Store a small object unless there is one: False then.

        Raises:
            Fault: It failed, or the server stored another number of bytes.
        """
        # With its name in the body: fake-gcs-server looks at conditions only there.
        params = {"uploadType": "multipart", "ifGenerationMatch": "0"}
        mark = secrets.token_hex(16)
        head = f"--{mark}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps({'name': name})}\r\n--{mark}\r\nContent-Type: application/octet-stream\r\n\r\n"
        whole = head.encode() + data + f"\r\n--{mark}--\r\n".encode()
        kind = f"multipart/related; boundary={mark}"
        with Lent(memoryview(whole)) as lent:
            reply = self.run(
                lambda watch: self.send(watch, "POST", _UPLOAD, "/o", params=params, lent=lent, kind=kind, accept=(404, 412)),
                nbytes=lent.nbytes,
            )  # fmt: skip
        self.check_bucket(reply)
        if reply.status == 412:
            return False
        check_size(reply.record(), len(data))
        return True

    async def send(
        self,
        watch: Watch,
        method: str,
        base: str,
        path: str = "",
        *,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
        lent: Lent | None = None,
        kind: str = "application/octet-stream",
        accept: tuple[int, ...] = (),
    ) -> Reply:
        """Make one request, inside `run`.

        Args:
            watch: Hears of the bytes that were sent, and that an answer came.
            method: GET and so on.
            base: What the path begins with; for `/upload/...` the bucket is put in between.
            path: In the bucket.
            params: The query.
            body: Sent as JSON.
            lent: Sent as it is.
            kind: The type of that.
            accept: Statuses from 400 on that are answers.
        """
        data: Any = None
        headers = {}
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        elif lent is not None:
            headers = {
                "Content-Type": kind,
                "Content-Length": str(lent.nbytes),
            }
            data = _pieces(lent, watch)
        async with await self._open(method, base, path, params, headers, data) as answer:
            content = await answer.read()
            watch.last = time.monotonic()
            reply = Reply(answer.status, content, answer.headers)
        if reply.status >= 400 and reply.status not in accept:
            raise fault_of_reply(reply)
        return reply

    async def read(self, watch: Watch, name: str, start: int, lent: Lent) -> int:
        """Fetch a range of an object, inside `run`.

        Raises:
            FileNotFoundError: There is no such object.
            Fault: It failed, or something else than the range came.
        """
        headers = {
            "Range": f"bytes={start}-{start + lent.nbytes - 1}",
            "Accept-Encoding": "identity",
        }
        async with await self._open("GET", "/storage/v1", f"/o/{quote(name, safe='')}", {"alt": "media"}, headers, None) as answer:  # fmt: skip
            if answer.status == 416:
                return 0
            if answer.status >= 400:
                reply = Reply(answer.status, await answer.content.read(1 << 16), answer.headers)
                if is_missing(reply):
                    raise FileNotFoundError(name)
                raise fault_of_reply(reply)
            expected = _expected(answer, start, lent.nbytes)
            got = 0
            async for piece in answer.content.iter_chunked(PIECE_BYTES):
                if got + len(piece) > expected:
                    raise Fault("broken", f"more than {expected:,} bytes came")
                lent.write(got, piece)
                got += len(piece)
                watch.moved(len(piece))
            if got != expected:
                raise Fault("broken", f"{got:,} of {expected:,} bytes came")
            return got

    def check_bucket(self, reply: Reply) -> None:
        """For answers to requests that name no object yet: nothing else than the bucket can be missing.

        Raises:
            Fault: "no bucket".
        """
        if reply.status == 404:
            raise Fault("no bucket", f"there is no bucket {self._bucket}")

    def close(self) -> None:
        """Close the connections; a request after that opens new ones."""
        if self._pid != os.getpid():
            return
        session, self._fs._session = self._fs._session, None  # noqa: SLF001 - it has no other end
        if session is not None:
            self.run(lambda _watch: session.close())

    async def _open(
        self,
        method: str,
        base: str,
        path: str,
        params: Mapping[str, str] | None,
        headers: Mapping[str, str],
        data: Any,
    ) -> Any:
        fs = self._fs
        # It may ask for a new token, and does that on the thread it is called from.
        await asyncio.to_thread(fs.credentials.maybe_refresh)
        query = fs._get_params(dict(params or {}))  # noqa: SLF001 - who pays
        url = f"{fs._location}{base}/b/{quote(self._bucket, safe='')}{path}?{urlencode(query, quote_via=quote)}"  # noqa: SLF001  # fmt: skip
        session = await fs._set_session()  # noqa: SLF001 - with the client's certificate, if there is one
        return await session.request(
            method,
            self._yarl.URL(url, encoded=True),  # else some names would be others
            headers=fs._get_headers(headers),  # noqa: SLF001
            data=data,
            # Not `sock_read`: it counts from the last byte that came, also while a long body goes out.
            timeout=self._aiohttp.ClientTimeout(total=None, sock_connect=self._link.stall_s),
        )

    def _own(self) -> Any:
        """The client of this process; a parent's is kept, as its end would disturb the parent's sockets."""
        if self._pid != os.getpid():
            _inherited.append(self._fs)
            try:
                self._fs = self._make(**self._options)
            except (TypeError, ValueError, AttributeError) as error:
                said = self._said(error)
                raise ValueError(f"gcsfs does not take these storage_options: {said}") from error
            except Exception as error:
                raise Fault("denied", f"no credentials: {self._said(error)}") from error
            self._pid = os.getpid()
        return self._fs

    def _fault_of(self, error: Exception) -> Fault:
        names = {base.__name__ for base in type(error).__mro__}
        said = self._said(error)
        if names & {"TimeoutError", "Timeout"}:
            return Fault("slow", said)
        if names & {"ClientPayloadError", "ContentLengthError", "TransferEncodingError"}:
            return Fault("broken", said)
        if names & {"ClientConnectorCertificateError", "InvalidURL"}:
            return Fault("refused", said)
        if names & {"ConnectionError", "ClientConnectionError", "ClientOSError", "TransportError", "ClientError"}:  # fmt: skip
            return Fault("unreachable", said)
        if names & {"GoogleAuthError", "HttpError", "NonRetryableError"}:
            return Fault("denied", said)
        return Fault("broken", said)

    def _said(self, error: Exception) -> str:
        lines = str(error).strip().splitlines()
        said = lines[0][:300] if lines else type(error).__name__
        token = self._options.get("token")
        return said.replace(token, "***") if isinstance(token, str) and len(token) > 16 else said


def object_path(name: str) -> str:
    """Where an object is in its bucket."""
    return f"/o/{quote(name, safe='')}"


def check_size(record: Mapping[str, Any], nbytes: int) -> None:
    """Compare what the server says it stored.

    Raises:
        Fault: "broken": another number of bytes.
    """
    if str(record.get("size", "0")) != str(nbytes):
        raise Fault("broken", f"the server stored {record.get('size')} of {nbytes} bytes")


def is_missing(reply: Reply) -> bool:
    """Whether it is the object that is not there, and not the bucket."""
    return reply.status == 404 and not _says_no_bucket(reply)


def fault_of_reply(reply: Reply) -> Fault:
    """What an answer that is an error means."""
    said = _message(reply)
    if reply.status == 404 and _says_no_bucket(reply):
        return Fault("no bucket", said)
    if reply.status == 403 and _RATE.search(reply.content[:4096].decode(errors="replace")):
        return Fault("throttled", said)
    return Fault(_STATUSES.get(reply.status, "refused"), f"{said} (HTTP {reply.status})")


def _says_no_bucket(reply: Reply) -> bool:
    said = reply.content[:4096].decode(errors="replace").lower()
    return "bucket" in said and ("not exist" in said or "not found" in said)


def _message(reply: Reply) -> str:
    try:
        error = json.loads(reply.content)["error"]
        said = error if isinstance(error, str) else error["message"]
    except (ValueError, KeyError, TypeError):
        said = reply.content.decode(errors="replace")
    lines = str(said).strip().splitlines()
    return lines[0][:300] if lines else "no reason given"


def _expected(answer: Any, start: int, nbytes: int) -> int:
    """How many bytes are to come; checks that they are from where they were asked for."""
    if answer.status == 206:
        found = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if found is None or int(found[1]) != start or int(found[2]) >= start + nbytes:
            wrong = answer.headers.get("Content-Range")
            raise Fault("broken", f"asked for {nbytes:,} bytes from {start:,} on, got {wrong!r}")
        got = int(found[2]) + 1 - start
        if got < nbytes and found[3] != "*" and int(found[2]) + 1 != int(found[3]):
            raise Fault("broken", f"asked for {nbytes:,} bytes, got {got:,} from inside the object")
        return got
    length = answer.headers.get("Content-Length")
    if answer.status == 200 and start == 0 and length is not None and int(length) <= nbytes:
        return int(length)
    raise Fault("broken", f"asked for a range, got the whole object (HTTP {answer.status})")


async def _pieces(lent: Lent, watch: Watch) -> AsyncIterator[bytes]:
    for at in range(0, lent.nbytes, PIECE_BYTES):
        piece = lent.read(at, min(at + PIECE_BYTES, lent.nbytes))
        yield piece
        watch.sent(len(piece))  # the connection took it, or this would not go on
