"""The sharded GPT on gloo ranks: saves in one life of the ranks, restores in fresh ones, peak memory."""

from __future__ import annotations

import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from benchmarks import machine
from benchmarks.children import call_ranks, child
from benchmarks.gpt import App
from benchmarks.memory import MIB, ROW, UNIT, peak_of
from benchmarks.rank_systems import RANK_SYSTEMS, DCPOnRanks, OursOnRanks
from benchmarks.table import Table

NUM_RANKS = 2
_READERS = tuple(RANK_SYSTEMS.index(system) for system in (OursOnRanks, DCPOnRanks))


def gpt(table: Table, folder: Path) -> None:
    """Fill the table: saves in one life of the ranks, restores in a fresh life each."""
    for row, seconds in _slowest(call_ranks(NUM_RANKS, _saves, folder, table.nbytes, table.runs)):
        table.add(row, seconds)
    for run in range(table.runs):
        _measure_machine(table, folder)
        for number in _READERS if run % 2 else reversed(_READERS):
            found = call_ranks(NUM_RANKS, _restores, folder, table.nbytes, number)
            for row, seconds in _slowest(found):
                table.add(row, seconds)
    for number in range(len(RANK_SYSTEMS)):
        if number not in _READERS:
            call_ranks(NUM_RANKS, _restores, folder, table.nbytes, number)  # only its values count
    for number, system in enumerate(RANK_SYSTEMS):
        row = ROW.format(system.name) + ", all ranks"
        table.add(row, _peak(folder, table.nbytes, number) / MIB, UNIT)


def _measure_machine(table: Table, folder: Path) -> None:
    huge = machine.huge_pages(table.nbytes)
    path = folder / "bare"
    table.add("bare: write + fsync", machine.bare_write_s(huge, path))
    table.add("bare: cold read", machine.bare_read_s(path, huge))
    path.unlink()


def _slowest(of_ranks: list[list[tuple[str, float]]]) -> list[tuple[str, float]]:
    """A save or restore of all ranks takes as long as that of the slowest."""
    return [
        (of_all[0][0], max(seconds for _, seconds in of_all))
        for of_all in zip(*of_ranks, strict=True)
    ]


def _join(rank: int, num_ranks: int, folder: Path, what: str) -> None:
    store = FileStore(str(folder / f"rendezvous-{what}"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))


def _leave(rank: int, folder: Path, what: str) -> None:
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        (folder / f"rendezvous-{what}").unlink(missing_ok=True)


def _saves(
    rank: int, num_ranks: int, folder: Path, nbytes: int, runs: int
) -> list[tuple[str, float]]:
    _join(rank, num_ranks, folder, "saves")
    app = App(nbytes, fill=1.0)
    systems = [system(folder / f"gpt-{i}", app) for i, system in enumerate(RANK_SYSTEMS)]
    copies = [tensor.clone() for tensor in app.locals()]
    found = []
    for system in systems:
        system.save()  # warm
    for run in range(runs):
        for system in systems if run % 2 else reversed(systems):
            dist.barrier()
            started = time.perf_counter()
            for copy, tensor in zip(copies, app.locals(), strict=True):
                copy.copy_(tensor)
            found.append(("bare: warm copy", time.perf_counter() - started))
            dist.barrier()
            blocked_s, durable_s = system.save()
            found.append((f"{system.name}: save blocks", blocked_s))
            found.append((f"{system.name}: save until durable", durable_s))
            if isinstance(system, OursOnRanks):
                after = "shardstore: from the return of save to committed"
                found.append((after, durable_s - blocked_s))
    for system in systems:
        dist.barrier()
        system.close()
    _leave(rank, folder, "saves")
    return found


def _restores(
    rank: int, num_ranks: int, folder: Path, nbytes: int, number: int
) -> list[tuple[str, float]]:
    what = f"restore-{number}"
    _join(rank, num_ranks, folder, what)
    app = App(nbytes, fill=-1.0)
    system = RANK_SYSTEMS[number](folder / f"gpt-{number}", app)
    if rank == 0:
        machine.drop_cache(folder / f"gpt-{number}")
    dist.barrier()
    taken_s = system.restore()
    app.check(1.0)
    system.close()
    _leave(rank, folder, what)
    return [(f"{system.name}: restore from disk, cold, fresh process", taken_s)]


def _peak(folder: Path, nbytes: int, number: int) -> int:
    with ExitStack() as stack:
        return peak_of(
            [
                stack.enter_context(child(_use, rank, NUM_RANKS, folder, nbytes, number))
                for rank in range(NUM_RANKS)
            ]
        )


def _use(
    connection: Connection, rank: int, num_ranks: int, folder: Path, nbytes: int, number: int
) -> None:
    """Two saves, watched from outside once the state is there."""
    _join(rank, num_ranks, folder, "peak")
    app = App(nbytes, fill=1.0)
    dist.barrier()
    connection.send("ready")
    connection.recv()
    system = RANK_SYSTEMS[number](folder / f"gpt-peak-{number}", app)
    for _ in range(2):
        system.save()
    connection.send("done")
    connection.recv()
    system.close()
    _leave(rank, folder, "peak")
