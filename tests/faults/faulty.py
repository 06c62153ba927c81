"""Two ranks on one remote root, each behind a proxy of its own, through which faults come."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardstore import ShardStoreError, SnapshotStore, list_snapshots
from shardstore.cluster.threads import ThreadRank
from tests.faults.clients import client_options
from tests.faults.threaded import Ranks, Stores
from tests.servers.proxy import Fault, Proxy

TIMEOUT_S = 9.0
"""Of the stores: a request may stand still for a sixth of it, and is tried again for 0.8 of it."""
SMALL = 3000
LARGE = 5 << 20
"""Elements of float32: 20 MiB, three parts."""

Order = Callable[[Proxy], Fault]
"""Turns a fault on."""


@dataclass
class Faulty:
    """A root that both proxies lead to."""

    server: Any
    proxies: list[Proxy]
    url: str
    memory_dir: str

    def options(self, rank: int) -> dict[str, Any]:
        """For the client of a rank."""
        return client_options(self.url, self.server.options_at(self.proxies[rank].port))

    def open(self, **options: Any) -> Stores:
        """A store on every rank."""
        ranks = Ranks(len(self.proxies))
        given = {
            "memory": "64MiB",
            "timeout_s": TIMEOUT_S,
            "memory_dir": self.memory_dir,
            **options,
        }

        def one(rank: ThreadRank) -> SnapshotStore:
            return SnapshotStore(
                self.url, process_group=rank, storage_options=self.options(rank.rank), **given
            )

        return Stores(ranks, ranks.each(one))

    def listed(self) -> list[int]:
        """Steps that anybody sees, past the proxies."""
        options = client_options(self.url, self.server.storage_options)
        return [info.step for info in list_snapshots(self.url, storage_options=options)]

    def clear(self) -> None:
        """No faults, and nothing was counted."""
        for proxy in self.proxies:
            proxy.clear()
            proxy.reset_connections()
            proxy.forget()


def outcome(call: Callable[[], object]) -> tuple[str, float]:
    """What it raised, empty if nothing; and how long it took."""
    begin = time.monotonic()
    try:
        call()
    except ShardStoreError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "", time.monotonic() - begin
