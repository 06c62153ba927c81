"""Clients of remote storage that begin at once: an S3 client parses its API's description each time."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

_CLIENTS = {"s3": "s3fs", "sftp": "paramiko", "gs": "gcsfs", "az": "azure.storage.blob.aio"}
_MODULES = {"gs": "gcs", "az": "azure"}


def client_options(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """`storage_options` for this process: with what was loaded already."""
    return {**options, **({"session": fast_session()} if url.startswith("s3://") else {})}


def warm_client(url: str) -> None:
    """Load what clients need, before a fork."""
    protocol = url.partition(":")[0]
    importlib.import_module("shardstore.tiers.remote.opening")
    importlib.import_module(f"shardstore.tiers.remote.{_MODULES.get(protocol, protocol)}")
    if protocol in _CLIENTS:
        importlib.import_module(_CLIENTS[protocol])
    if protocol == "s3":
        loader = _loader()
        loader.load_service_model("s3", "service-2")
        loader.load_service_model("s3", "endpoint-rule-set-1")
        for name in ("endpoints", "partitions", "_retry", "sdk-default-configuration"):
            loader.load_data(name)


@functools.cache
def _loader() -> Any:
    from aiobotocore.session import AioSession

    return AioSession().get_component("data_loader")


def fast_session() -> Any:
    """A session as any other, but for the API's description."""
    from aiobotocore.session import AioSession

    session = AioSession()
    session.register_component("data_loader", _loader())
    return session
