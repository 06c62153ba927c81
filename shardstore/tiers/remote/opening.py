"""From a URL to its tier: the client by protocol, with the user's options, and as little else as possible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from shardstore.errors import TierError, shown
from shardstore.tiers.addresses import split_url
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.remote.link import Link
from shardstore.tiers.remote.objects import ObjectStore
from shardstore.tiers.remote.requests import Patience, Requests
from shardstore.tiers.remote.tier import RemoteTier

_EXTRAS: Final[dict[str, str]] = {
    "s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure",
    "sftp": "sftp", "ssh": "sftp",
}  # fmt: skip
_MAX_STALL_S: Final = 60.0
_MAX_FORE_S: Final = 60.0


def open_remote(
    location: str,
    *,
    ops: FileOps,
    storage_options: Mapping[str, object] | None = None,
    timeout_s: float = 600.0,
) -> RemoteTier:
    """The tier at a resolved URL; nothing is asked of it yet.

    Args:
        location: See `resolve_address`.
        ops: Passed before each request.
        storage_options: For the client; never stored nor shown.
        timeout_s: Of the store: a fault that passes is waited for, but not for longer.

    Raises:
        ValueError: The protocol is not known, or an option is wrong.
        TierError: The client is not installed.
    """

    def moved(_nbytes: int) -> None:
        requests.waiting()  # one who waits for this rank sees that it is at work

    link = Link(stall_s=min(_MAX_STALL_S, max(1.0, timeout_s / 6)), moved=moved)
    patience = Patience(fore_s=min(_MAX_FORE_S, timeout_s / 3), behind_s=timeout_s * 0.8)
    store = open_store(location, dict(storage_options or {}), link)
    requests = Requests(store, name="root", ops=ops, patience=patience)
    return RemoteTier(requests, visible_s=min(30.0, timeout_s / 4))


def open_store(location: str, options: dict[str, Any], link: Link) -> ObjectStore:
    """The client for a resolved URL, with these storage_options; see `open_remote`."""
    protocol, rest = split_url(location)
    bucket, _, prefix = rest.partition("/")
    if protocol in _EXTRAS and not bucket:
        raise ValueError(
            f"root={location!r} is no URL that can be used: no bucket or host comes after ://"
        )
    try:
        if protocol in ("s3", "s3a"):
            from shardstore.tiers.remote.s3 import S3Store

            return S3Store(bucket, prefix, storage_options=options, link=link)
        if protocol in ("gs", "gcs"):
            from shardstore.tiers.remote.gcs import GCSStore

            return GCSStore(bucket, prefix, storage_options=options, link=link)
        if protocol in ("az", "abfs", "abfss"):
            from shardstore.tiers.remote.azure import AzureStore

            container, at, account = bucket.partition("@")
            if at:
                options.setdefault("account_name", account.split(".")[0])
            return AzureStore(container, prefix, storage_options=options, link=link)
        if protocol in ("sftp", "ssh"):
            from shardstore.tiers.remote.sftp import SFTPStore

            host, given = _split_host(bucket, location)
            return SFTPStore(host, f"/{prefix}", storage_options={**given, **options}, link=link)
        return _open_any(protocol, location, options, link)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        remedy = (
            f"pip install 'shardstore[{extra}]'"
            if extra
            else f"install what fsspec needs for {protocol}://: {error}"
        )
        raise TierError(
            f"root: {protocol}:// needs a client that is not installed: {remedy}",
            tier="root", key=location, operation="open",
        ) from error  # fmt: skip
    except TypeError as error:
        raise ValueError(
            f"storage_options={shown(sorted(options))} do not fit {protocol}://: {error}"
        ) from error


def _split_host(authority: str, location: str) -> tuple[str, dict[str, Any]]:
    """Host, with user and port as options, of `user@host:port`; IPv6 addresses are in brackets."""
    try:
        parts = urlsplit(f"//{authority}")
        port = parts.port
    except ValueError as error:
        raise ValueError(f"root={location!r} is no URL that can be used: {error}") from None
    given: dict[str, Any] = {}
    if parts.username:
        given["username"] = parts.username
    if port is not None:
        given["port"] = port
    return parts.hostname or "", given


def _open_any(protocol: str, location: str, options: dict[str, Any], link: Link) -> ObjectStore:
    """Any other file system that fsspec knows."""
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    from shardstore.tiers.remote.generic import GenericStore
    from shardstore.tiers.remote.memory import MemoryStore

    try:
        client = fsspec.get_filesystem_class(protocol)
    except ValueError as error:
        raise ValueError(
            f"root={location!r}: no storage is known by {protocol}://. Known are s3://, gs://, az://, "
            "sftp://, and what fsspec has clients for"
        ) from error
    if client is MemoryFileSystem:
        # It takes a name with :: for a chain of URLs, and leaves it as it is.
        root = "/" + split_url(location)[1].strip("/")
        return MemoryStore(client(**options), root, location=location, link=link)
    try:
        fs = client(**{"skip_instance_cache": True, "use_listings_cache": False, **options})
    except TypeError:  # some take no option that they do not know
        fs = client(**{"skip_instance_cache": True, **options})
    return GenericStore(fs, _path_of(fs, location), kind=protocol, location=location, link=link)


def _path_of(fs: Any, location: str) -> str:
    """What the client itself calls the root."""
    return str(fs._strip_protocol(location)).rstrip("/")  # noqa: SLF001 - public in all but name
