"""What a process leaves on remote storage, or near it, when it ends while the store does not answer; and forks."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardstore import SaveFailedError, ShardStoreError, SnapshotStore
from shardstore.cli.app import cli
from shardstore.testing.forked import run_forked, start_forked
from tests.faults.clients import client_options, warm_client
from tests.faults.faulty import LARGE, SMALL
from tests.faults.threaded import state_of, step_of
from tests.servers.openssh import SftpServer
from tests.servers.proxy import Fault, Proxy
from tests.servers.s3 import MotoServer

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture
def proxy(s3_server: MotoServer) -> Iterator[Proxy]:
    warm_client("s3://")
    with Proxy(s3_server.port) as running:
        yield running


Open = Callable[..., SnapshotStore]


@pytest.fixture
def open_store(s3_server: MotoServer, proxy: Proxy, folder: str) -> Open:
    """Open a store of one rank on a fresh root, by way of the proxy."""
    url = s3_server.fresh()

    def open_one(**options: Any) -> SnapshotStore:
        given = {
            "memory": "128MiB",
            "memory_dir": folder,
            "timeout_s": 9.0,
            "name": "job",
            **options,
        }
        return SnapshotStore(
            url, storage_options=client_options(url, s3_server.options_at(proxy.port)), **given
        )

    open_one.url = url  # type: ignore[attr-defined]
    return open_one


def _save(store: SnapshotStore, step: int, numel: int = SMALL) -> None:
    assert store.save(state_of(step, 0, numel), step=step).wait(30) is not None
    store.drain()


def _restored(store: SnapshotStore, numel: int = SMALL) -> int:
    live = state_of(-7, 0, numel)
    store.restore(live)
    return step_of(live, 0)


# --------------------------------------------------------------------- orphans


def _uploads(server: MotoServer, url: str) -> list[str]:
    root = url.removeprefix(f"{server.url}/")
    found = server.client.list_multipart_uploads(Bucket=server.bucket).get("Uploads", ())
    return [each["Key"] for each in found if each["Key"].startswith(f"{root}/")]


def _gc(url: str, options: dict[str, Any], folder: str, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[dict[str, Any]]:  # fmt: skip
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["client_kwargs"]["endpoint_url"])
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    done = CliRunner().invoke(cli, ["gc", url, "--memory-dir", folder, "--json", *more])
    assert done.exit_code == 0, done.output
    orphans: list[dict[str, Any]] = json.loads(done.stdout)["orphans"]
    return orphans


def _hang_in_parts(proxy: Proxy, open_store: Open) -> tuple[Any, Fault]:
    """A child that is stuck in the third part of its second snapshot."""
    hung = proxy.hang(method="PUT", path="partNumber=3")

    def child() -> None:
        store = open_store(timeout_s=100.0)
        _save(store, 1)
        store.save(state_of(2, 0, LARGE), step=2).wait(100)

    started = start_forked(child)
    assert hung.wait(1, 30) == 1
    return started, hung


def test_uploads_of_a_killed_run_are_aborted_by_gc_and_those_of_a_live_one_are_not(
    s3_server: MotoServer,
    proxy: Proxy,
    open_store: Open,
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url: str = open_store.url  # type: ignore[attr-defined]
    options = s3_server.storage_options
    child, _ = _hang_in_parts(proxy, open_store)
    assert len(_uploads(s3_server, url)) == 1
    assert [o["may_go"] for o in _gc(url, options, folder, monkeypatch, "--yes")] == [False]
    assert len(_uploads(s3_server, url)) == 1, "gc took it from a live run"
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait().was_killed
    (orphan,) = _gc(url, options, folder, monkeypatch, "--yes")
    assert (orphan["kind"], orphan["run_state"], orphan["removed"]) == ("temp", "dead", True)
    assert _uploads(s3_server, url) == []
    assert _gc(url, options, folder, monkeypatch) == []


def test_uploads_of_a_killed_run_go_with_the_first_retention_of_the_next(
    s3_server: MotoServer, proxy: Proxy, open_store: Open
) -> None:
    url: str = open_store.url  # type: ignore[attr-defined]
    child, hung = _hang_in_parts(proxy, open_store)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait().was_killed
    hung.remove()
    store = open_store(keep=1)
    assert _restored(store, LARGE) == 2, "memory has it"
    _save(store, 3)
    assert _uploads(s3_server, url) == []
    store.close()


@pytest.mark.nightly
def test_files_that_a_killed_run_was_sending_by_sftp_go_with_the_first_retention(
    sftp_server: SftpServer, folder: str
) -> None:
    root = sftp_server.files / sftp_server.fresh().rpartition("/")[2]
    url = f"sftp://127.0.0.1{root}"
    with Proxy(sftp_server.port, is_http=False) as proxy:

        def open_one(**options: Any) -> SnapshotStore:
            return SnapshotStore(
                url,
                storage_options=sftp_server.options_at(proxy.port),
                **{
                    "memory": "128MiB",
                    "memory_dir": folder,
                    "timeout_s": 60.0,
                    "name": "job",
                    **options,
                },
            )

        def child() -> None:
            store = open_one()
            _save(store, 1)
            proxy.limit(total=1 << 20)
            store.save(state_of(2, 0, LARGE), step=2).wait(100)

        started = start_forked(child)
        deadline = time.monotonic() + 30
        while (
            not (sent := list(root.glob("step-000000000002*/*.tmp")))
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        assert len(sent) == 1
        os.kill(started.pid, signal.SIGKILL)
        assert started.wait().was_killed
        proxy.clear()
        store = open_one(keep=1)
        _save(store, 3)
        assert not list(root.glob("step-000000000002*/*.tmp"))
        store.close()


# ----------------------------------------------------------------------- forks


def test_a_forked_child_disturbs_no_upload_and_has_to_open_a_store_of_its_own(
    s3_server: MotoServer, proxy: Proxy, open_store: Open, folder: str
) -> None:
    """As a worker of a data loader, forked while parts are on their way."""
    store = open_store(timeout_s=60.0)
    hung = proxy.hang(method="PUT", path="partNumber=2", times=1)
    snapshot = store.save(state_of(1, 0, LARGE), step=1)
    assert hung.wait(1, 30) == 1

    def child() -> list[str]:
        told = []
        for call in (store.drain, lambda: store.save({}, step=2), lambda: store.restore({})):
            try:
                call()
            except ShardStoreError as error:
                told.append(str(error))
        own = Path(folder, "child")
        own.mkdir()
        with open_store(memory_dir=str(own), name="child") as fresh:
            _save(fresh, 7)
        return told

    ended = run_forked(child)
    assert not ended.error
    assert len(ended.value) == 3
    assert all("forked child" in text for text in ended.value)
    hung.remove()
    assert snapshot.wait(30) is not None
    live = state_of(-7, 0, LARGE)
    store.restore(live, step=1)
    assert step_of(live, 0) == 1
    assert {info.step for info in store.snapshots()} == {1, 7}
    store.close()


# --------------------------------------------------------------------- leaving


def _reopens_with(open_store: Open, proxy: Proxy, step: int) -> None:
    """The next life restores from memory during the outage, and all is durable after it."""
    store = open_store(timeout_s=3.0)
    assert _restored(store) == step
    proxy.clear()
    _save(store, 50)
    assert {step, 50} <= {info.step for info in store.snapshots()}
    store.close()


def test_close_during_an_outage_is_bounded_and_keeps_what_is_in_memory_alone(
    proxy: Proxy, open_store: Open
) -> None:
    store = open_store(timeout_s=3.0)
    _save(store, 1)
    proxy.outage(True)
    store.save(state_of(2, 0, SMALL), step=2)
    begin = time.monotonic()
    with pytest.raises(SaveFailedError, match="step 2"):
        store.close()
    assert time.monotonic() - begin < 60
    _reopens_with(open_store, proxy, 2)


@pytest.mark.nightly
def test_an_exception_during_an_outage_is_not_held_up_and_memory_stays(
    proxy: Proxy, open_store: Open
) -> None:
    def train() -> None:
        with open_store(timeout_s=3.0) as store:
            _save(store, 1)
            proxy.outage(True)
            store.save(state_of(2, 0, SMALL), step=2)
            raise KeyError

    begin = time.monotonic()
    with pytest.raises(KeyError):
        train()
    assert time.monotonic() - begin < 30
    _reopens_with(open_store, proxy, 2)


@pytest.mark.nightly
def test_a_grace_period_is_kept_during_an_outage(proxy: Proxy, open_store: Open) -> None:
    grace_s = 5.0

    def child() -> float:
        with open_store(timeout_s=20.0) as store, store.guard_preemption(grace_s=grace_s) as guard:
            _save(store, 1)
            proxy.outage(True)
            store.save(state_of(2, 0, SMALL), step=2)
            begin = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)
            step, pause = 3, threading.Event()
            while not guard.should_stop(step):
                step += 1
                pause.wait(0.05)
            store.save(state_of(40, 0, SMALL), step=40)
        return time.monotonic() - begin

    ended = run_forked(child)
    assert not ended.error
    assert ended.value < grace_s
    _reopens_with(open_store, proxy, 40)


@pytest.mark.nightly
def test_the_end_of_the_interpreter_is_bounded_during_an_outage(
    proxy: Proxy, open_store: Open
) -> None:
    from multiprocessing import util

    def child() -> float:
        store = open_store(timeout_s=3.0)
        _save(store, 1)
        proxy.outage(True)
        store.save(state_of(2, 0, SMALL), step=2)
        begin = time.monotonic()
        util._exit_function()  # type: ignore[attr-defined]
        return time.monotonic() - begin

    ended = run_forked(child)
    assert not ended.error
    assert ended.value < 60
    _reopens_with(open_store, proxy, 2)
