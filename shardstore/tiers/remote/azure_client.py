"""Requests to Azure's blob storage, one attempt each, with the client's own retries off.

Options are adlfs's. Its file system object is not used: it ends by waiting for its loop, which in a forked
child never runs.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

import fsspec.asyn

from shardstore.tiers.remote.extras import client_module
from shardstore.tiers.remote.faults import Fault, FaultKind
from shardstore.tiers.remote.lent import Lent
from shardstore.tiers.remote.link import Link, Watch

T = TypeVar("T")

PIECE_BYTES: Final = 64 << 10
"""What is handed to the connection, or taken from it, at a time: progress is told so often."""
NUM_SMALL: Final = 16
"""Small requests at the same time."""
_USED: Final = (
    "account_name", "account_key", "connection_string", "credential", "sas_token", "client_id", "client_secret",
    "tenant_id", "anon", "account_host",
)  # fmt: skip
_FROM_ENVIRONMENT: Final = (
    "account_name", "account_key", "connection_string", "sas_token", "client_id", "client_secret", "tenant_id", "anon",
)  # fmt: skip
_IGNORED: Final = frozenset({
    "request_session", "socket_timeout", "blocksize", "loop", "asynchronous", "default_fill_cache",
    "default_cache_type", "version_aware", "assume_container_exists", "max_concurrency", "location_mode",
    "timeout", "connection_timeout", "read_timeout", "use_listings_cache", "skip_instance_cache",
    "listings_expiry_time", "max_paths",
})  # fmt: skip
"""What adlfs takes beside, and means nothing here."""
# https://learn.microsoft.com/rest/api/storageservices/blob-service-error-codes
_CODES: Final[dict[str, FaultKind]] = {
    "ContainerNotFound": "no bucket",
    "ContainerDisabled": "no bucket",
    "ContainerBeingDeleted": "no bucket",
    "ServerBusy": "throttled",
    "OperationTimedOut": "slow",
    "InternalError": "broken",
    "AccountIsDisabled": "denied",
    "InvalidAuthenticationInfo": "denied",
    "Md5Mismatch": "broken",
}
_STATUSES: Final[dict[int, FaultKind]] = {
    401: "denied", 403: "denied", 408: "slow", 429: "throttled", 500: "broken", 502: "broken",
    503: "throttled", 504: "broken", 507: "full",
}  # fmt: skip
# By name, of any class that an exception is derived from.
_CLASSES: Final[dict[str, FaultKind]] = {
    "ClientAuthenticationError": "denied",
    "ServiceRequestTimeoutError": "slow",
    "ServiceResponseTimeoutError": "slow",
    "TimeoutError": "slow",
    "IncompleteReadError": "broken",
    "ClientPayloadError": "broken",
    "DecodeError": "broken",
    "ServiceRequestError": "unreachable",
    "ServiceResponseError": "unreachable",
    "ClientConnectionError": "unreachable",
    "ConnectionError": "unreachable",
}
_SIGNATURE: Final = re.compile(r"(?<=sig=)[^&\s'\"]+", re.IGNORECASE)

_inherited: list[object] = []


class AzureFault(Fault):
    """A fault with what the server answered."""

    def __init__(self, kind: FaultKind, detail: str, status: int = 0, code: str = "") -> None:
        """`status` is HTTP's, 0 without an answer; `code` Azure's."""
        super().__init__(kind, detail)
        self.status = status
        self.code = code

    @property
    def is_missing_blob(self) -> bool:
        """Whether the answer is that there is no such blob."""
        return self.status == 404 and self.kind != "no bucket"


class AzureClient:
    """One container's requests. Any thread; a forked child gets a client of its own."""

    def __init__(self, container: str, options: Mapping[str, object], link: Link) -> None:
        """Args as for AzureStore.

        Raises:
            ImportError: adlfs is not installed.
            ValueError: adlfs does not take these options, or they lead to no account.
        """
        for module in ("azure.storage.blob.aio", "azure.identity.aio", "aiohttp"):
            client_module(module, "azure")
        self._link = link
        self._container = container
        self._options = _resolved(options)
        self._secrets = [
            value
            for name in ("account_key", "connection_string", "sas_token", "client_secret", "credential")
            if isinstance(value := self._options.get(name), str) and value
        ]  # fmt: skip
        self._pid = -1
        self._client: Any = None
        self._credential: Any = None
        self._own()

    def run(self, request: Callable[[Any, Watch], Awaitable[T]], *, nbytes: int = 0) -> T:
        """Run a coroutine that makes requests with the container's client, under the link's deadline.

        Raises:
            Fault: It failed: as AzureFault if the client says so.
        """
        client = self._own()
        try:
            return self._link.call(
                fsspec.asyn.get_loop(), lambda watch: request(client, watch), nbytes=nbytes
            )
        except (Fault, FileNotFoundError):
            raise
        except Exception as error:
            raise self._fault_of(error) from error

    def each(self, request: Callable[[Any], Awaitable[object]], names: list[str]) -> None:
        """Make a small request for each of some blobs, many at the same time."""

        async def requests(client: Any, watch: Watch) -> None:
            free = asyncio.Semaphore(NUM_SMALL)

            async def one(name: str) -> None:
                async with free:
                    await request(client.get_blob_client(name))
                    watch.last = time.monotonic()

            await asyncio.gather(*map(one, names))

        if names:
            self.run(requests)

    def close(self) -> None:
        """Close the connections; a request after that opens new ones."""
        if self._pid != os.getpid():
            return

        async def end(client: Any, _watch: Watch) -> None:
            await client.close()
            if self._credential is not None:
                await self._credential.close()

        self.run(end)
        self._pid = -1
        self._client = self._credential = None

    def _own(self) -> Any:
        """The client of this process; a parent's is kept, as its end would disturb the parent's sockets."""
        if self._pid != os.getpid():
            _inherited.append((self._client, self._credential))
            try:
                self._client = self._made()
            except (ValueError, TypeError, AttributeError) as error:
                said = self._said(error)
                raise ValueError(f"storage_options do not lead to an account: {said}") from error
            self._pid = os.getpid()
        return self._client

    def _made(self) -> Any:
        from azure.storage.blob.aio import ContainerClient

        ours: dict[str, Any] = {
            "retry_total": 0,
            "connection_timeout": self._link.stall_s,
            # It would count from the last byte that came, also while a long body goes out.
            "read_timeout": None,
            "connection_data_block_size": PIECE_BYTES,
        }
        options = self._options
        if options.get("connection_string"):
            return ContainerClient.from_connection_string(
                options["connection_string"], self._container, **ours
            )
        if not options.get("account_name"):
            raise ValueError("give a connection_string or an account_name")
        host = options.get("account_host") or f"{options['account_name']}.blob.core.windows.net"
        credential = options.get("credential") or options.get("account_key") or options.get("sas_token")  # fmt: skip
        if not credential and options.get("client_id") and options.get("client_secret"):
            from azure.identity.aio import ClientSecretCredential

            credential = self._credential = ClientSecretCredential(
                str(options.get("tenant_id")), options["client_id"], options["client_secret"]
            )
        elif not credential and not options.get("anon"):
            from azure.identity.aio import DefaultAzureCredential

            chosen = {name: value for name, value in options.items() if name.startswith("exclude_")}
            credential = self._credential = DefaultAzureCredential(**chosen)
        return ContainerClient(f"https://{host}", self._container, credential=credential, **ours)

    def _fault_of(self, error: Exception) -> AzureFault:
        status = int(getattr(error, "status_code", None) or 0)
        code = getattr(error, "error_code", None) or ""
        response = getattr(error, "response", None)
        if not code and response is not None:
            code = response.headers.get("x-ms-error-code") or ""
        code = str(getattr(code, "value", code))
        kind = _CODES.get(code) or _STATUSES.get(status)
        if kind is None and not status:
            classes = [base.__name__ for base in type(error).__mro__]
            kind = next((_CLASSES[name] for name in classes if name in _CLASSES), "broken")
        said = self._said(error)
        return AzureFault(kind or "refused", f"{code}: {said}" if code else said, status, code)

    def _said(self, error: Exception) -> str:
        lines = str(getattr(error, "message", None) or error).strip().splitlines()
        said = lines[0][:300] if lines else type(error).__name__
        for secret in self._secrets:
            said = said.replace(secret, "***")
        return _SIGNATURE.sub("***", said)


