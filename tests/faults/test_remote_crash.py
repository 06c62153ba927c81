"""The process ends at any request to remote storage: the next life finds the old or the new snapshot, whole.

On S3, on an S3 that ignores exclusive create, and over SFTP: lives are forked, and SIGKILL ends them before or
after the n-th request that changes something (`remote_crash.py`). In memory:// the process stays, and requests
fail from the n-th on. The next life has the memory of the dead one, or is on a new host.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from shardstore import ShardStoreError, SnapshotStore
from shardstore.testing import Crash as CrashError
from shardstore.testing import ThreadRank
from shardstore.testing.ops import Before
from tests.faults.crash_at import Places, look, on_ranks, places
from tests.faults.drivers import Drivers
from tests.faults.lives import Life, Scenario, Told
from tests.faults.remote_crash import (
    NEEDS_HOST,
    REMOTE_SCENARIOS,
    Remote,
    RequestOps,
    remote_crash_at,
    remote_crashes_of,
)

SERVERS = {
    "S3": "s3_server",
    "deviant S3": "deviant_s3_server",
    "SFTP": "sftp_server",
    "Azure": "azure_server",
    "GCS": "gcs_server",
}


@pytest.fixture
def remote(request: pytest.FixtureRequest) -> Callable[[str], Remote]:
    """Make a description of one of the servers."""

    def describe(kind: str, *, loses_host: bool = False) -> Remote:
        server: Any = request.getfixturevalue(SERVERS[kind])
        return Remote(server.url, server.storage_options, loses_host)

    return describe


SAMPLE = (
    ("S3", True, "save, two ranks", 9),
    ("S3", False, "save, retention", 6),
    ("S3", True, "save, in parts", 7),
    ("S3", False, "delete", 2),
    ("deviant S3", True, "publish late", 9),
    ("deviant S3", False, "save, failing", 11),
    ("SFTP", True, "save, retention", 5),
    ("SFTP", False, "restore from the root", 5),
)
"""Server, whether the host is lost, scenario, request."""


@pytest.mark.slow
def test_a_few_requests_of_a_few_lives(warm: Drivers, remote: Callable[..., Remote]) -> None:
    tasks = [
        (name, remote(kind, loses_host=loses_host), at) for kind, loses_host, name, at in SAMPLE
    ]
    crashes = warm.map(remote_crash_at, tasks)
    assert all(crash.was_killed for crash in crashes), crashes


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", REMOTE_SCENARIOS)
@pytest.mark.parametrize("loses_host", [False, True], ids=["same host", "new host"])
@pytest.mark.parametrize("kind", SERVERS)
def test_every_request(
    warm: Drivers, remote: Callable[..., Remote], kind: str, name: str, loses_host: bool
) -> None:
    if loses_host and name in NEEDS_HOST:
        pytest.skip("it has something in memory alone")
    where = remote(kind, loses_host=loses_host)
    found = warm.map(remote_crashes_of, [(name, where, 1 + n, 4) for n in range(4)])
    crashes = [crash for each in found for crash in each]
    assert any(not crash.was_killed for crash in crashes)
    sides = {
        side
        for found in REMOTE_SCENARIOS[name].found.values()
        for side in found
        if side is not None
    }
    restored = {crash.restored for crash in crashes}
    assert max(sides) in restored
    if loses_host:
        assert REMOTE_SCENARIOS[name].found[0] & restored, (
            "what was there before was never restored"
        )


# ------------------------------------------------------------------- memory://


@dataclass
class _Stays(Life):
    """A life whose process goes on: its stores are left afterwards."""

    opened: list[SnapshotStore] = field(default_factory=list)

    def open(self) -> SnapshotStore:
        self.opened.append(super().open())
        return self.opened[-1]


@pytest.fixture
def in_memory() -> Iterator[str]:
    """The URL of a root in this process, removed afterwards."""
    import fsspec

    name = f"shardstore-test-{secrets.token_hex(8)}"
    yield f"memory://{name}"
    store = fsspec.filesystem("memory").store
    for path in [path for path in store if path.startswith(f"/{name}/")]:
        del store[path]


def _crash_from(at: int, dead: threading.Event) -> Before:
    """Every request from `at` on has no effect."""

    def before(_name: str, number: int) -> None:
        if number >= at:
            dead.set()
            raise CrashError(f"at request {number}")

    return before


def _live_until(where: Places, scenario: Scenario, at: int) -> tuple[bool, Told]:
    """Whether the life was ended, and what it was certain of."""
    told, dead = Told(), threading.Event()
    ops = RequestOps(_crash_from(at, dead), count_reads=scenario.count_reads)
    all_there = threading.Barrier(scenario.num_ranks)

    def one(rank: ThreadRank | None) -> None:
        number = rank.rank if rank else 0
        life = _Stays(
            *where, ops, told, {**scenario.options, "timeout_s": 3.0}, rank, all_there, number
        )
        try:
            scenario.act(life)
        except (CrashError, ShardStoreError):
            assert dead.is_set()
        finally:
            for store in life.opened:
                store.take_leave("it is dead")

    on_ranks(scenario.num_ranks, one)
    return dead.is_set(), told


@pytest.mark.parametrize(
    "name",
    ["save, no older one", "save, retention", "save, streamed", "delete", "restore from the root"],
)
def test_every_request_to_memory_fails_from_some_point_on(in_memory: str, name: str) -> None:
    scenario, restored, at, was_ended = REMOTE_SCENARIOS[name], set(), 0, True
    while was_ended:
        at += 1
        url = f"{in_memory}/{at}"
        with places(url) as where:
            was_ended, told = _live_until(where, scenario, at)
        with places(url) as where:
            found = look(where, scenario)
        assert found in scenario.found[told.phase], f"{name}, ended at {at}, in phase {told.phase}"
        restored.add(found)
    assert at > 3
    assert restored >= set().union(*scenario.found.values()) - {None}
