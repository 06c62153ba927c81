"""Save, SIGKILL, and restore in new processes: from memory, and from disk with fresh and warmed memory."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

from benchmarks import machine
from benchmarks.children import call, call_killed
from benchmarks.states import large
from benchmarks.systems import memory_for
from benchmarks.table import Table


def restarts(table: Table, folder: Path) -> None:
    """Fill the rows of restarts."""
    for run in range(table.runs):
        own = folder / f"restart-{run}"
        name = f"benchmark-{os.getpid()}-{run}"
        call_killed(_save_and_die, own, table.nbytes, name)
        lives = [
            ("shardstore: restore from memory after SIGKILL", name, 0, False),
            ("shardstore: restore from memory after SIGKILL, one CPU", name, 1, False),
            ("shardstore: restore from disk, cold, fresh process", None, 0, False),
            ("shardstore: restore from disk, cold, warmed slot", None, 0, True),
        ]
        for row, memory_name, num_cpus, warmed in lives:
            taken_s, verify_s = call(_restore, own, table.nbytes, memory_name, num_cpus, warmed)
            table.add(row, taken_s)
            if warmed:
                table.add("shardstore: read and verify from disk, cold, warmed slot", verify_s)
        call(_forget, own, table.nbytes, name)
        shutil.rmtree(own)


def _save_and_die(folder: Path, nbytes: int, name: str) -> None:
    from shardstore import SnapshotStore

    store = SnapshotStore(folder, memory=memory_for(nbytes, 1), name=name)
    store.save(large(nbytes), step=1).wait()
    os.kill(os.getpid(), signal.SIGKILL)


def _restore(
    folder: Path, nbytes: int, name: str | None, num_cpus: int, warmed: bool
) -> tuple[float, float]:
    """Seconds of a restore, and of reading and verifying in it. Memory stays for the next life."""
    from shardstore import SnapshotStore

    if num_cpus:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:num_cpus])
    state = large(nbytes)
    for tensor in state.values():
        tensor.fill_(-1)
    own_name = name or f"benchmark-{os.getpid()}"
    store = SnapshotStore(folder, memory=memory_for(nbytes, 1), name=own_name)
    try:
        if warmed:
            store.warmup(state)
        machine.drop_cache(folder)
        started = time.perf_counter()
        report = store.restore(state)
        taken_s = time.perf_counter() - started
        assert report.tier.startswith("root" if name is None else "memory"), report.tier
    finally:
        store.close(keep_memory=name is not None)
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(state.values()))
    return taken_s, report.verify_s


def _forget(folder: Path, nbytes: int, name: str) -> None:
    from shardstore import SnapshotStore

    SnapshotStore(folder, memory=memory_for(nbytes, 1), name=name).close()
