"""Secrets in storage_options are nowhere: not in what is stored, logged, raised, shown, or told to other ranks."""

from __future__ import annotations

import logging
import pickle
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardstore import ShardStoreError, SnapshotStore, list_snapshots
from shardstore.cli.app import cli
from shardstore.cluster.kv import LocalKeyValueStore
from shardstore.cluster.threads import ThreadGroup
from tests.faults.threaded import Ranks, state_of
from tests.remote.job import s3_keys, s3_options
from tests.servers.openssh import SftpServer
from tests.servers.proxy import Proxy
from tests.servers.s3 import MotoServer, RcloneServer

KEY = "AKIA-DISTINCTIVE-KEY"
SECRET = "distinctive/secret+value=="
TOKEN = "distinctive-session-token"
ALL = (KEY, SECRET, TOKEN)


def _options(server: MotoServer, proxy: Proxy) -> dict[str, Any]:
    return {**s3_options(server, proxy), "key": KEY, "secret": SECRET, "token": TOKEN}


def _assert_clean(text: str, where: str, secrets: tuple[str, ...] = ALL) -> None:
    for secret in secrets:
        assert secret not in text, f"{where}: {text[max(0, text.index(secret) - 200) :][:500]}"


def test_nothing_that_is_stored_logged_raised_or_shown_has_them(
    s3_server: MotoServer,
    proxy: Proxy,
    folder: str,
    disk_folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "shardstore")
    bucket, options = s3_server.fresh_bucket(), _options(s3_server, proxy)
    root = f"s3://{bucket}/run"
    given: dict[str, Any] = {"memory": "1MiB", "memory_dir": folder, "disk": disk_folder / "disk"}
    said: list[str] = []
    stores = Ranks().open(root, storage_options=options, timeout_s=4.0, keep=1, **given)
    for step in (1, 2):
        assert stores.save(step) == ["", ""]
    stores.each(lambda store, _: store.pin(2))
    assert stores.restore() == 2
    said += [repr(store) + repr(store._session) + repr(store._options) for store in stores.stores]
    said += [repr(store.snapshots()) + repr(store.stats()) for store in stores.stores]
    proxy.answer(403, "SignatureDoesNotMatch", method="PUT|POST")
    said += stores.save(3)
    proxy.clear()
    assert all("SaveFailedError" in text for text in said[-2:])
    proxy.answer(400, "AuthorizationHeaderMalformed")
    try:
        list_snapshots(root, storage_options=options)
    except ShardStoreError as error:
        said += ["".join(traceback.format_exception(error)), repr(error), repr(pickle.dumps(error))]
    else:
        raise AssertionError("it did not fail")
    proxy.clear()
    stores.close(keep_memory=True)
    for text in said:
        _assert_clean(text, "said")
    _assert_clean(caplog.text, "log")
    keys = s3_keys(s3_server, bucket)
    assert any("run-" in key for key in keys)
    assert any("index-" in key for key in keys)
    for key in keys:
        body = s3_server.client.get_object(Bucket=bucket, Key=key)["Body"].read()
        _assert_clean(key + body.decode("latin-1"), key)
    for near in (Path(folder), disk_folder):
        files = [path for path in near.rglob("*") if path.is_file()]
        assert files
        for path in files:
            _assert_clean(str(path) + path.read_bytes().decode("latin-1"), str(path))


def test_what_ranks_tell_each_other_has_none(
    s3_server: MotoServer, proxy: Proxy, folder: str
) -> None:
    """Agreements, failures and all else that one rank posts for the others."""
    group = ThreadGroup(2)
    posted: list[bytes] = []

    class Listening(LocalKeyValueStore):
        def set(self, key: str, value: bytes) -> None:
            posted.append(value)
            super().set(key, value)

        def compare_set(self, key: str, value: bytes) -> bytes:
            posted.append(value)
            return super().compare_set(key, value)

    keys, nonce = group.meeting(0)
    keys.__class__ = Listening
    root = f"s3://{s3_server.fresh_bucket()}/run"
    options = _options(s3_server, proxy)

    def work(rank: int) -> None:
        with SnapshotStore(
            root, process_group=group.rank(rank), storage_options=options, on_error="warn",
            memory="1MiB", memory_dir=folder, timeout_s=10.0,
        ) as store:  # fmt: skip
            store.save(state_of(1, rank, 9), step=1).wait(20)
            if rank == 0:
                proxy.answer(403, "AccessDenied", method="PUT|POST")
            with pytest.raises(ShardStoreError):
                store.save(state_of(2, rank, 9), step=2).wait(20)
            store.restore(state_of(1, rank, 9))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert len(posted) > 10
    assert nonce
    assert any(b"denied" in value for value in posted)
    for value in posted:
        _assert_clean(value.decode("latin-1"), "posted")


def test_a_server_that_repeats_what_it_was_sent_does_not_bring_them_into_a_message(
    s3_server: MotoServer, proxy: Proxy, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    """S3's SignatureDoesNotMatch names the key, and proxies like to echo headers."""
    body = f"<Error><Code>AccessDenied</Code><Message>{KEY} {SECRET} {TOKEN}</Message></Error>"
    proxy.answer(403, "AccessDenied", body=body)
    options = _options(s3_server, proxy)
    with pytest.raises(ShardStoreError, match="denied") as raised:
        Ranks().open(
            f"s3://{s3_server.bucket}/x", storage_options=options, memory="1MiB", memory_dir=folder
        )
    _assert_clean(str(raised.value) + repr(raised.value) + caplog.text, "raised")


def test_rclone_checks_them_and_a_wrong_one_is_not_shown(
    deviant_s3_server: RcloneServer, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**s3_options(deviant_s3_server), "key": KEY, "secret": SECRET}
    with pytest.raises(ShardStoreError, match="denied") as raised:
        Ranks().open(
            deviant_s3_server.fresh(), storage_options=options, memory="1MiB", memory_dir=folder
        )
    _assert_clean(str(raised.value) + caplog.text, "raised")


def test_an_sftp_password_is_not_shown(
    sftp_server: SftpServer, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {
        "port": sftp_server.port, "username": sftp_server.username, "password": SECRET,
        "look_for_keys": False, "allow_agent": False,
    }  # fmt: skip
    with pytest.raises(ShardStoreError) as raised:
        Ranks().open(
            sftp_server.fresh(),
            storage_options=options,
            memory="1MiB",
            memory_dir=folder,
            timeout_s=6.0,
        )
    assert "denied" in str(raised.value)
    _assert_clean(str(raised.value) + repr(raised.value) + caplog.text, "raised")


def test_the_command_line_shows_none_of_fsspec_s_configuration(
    s3_server: MotoServer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec.config

    options = {k: v for k, v in _options(s3_server, proxy).items() if k != "session"}
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    root = f"s3://{s3_server.fresh_bucket()}/run"
    proxy.answer(403, "AccessDenied", method="PUT|POST")
    for command in ("list", "doctor", "verify", "show"):
        result = CliRunner().invoke(cli, [command, root])
        _assert_clean(result.output, command)
