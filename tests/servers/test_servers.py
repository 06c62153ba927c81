"""Each server answers fsspec's client, and is what the tests take it for."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest

from tests.servers.azure import AzuriteServer
from tests.servers.gcs import FakeGcsServer
from tests.servers.openssh import SftpServer
from tests.servers.proxy import Proxy
from tests.servers.s3 import MotoServer, RcloneServer

BODY = bytes(range(256)) * 2500


@pytest.fixture(params=["s3_server", "deviant_s3_server"])
def any_s3(request: pytest.FixtureRequest) -> MotoServer | RcloneServer:
    server: MotoServer | RcloneServer = request.getfixturevalue(request.param)
    return server


def _s3fs(options: dict[str, Any]) -> Any:
    s3fs = pytest.importorskip("s3fs")
    config = {"response_checksum_validation": "when_required"}  # rclone's is the whole object's
    return s3fs.S3FileSystem(
        **options, config_kwargs=config, use_listings_cache=False, skip_instance_cache=True
    )


def _adlfs(options: dict[str, Any]) -> Any:
    return pytest.importorskip("adlfs").AzureBlobFileSystem(**options, skip_instance_cache=True)


def _gcsfs(options: dict[str, Any]) -> Any:
    return pytest.importorskip("gcsfs.core").GCSFileSystem(**options, skip_instance_cache=True)


def _sftp(options: dict[str, Any]) -> Any:
    pytest.importorskip("paramiko")
    fsspec = pytest.importorskip("fsspec")
    return fsspec.filesystem("sftp", host="127.0.0.1", **options, skip_instance_cache=True)


def test_s3_gives_back_what_was_put(any_s3: MotoServer | RcloneServer) -> None:
    client, root = _s3fs(any_s3.storage_options), any_s3.fresh()
    client.pipe_file(f"{root}/a b/#1", b"0123456789")
    assert client.cat_file(f"{root}/a b/#1", start=2, end=5) == b"234"
    assert [path.rpartition("/")[2] for path in client.find(root)] == ["#1"]


def test_roots_and_buckets_are_fresh(any_s3: MotoServer | RcloneServer) -> None:
    client = _s3fs(any_s3.storage_options)
    one, other = any_s3.fresh(), any_s3.fresh()
    client.pipe_file(f"{one}/x", b"x")
    assert client.find(other) == []
    assert client.find(any_s3.fresh_bucket()) == []


@pytest.mark.parametrize(
    ("server", "is_refused"), [("s3_server", True), ("deviant_s3_server", False)]
)
def test_only_one_of_the_s3_servers_honours_exclusive_create(
    server: str, is_refused: bool, request: pytest.FixtureRequest
) -> None:
    s3: MotoServer | RcloneServer = request.getfixturevalue(server)
    where = {"Bucket": s3.fresh_bucket(), "Key": "once"}
    s3.client.put_object(**where, Body=b"first", IfNoneMatch="*")
    try:
        s3.client.put_object(**where, Body=b"second", IfNoneMatch="*")
        was_refused = False
    except s3.client.exceptions.ClientError as error:
        was_refused = error.response["ResponseMetadata"]["HTTPStatusCode"] == 412
    assert was_refused == is_refused
    assert s3.client.get_object(**where)["Body"].read() == (b"first" if is_refused else b"second")


def test_azure_gives_back_what_was_put_and_honours_exclusive_create(
    azure_server: AzuriteServer,
) -> None:
    client, root = _adlfs(azure_server.storage_options), azure_server.fresh()
    client.pipe_file(f"{root}/a b/#1", b"0123456789")
    assert client.cat_file(f"{root}/a b/#1", start=2, end=5) == b"234"
    with pytest.raises(FileExistsError):
        client.pipe_file(f"{root}/a b/#1", b"other", mode="create")


def test_gcs_gives_back_what_was_put_and_honours_exclusive_create(
    gcs_server: FakeGcsServer,
) -> None:
    client, root = _gcsfs(gcs_server.storage_options), gcs_server.fresh()
    client.pipe_file(f"{root}/a b/#1", b"0123456789")
    assert client.cat_file(f"{root}/a b/#1", start=2, end=5) == b"234"
    with pytest.raises(FileExistsError):
        client.pipe_file(f"{root}/a b/#1", b"other", mode="create")


@pytest.mark.parametrize(
    ("server", "client"),
    [
        ("s3_server", _s3fs),
        ("deviant_s3_server", _s3fs),
        ("azure_server", _adlfs),
        ("gcs_server", _gcsfs),
        ("sftp_server", _sftp),
    ],
)
def test_each_is_reached_through_the_proxy(
    server: str, client: Callable[[dict[str, Any]], Any], request: pytest.FixtureRequest
) -> None:
    running = request.getfixturevalue(server)
    with Proxy(running.port, is_http=server != "sftp_server") as proxy:
        through = client(running.options_at(proxy.port))
        folder = through._strip_protocol(running.fresh())
        if server == "sftp_server":
            through.makedirs(folder)
        through.pipe_file(f"{folder}/#1 ü", BODY)
        assert through.cat_file(f"{folder}/#1 ü") == BODY
        totals = proxy.totals()
    assert totals.nbytes_up > len(BODY)
    assert totals.nbytes_down > len(BODY)


def test_an_upload_in_parts_to_gcs_goes_through_the_proxy_whole(
    gcs_server: FakeGcsServer,
) -> None:
    with Proxy(gcs_server.port) as proxy:
        through, key = _gcsfs(gcs_server.options_at(proxy.port)), f"{gcs_server.fresh()}/it"
        meant = proxy.answer(503, method="POST", body=r"run-\d+/it", times=1)
        with through.open(key, "wb", block_size=1 << 18) as file:
            file.write(BODY)
        assert meant.hits == 1
        assert sum(one.nbytes_up for one in proxy.requests("PUT|POST", "upload_id")) == len(BODY)
        assert through.cat_file(key) == BODY


def test_sftp_lets_its_user_in_by_key_and_nobody_else(sftp_server: SftpServer) -> None:
    paramiko = pytest.importorskip("paramiko")
    with paramiko.SSHClient() as client:
        client.get_host_keys().add(
            f"[127.0.0.1]:{sftp_server.port}",
            "ssh-ed25519",
            paramiko.Ed25519Key(data=base64.b64decode(sftp_server.host_key.split()[1])),
        )
        client.connect("127.0.0.1", **sftp_server.storage_options)
        with client.open_sftp() as sftp:
            folder = sftp_server.fresh().removeprefix("sftp://127.0.0.1")
            sftp.mkdir(folder)
            with sftp.open(f"{folder}/#1 ü", "wx") as file:
                file.write(b"0123456789")
            with pytest.raises(OSError), sftp.open(f"{folder}/#1 ü", "wx"):
                pass
            assert sftp.stat(f"{folder}/#1 ü").st_size == 10
        with pytest.raises(paramiko.AuthenticationException):
            client.connect("127.0.0.1", **{**sftp_server.storage_options, "username": "root"})
