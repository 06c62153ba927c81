"""Host memory while a state that memory has no room for goes to S3 and comes back: the budget and 256 MiB."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from benchmarks.children import child, receive
from benchmarks.memory import used_by
from shardstore import SnapshotStore
from tests.servers.s3 import MotoServer

MIB = 1 << 20
NUM_TENSORS = 16


def _use(
    connection: Connection, url: str, options: dict[str, Any], folder: str, nbytes: int, memory: int
) -> None:
    """Save twice and restore, in a process of its own."""
    state = {
        f"t{i}": torch.full((nbytes // NUM_TENSORS // 4,), i, dtype=torch.int32)
        for i in range(NUM_TENSORS)
    }
    connection.send("ready")
    connection.recv()
    with SnapshotStore(url, memory=memory, memory_dir=folder, storage_options=options) as store:
        for step in (1, 2):
            store.save(state, step=step).wait()
        for tensor in state.values():
            tensor.zero_()
        assert store.restore(state).step == 2
        for i, tensor in enumerate(state.values()):
            assert tensor[0] == tensor[-1] == i
        connection.send("done")
        connection.recv()


def peak_mib(server: MotoServer, folder: str, nbytes: int, memory: int) -> float:
    options = server.storage_options
    with child(_use, server.fresh(), options, folder, nbytes, memory) as (process, connection):
        receive(connection, process)
        assert process.pid is not None
        before, peak = _own(process.pid), 0
        connection.send("use")
        while not connection.poll(0.01):
            peak = max(peak, _own(process.pid) - before)
        receive(connection, process)
        connection.send("leave")
    return peak / MIB


def _own(pid: int) -> int:
    """Bytes of its own, and of shared memory that it maps: not what neighbours have on the tmpfs."""
    used = used_by([pid])
    return used.private + used.mapped


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mib", [160, 512])
def test_a_state_that_passes_through_stays_within_256_mib_beyond_the_budget(
    s3_server: MotoServer, folder: str, mib: int
) -> None:
    assert peak_mib(s3_server, folder, mib * MIB, 64 * MIB) <= 64 + 256


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_state_that_memory_holds_goes_to_s3_without_a_second_copy(
    s3_server: MotoServer, folder: str
) -> None:
    assert peak_mib(s3_server, folder, 256 * MIB, 600 * MIB) <= 600 + 96
