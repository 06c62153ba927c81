"""A save and a restore over a link that gives each connection little: several times what one of them has."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.remote import measure
from benchmarks.remote_clients import Bare, Default, Place, Store, Tier
from shardstore import SnapshotStore
from tests.servers.proxy import Proxy
from tests.servers.s3 import MotoServer

MIB = 1 << 20
NBYTES = 96 * MIB
RATE = 3e6
"""Of a connection, in bytes per second: what busy machines manage twelve times over."""
ONE_CONNECTION_S = NBYTES / RATE
TRIES = 3


def best_s(work: Callable[[int], object], good_s: float) -> float:
    """Seconds of the best try; there is no other one once it is good."""
    best = float("inf")
    for attempt in range(TRIES):
        started = time.perf_counter()
        work(attempt)
        best = min(best, time.perf_counter() - started)
        if best <= good_s:
            break
    return best


def test_a_save_and_a_restore_are_three_times_as_fast_as_one_connection(
    s3_server: MotoServer, folder: str
) -> None:
    state = {"w": torch.arange(NBYTES // 4, dtype=torch.int32)}
    root = s3_server.fresh("speed")
    with Proxy(s3_server.port) as proxy:
        options = s3_server.options_at(proxy.port)
        with SnapshotStore(
            root, memory="256MiB", memory_dir=folder, keep=1, storage_options=options
        ) as store:
            store.save({"w": torch.zeros(1)}, step=0).wait()
            store.drain()
            proxy.limit(per_connection=RATE, delay_s=0.01)

            def save(attempt: int) -> None:
                store.save(state, step=1 + attempt).wait()

            saved_s = best_s(save, ONE_CONNECTION_S / 3)
            store.drain()
        proxy.forget()
        fresh = Path(folder, "fresh")
        fresh.mkdir()

        def restore(_attempt: int) -> None:
            with SnapshotStore(
                root, memory="256MiB", memory_dir=fresh, storage_options=options
            ) as store:
                state["w"].zero_()
                store.restore(state)

        restored_s = best_s(restore, ONE_CONNECTION_S / 3)
        assert proxy.totals().max_parallel > 8
    assert state["w"][-1] == NBYTES // 4 - 1
    assert saved_s <= ONE_CONNECTION_S / 3
    assert restored_s <= ONE_CONNECTION_S / 3


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["upload", "download"])
def test_256_mib_at_40_mb_per_connection_are_four_times_one_connection_and_the_default_client(
    s3_server: MotoServer, folder: str, way: str
) -> None:
    """Or, where server, proxy and client share few cores, nearly what bare requests reach there."""
    with Proxy(s3_server.port) as proxy:
        place = Place("s3", s3_server.fresh(), s3_server.options_at(proxy.port), 256 * MIB, folder)
        proxy.limit(per_connection=40e6, delay_s=0.01)
        if way == "download":
            for client in (Bare, Default, Tier, Store):
                measure(client, "upload", place, with_memory=False)
        seconds = {
            client: min(
                measure(client, way, place, with_memory=False).seconds for _ in range(TRIES)
            )
            for client in (Bare, Default, Tier, Store)
        }
        memory = measure(Store, way, place, with_memory=True).peak_bytes
    one_s = place.nbytes / 40e6
    for ours in (Tier, Store):
        assert seconds[ours] <= max(one_s / 4, seconds[Bare] / 0.75)
        assert seconds[ours] <= max(seconds[Default] / 4, seconds[Bare] / 0.75)
    assert memory - Store.own_bytes(place.nbytes, way) <= 256 * MIB
