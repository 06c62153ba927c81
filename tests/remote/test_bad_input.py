"""What is wrong with a remote root is found when the store is made, said clearly, and the same on all ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from shardstore import SaveFailedError, ShardStoreError, SnapshotStore, TierError, list_snapshots
from shardstore.cluster.threads import ThreadGroup, ThreadRank
from tests.remote.conftest import MakeHost
from tests.remote.job import Host, s3_options
from tests.servers.process import free_port
from tests.servers.proxy import Proxy
from tests.servers.s3 import MotoServer, RcloneServer
from tests.servers.s3 import s3_options as plain_options

_SECRET = "hunter2-correct-horse"


def _opened(
    folder: str, *each_root: tuple[str | None, Any], **options: Any
) -> list[Exception | None]:
    """Open a store on one rank for each root and its storage_options; how it was refused, by rank."""
    group = ThreadGroup(len(each_root))

    def one(rank: ThreadRank) -> Exception | None:
        root, storage_options = each_root[rank.rank]
        try:
            store = SnapshotStore(
                root, process_group=rank, storage_options=storage_options,
                **{"memory": "1MiB", "memory_dir": folder, "timeout_s": 10.0, **options},
            )  # fmt: skip
        except (ShardStoreError, ValueError) as error:
            return error
        store.take_leave("the test ends")
        return None

    with ThreadPoolExecutor(len(each_root)) as pool:
        return list(pool.map(one, [group.rank(r) for r in range(len(each_root))]))


def _refused(folder: str, root: str, options: Any, *words: str, kind: type[Exception]) -> None:
    """One rank has the bad one, the other a good one of the same name; and both have it."""
    for each in ([(root, options)] * 2, [(root, options)]):
        for error in _opened(folder, *each):
            assert isinstance(error, kind), error
            for word in words:
                assert word in str(error), str(error)


def test_credentials_that_are_wrong(
    deviant_s3_server: RcloneServer, folder: str, s3_server: MotoServer
) -> None:
    """rclone checks signatures."""
    root = deviant_s3_server.fresh()
    good = s3_options(deviant_s3_server)
    bad = {**good, "secret": _SECRET}
    _refused(folder, root, bad, "denied", root, "credentials", kind=TierError)
    errors = _opened(folder, (root, good), (root, bad))
    for error in errors:
        assert error is not None
        assert "denied" in str(error)
        assert _SECRET not in str(error)
    assert "rank 1" in str(errors[0])
    assert s3_server.port != deviant_s3_server.port


def test_a_bucket_that_is_not_there(s3_server: MotoServer, folder: str) -> None:
    _refused(
        folder, "s3://no-such-bucket-here/run", s3_options(s3_server), "no bucket", "Make the bucket",
        "s3://no-such-bucket-here/run", kind=TierError,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("endpoint", ("storage_options must be a mapping", "str")),
        ({"no_such_option": _SECRET}, ("no_such_option",)),
        ({"client_kwargs": 5}, ("refused",)),
        ({"config_kwargs": "fast"}, ("config_kwargs",)),
        ({"client_kwargs": {"no_such_option": _SECRET}}, ("no_such_option",)),
        ({5: 6}, ("storage_options",)),
    ],
)
def test_storage_options_that_the_client_does_not_take(
    folder: str, options: Any, words: tuple[str, ...], s3_server: MotoServer
) -> None:
    given = {**s3_server.storage_options, **options} if isinstance(options, dict) else options
    for error in _opened(folder, *[(s3_server.fresh(), given)] * 2):
        assert isinstance(error, ValueError | TierError), repr(error)
        for word in words:
            assert word in str(error), str(error)
        assert _SECRET not in str(error)


@pytest.mark.parametrize(
    "root", ["sftp://me:{}@host/run", "s3://key:{}@bucket/run", "ftp://a:{}@h/x"]
)
def test_a_password_in_the_url_is_refused_and_not_shown(root: str, folder: str) -> None:
    url = root.format(_SECRET)
    calls: list[Callable[[], Any]] = [
        lambda: SnapshotStore(url, memory="1MiB", memory_dir=folder),
        lambda: list_snapshots(url),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="password in a URL") as raised:
            call()
        assert _SECRET not in str(raised.value)
        assert _SECRET not in repr(raised.value)


@pytest.mark.parametrize("root", ["folder", "file://{}/folder", None])
def test_storage_options_of_a_local_root_are_refused(root: str | None, folder: str) -> None:
    given = (
        None if root is None else f"{folder}/folder" if root == "folder" else root.format(folder)
    )
    for error in _opened(folder, *[(given, {"key": _SECRET})] * 2):
        assert isinstance(error, ValueError)
        assert "root that is a URL" in str(error)
        assert _SECRET not in str(error)


def test_a_protocol_that_nobody_knows(folder: str) -> None:
    _refused(folder, "nobody://bucket/run", None, "nobody://", "s3://", kind=ValueError)
    errors = _opened(folder, ("nobody://bucket/run", None), ("memory://bucket/run", None))
    assert all("nobody://" in str(error) for error in errors)


_MISSING = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())

import shardstore
for call, root in [(shardstore.list_snapshots, root) for root in {roots!r}] + [(shardstore.SnapshotStore, {roots!r}[0])]:
    try:
        call(root)
    except shardstore.TierError as error:
        print(str(error).replace(chr(10), " "))
"""


