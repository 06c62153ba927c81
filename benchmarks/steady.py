"""What `save` costs a process that runs nothing else: the first one after `warmup`, and later ones.

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
FIRST = "shardstore, alone: first save after warmup, blocked"
BLOCKS = "shardstore, alone: save blocks"
_SAVES = 4


def steady(table: Table, folder: Path) -> None:
    """Fill the rows, from a fresh process each run."""
    for run in range(table.runs):
        own = folder / f"alone-{run}"
        first_s, copies, saves = call(_save_and_copy, own, table.nbytes)
        table.add(FIRST, first_s)
        for row, found in ((COPY, copies), (BLOCKS, saves)):
            for seconds in found:
                table.add(row, seconds)
        shutil.rmtree(own)


def _save_and_copy(folder: Path, nbytes: int) -> tuple[float, list[float], list[float]]:
    """Seconds of the first save, and of copies and later saves by turns."""
    from shardstore import SnapshotStore

    state = large(nbytes)
    copy = {name: tensor.clone() for name, tensor in state.items()}
    copies, saves = [], []
    with SnapshotStore(folder, memory=memory_for(nbytes), keep=1) as store:
        store.warmup(state)
        for step in range(1 + _SAVES):
            copies.append(machine.warm_copy_s(state, copy))
            started = time.perf_counter()
            snapshot = store.save(state, step=step)
            saves.append(time.perf_counter() - started)
            snapshot.wait()
            store.drain()
    return saves[0], copies[1:], saves[1:]
