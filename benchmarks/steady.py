"""What saves cost a process that runs nothing else: the first one after `warmup`, and later ones.

In a process with a dozen checkpoint libraries the first copy of many threads after a pause is slow,
whoever makes it. So what is compared with a bare copy is measured by itself, each in turn with it.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from benchmarks import machine
from benchmarks.children import call
from benchmarks.states import large
from benchmarks.systems import memory_for
from benchmarks.table import Table

COPY = "alone: bare warm copy"
WRITE = "alone: bare write + fsync"
FIRST = "shardstore, alone: first save after warmup, blocked"
BLOCKS = "shardstore, alone: save blocks"
AFTER = "shardstore, alone: from the return of save to committed"
DURABLE = "shardstore, alone: save until durable"
_SAVES = 4


def steady(table: Table, folder: Path) -> None:
    """Fill the rows, from a fresh process each run."""
    for run in range(table.runs):
        own = folder / f"alone-{run}"
        for row, seconds in call(_save_and_copy, own, table.nbytes):
            table.add(row, seconds)
        shutil.rmtree(own)


def _save_and_copy(folder: Path, nbytes: int) -> list[tuple[str, float]]:
    """Rows and their seconds: the first save; then bare steps and later saves by turns."""
    from shardstore import SnapshotStore

    state = large(nbytes)
    # What is measured comes after a copy into other memory, as the first one after a pause is slow. The bare
    # copies go to two places by turns, as saves do: the longer memory was left alone, the slower it is.
    before, *copies = ({name: tensor.clone() for name, tensor in state.items()} for _ in range(3))
    huge = machine.huge_pages(nbytes)
    found: list[tuple[str, float]] = []
    with SnapshotStore(folder, memory=memory_for(nbytes), keep=1) as store:
        store.warmup(state)
        for step in range(1 + _SAVES):
            if step:
                found.append((WRITE, machine.bare_write_s(huge, folder / "bare")))
                (folder / "bare").unlink()
            machine.warm_copy_s(state, before)
            copy_s = machine.warm_copy_s(state, copies[step % 2])
            machine.warm_copy_s(state, before)
            started = time.perf_counter()
            snapshot = store.save(state, step=step)
            blocked_s = time.perf_counter() - started
            snapshot.wait()
            durable_s = time.perf_counter() - started
            store.drain()
            if step:
                found += [(COPY, copy_s), (BLOCKS, blocked_s), (DURABLE, durable_s)]
                found.append((AFTER, durable_s - blocked_s))
            else:
                found.append((FIRST, blocked_s))
    return found