def _without(missing: tuple[str, ...], roots: tuple[str, ...], folder: Path) -> list[str]:
    """What is said of roots in a process that cannot import some modules; of the first one twice."""
    ended = subprocess.run(
        [sys.executable, "-c", _MISSING.format(missing=missing, roots=roots)],
        capture_output=True, text=True, timeout=60, check=False, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip().splitlines()


def test_a_client_that_is_not_installed_is_named_with_what_installs_it(tmp_path: Path) -> None:
    extras = {
        "s3://b/run": "s3",
        "gs://b/run": "gcs",
        "az://b/run": "azure",
        "sftp://h/run": "sftp",
    }
    told = _without(("s3fs", "gcsfs", "azure", "adlfs", "paramiko"), tuple(extras), tmp_path)
    for line, (root, extra) in zip(told, [*extras.items(), ("s3://b/run", "s3")], strict=True):
        assert f"pip install 'shardstore[{extra}]'" in line
        assert root.partition("://")[0] in line


@pytest.mark.nightly
def test_that_fsspec_itself_is_not_installed_is_said(tmp_path: Path) -> None:
    for line in _without(("fsspec",), ("memory://b/run", "s3://b/run"), tmp_path):
        assert "fsspec" in line or "pip install 'shardstore[s3]'" in line


def test_a_bucket_that_is_read_only_is_warned_of_restored_from_and_fails_saves(
    make_host: MakeHost, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    good = make_host(with_disk=False)
    stores = good.open()
    assert stores.save(1) == ["", ""]
    stores.close()
    host = make_host(proxy, with_disk=False, timeout_s=20.0)
    proxy.answer(403, "AccessDenied", method="PUT|POST|DELETE")
    stores = host.open()
    (warned,) = {r.getMessage() for r in caplog.records if "saves will fail" in r.getMessage()}
    assert "denied" in warned
    assert host.root in warned
    assert stores.restore() == 1
    assert stores.listed() == [1]
    for told in stores.save(2):
        assert "SaveFailedError" in told
        assert "denied" in told
        assert "credentials" in told
    assert stores.restore() == 1
    stores.close()


def test_an_endpoint_that_is_not_there_is_warned_of_and_memory_is_used(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**plain_options(free_port())}
    host = Host(Path(folder, "memory"), None, "s3://bucket/run", options, {"timeout_s": 1.5})
    stores = host.open()
    assert "only what is near can be restored" in caplog.text
    with pytest.raises(ShardStoreError, match="unreachable"):
        stores.restore(required=False)

    def keep(store: SnapshotStore, rank: int) -> float:
        live = {"w": torch.full((3,), float(rank))}
        saved = store.save(live, step=1, persist=False)
        with pytest.raises(SaveFailedError, match="unreachable"):
            saved.wait(20)
        return 0.0

    stores.each(keep)
    stores.close()


def test_a_small_timeout_ends_in_time(folder: str) -> None:
    """Nothing waits for minutes where the caller gave two seconds."""
    began = time.monotonic()
    host = Host(Path(folder, "m"), None, "s3://b/r", plain_options(free_port()), {"timeout_s": 1.0})
    stores = host.open()
    for told in stores.save(1):
        assert "SaveFailedError" in told
    stores.close()
    assert time.monotonic() - began < 30