async def pieces(lent: Lent, watch: Watch) -> AsyncIterator[bytes]:
    """Lent bytes as the client sends them."""
    for at in range(0, lent.nbytes, PIECE_BYTES):
        piece = lent.read(at, min(at + PIECE_BYTES, lent.nbytes))
        yield piece
        watch.sent(len(piece))  # the connection took it, or this would not go on


def _resolved(options: Mapping[str, object]) -> dict[str, Any]:
    """The options, and what the environment adds to them, as adlfs has it."""
    unknown = sorted(
        name
        for name in options
        if name not in _USED and name not in _IGNORED and not name.startswith("exclude_")
    )
    if unknown:
        raise ValueError(
            f"storage_options for az:// do not take {', '.join(unknown)}; they take {', '.join(_USED)}"
        )
    found: dict[str, Any] = {
        name: value for name, value in options.items() if name not in _IGNORED and value is not None
    }
    for name, value in _environment():
        found.setdefault(name, value)
    return found


def _environment() -> Iterator[tuple[str, object]]:
    for name in _FROM_ENVIRONMENT:
        value = os.environ.get(f"AZURE_STORAGE_{name.upper()}")
        if value and name == "anon":
            yield name, value.lower() not in ("false", "0", "f")
        elif value:
            yield name, value
