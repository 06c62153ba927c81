"""Save, SIGKILL, and restore in new processes: from memory, and from disk with fresh and warmed memory."""

from __future__ import annotations

import os
import shutil
import signal
import time
from mmap import PAGESIZE
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import machine
from benchmarks.children import call, call_killed
from benchmarks.states import large
from benchmarks.systems import memory_for
from benchmarks.table import Table

COPY = "restarted: bare warm copy, one thread"
COPY_ONE_CPU = "restarted: bare warm copy, one CPU"
READ = "restarted: bare cold read"
READ_COPY = "restarted: bare cold read, then bare copy"
SIGKILL = "shardstore: restore from memory after SIGKILL"
SIGKILL_ONE_CPU = "shardstore: restore from memory after SIGKILL, one CPU"
FRESH = "shardstore: restore from disk, cold, fresh process"
WARMED = "shardstore: restore from disk, cold, warmed slot"
VERIFY = "shardstore: read and verify from disk, cold, warmed slot"


def restarts(table: Table, folder: Path) -> None:
    """Fill the rows of restarts. The bare steps are measured in each of the same processes."""
    for run in range(table.runs):
        own = folder / f"restart-{run}"
        name = f"benchmark-{os.getpid()}-{run}"
        call_killed(_save_and_die, own, table.nbytes, name)
        lives = [
            (SIGKILL, name, 0, False),
            (SIGKILL_ONE_CPU, name, 1, False),
            (FRESH, None, 0, False),
            (WARMED, None, 0, True),
        ]
        for row, memory_name, num_cpus, warmed in lives:
            life = call(_restore, own, table.nbytes, memory_name, num_cpus, warmed)
            table.add(row, life.taken_s)
            if warmed:
                table.add(VERIFY, life.verify_s)
            if memory_name is None:
                table.add(READ, life.bare_s)
                table.add(READ_COPY, life.bare_s + life.copy_s)
            else:
                table.add(COPY_ONE_CPU if num_cpus else COPY, life.bare_s)
        call(_forget, own, table.nbytes, name)
        shutil.rmtree(own)


class Life(NamedTuple):
    """Seconds of one process."""

    taken_s: float
    """The restore."""
    verify_s: float
    """Reading and verifying in it."""
    bare_s: float
    """The bare read or one-thread copy right after it."""
    copy_s: float
    """The bare copy into the state of what was read, with all threads."""


def _save_and_die(folder: Path, nbytes: int, name: str) -> None:
    from shardstore import SnapshotStore

    store = SnapshotStore(folder, memory=memory_for(nbytes, 1), name=name)
    store.save(large(nbytes), step=1).wait()
    os.kill(os.getpid(), signal.SIGKILL)


def _restore(folder: Path, nbytes: int, name: str | None, num_cpus: int, warmed: bool) -> Life:
    """A restore, then the bare steps. Memory stays for the next life."""
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
    if name is not None:
        copy = {name: tensor.clone() for name, tensor in state.items()}
        return Life(taken_s, report.verify_s, machine.one_thread_copy_s(state, copy), 0.0)
    shard = next(folder.glob("*/*.safetensors"))
    huge = machine.huge_pages(shard.stat().st_size // PAGESIZE * PAGESIZE)
    read_s = machine.bare_read_s(shard, huge)
    size = next(iter(state.values())).nbytes
    read = {
        name: torch.frombuffer(huge[i * size : (i + 1) * size], dtype=tensor.dtype)
        for i, (name, tensor) in enumerate(state.items())
    }
    return Life(taken_s, report.verify_s, read_s, machine.warm_copy_s(read, state))


def _forget(folder: Path, nbytes: int, name: str) -> None:
    from shardstore import SnapshotStore

    SnapshotStore(folder, memory=memory_for(nbytes, 1), name=name).close()
