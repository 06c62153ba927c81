"""Peak memory beyond the state: RssAnon of a process and its children, and growth of tmpfs and other shared memory."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch
from torch._C._distributed_c10d import HashStore

from benchmarks.children import child, receive, tree
from benchmarks.peers import PEERS
from benchmarks.states import large
from benchmarks.systems import Shardstore, System, memory_for
from benchmarks.table import Table

INTERVAL_S = 0.004
MIB = 1 << 20
UNIT = "MiB"
ROW = "{}: peak memory beyond the state"


@dataclass(frozen=True)
class Used:
    """Memory of processes at one moment, in bytes."""

    private: int
    """RssAnon of all of them."""
    mapped: int
    """Shared memory that they map; a page that several map counts once."""
    shared: int
    """All shared memory of the machine: also what is allocated and not mapped, and the neighbours'."""

    def over(self, before: Used) -> int:
        """Growth. Neighbours that free shared memory meanwhile cannot hide more than is unmapped."""
        shared = max(self.shared - before.shared, self.mapped - before.mapped)
        return self.private - before.private + shared


def used_by(pids: list[int]) -> Used:
    """Memory of these processes with all their descendants."""
    private = mapped = 0
    for pid in pids:
        for process in tree(pid):
            try:
                private += _field(f"/proc/{process}/status", "RssAnon:")
                mapped += _field(f"/proc/{process}/smaps_rollup", "Pss_Shmem:")
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended
    return Used(private, mapped, _field("/proc/meminfo", "Shmem:"))


def _field(path: str, name: str) -> int:
    with open(path) as file:
        for line in file:
            if line.startswith(name):
                return int(line.split()[1]) << 10
    return 0


class PeakSampler:
    """Watches processes from outside until it is stopped; the baseline is taken at the start."""

    def __init__(self, pids: list[int]) -> None:
        """`pids`: with all their descendants, whenever those start."""
        self._pids = pids
        self._before = used_by(pids)
        self._peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._look()

    def _look(self) -> None:
        self._peak_bytes = max(self._peak_bytes, used_by(self._pids).over(self._before))

    def stop(self) -> int:
        """Bytes of the peak over the baseline; the moment of the call is looked at too."""
        self._stop.set()
        self._thread.join()
        self._look()
        return self._peak_bytes


def peaks(table: Table, folder: Path) -> None:
    """One row per system: two saves and a load in a process of its own that already has the state."""
    systems: tuple[type[System], ...] = (Shardstore, *PEERS)
    for system in systems:
        if system.name not in table.not_measured and system.measures_save:
            peak = _peak(system, folder / "peak", table.nbytes, memory_for(table.nbytes))
            table.add(ROW.format(system.name), peak / MIB, UNIT)
            if system is Shardstore:
                table.add(
                    "shardstore: peak memory beyond the state and the budget",
                    (peak - memory_for(table.nbytes)) / MIB,
                    UNIT,
                )
    budget = table.nbytes // 2
    peak = _peak(Shardstore, folder / "peak", table.nbytes, budget)
    table.add(
        "shardstore, budget of half the state: peak memory beyond the state", peak / MIB, UNIT
    )
    table.add(
        "shardstore, budget of half the state: peak memory beyond the state and the budget",
        (peak - budget) / MIB,
        UNIT,
    )


def _peak(system: type[System], folder: Path, nbytes: int, memory: int) -> int:
    with child(_use, system, folder, nbytes, memory) as started:
        return peak_of([started])


def peak_of(started: list[tuple[ForkServerProcess, Connection]]) -> int:
    """Bytes by which children grow, at most and together, from their "ready" to their "done"."""
    for process, connection in started:
        receive(connection, process)
    sampler = PeakSampler([process.pid for process, _ in started if process.pid is not None])
    try:
        for _, connection in started:
            connection.send("use")
        for process, connection in started:
            receive(connection, process)
    finally:
        peak_bytes = sampler.stop()
    for _, connection in started:
        connection.send("leave")
    return peak_bytes


def _use(
    connection: Connection, system: type[System], folder: Path, nbytes: int, memory: int
) -> None:
    state = large(nbytes)
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    connection.send("ready")
    connection.recv()
    opened = Shardstore(folder, memory=memory) if system is Shardstore else system(folder)
    for _ in range(2):
        opened.save(state)
    if isinstance(opened, Shardstore):
        opened.store.restore(state)
    else:
        opened.load(state)
    connection.send("done")
    connection.recv()
    opened.close()
    torch.distributed.destroy_process_group()
