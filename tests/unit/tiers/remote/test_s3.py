"""S3: every promise on moto and on rclone, which ignores exclusive create and answers ranges in its own way."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import pytest

from shardstore.tiers.remote.link import Link
from shardstore.tiers.remote.s3 import S3Store
from tests.servers.s3 import MotoServer, RcloneServer
from tests.unit.tiers.remote.store_suite import ODD_NAMES, ObjectStoreSuite


@functools.cache
def _loader() -> Any:
    from aiobotocore.session import AioSession

    return AioSession().get_component("data_loader")


def fast_session() -> Any:
    """A session as any other, but for the API's description, which takes long to parse each time."""
    from aiobotocore.session import AioSession

    session = AioSession()
    session.register_component("data_loader", _loader())
    return session


class _S3Suite(ObjectStoreSuite):
    server: MotoServer | RcloneServer
    bucket: str

    def make_store(self, root: str, link: Link) -> S3Store:
        options = {**self.server.storage_options, "session": fast_session()}
        return S3Store(self.bucket, root, storage_options=options, link=link)

    def raw_objects(self) -> dict[str, bytes]:
        client = self.server.client
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        keys = [each["Key"] for page in pages for each in page.get("Contents", ())]
        return {key: client.get_object(Bucket=self.bucket, Key=key)["Body"].read() for key in keys}


class TestOnMoto(_S3Suite):
    @pytest.fixture(autouse=True)
    def _server(self, s3_server: MotoServer) -> None:
        self.server = s3_server
        self.bucket = s3_server.fresh_bucket()


class TestOnRclone(_S3Suite):
    honours_create = False
    replaces_parts = False
    odd_names: ClassVar = tuple(name for name in ODD_NAMES if name != "\u00e9")
    """It takes the two ways to write that letter for one folder."""

    @pytest.fixture(autouse=True)
    def _server(self, deviant_s3_server: RcloneServer) -> None:
        self.server = deviant_s3_server
        self.bucket = deviant_s3_server.fresh_bucket()
