"""Ours, the peers and the bare machine, in turns, in one process."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.api import CheckpointException

from benchmarks import machine
from benchmarks.dcp import DCPAsync
from benchmarks.peers import PEERS
from benchmarks.states import large
from benchmarks.systems import Shardstore, State, System, memory_for
from benchmarks.table import Table

BIG_TENSOR_BYTES = 64 << 20
MANY_FILES = 1 << 17


def compare(
    table: Table, folder: Path, make_state: Callable[[], State], *, with_machine: bool
) -> None:
    """Fill the table with what one process shows; `with_machine`: also the bare limits."""
    _allow_many_files()
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        _compare(table, folder, make_state(), with_machine=with_machine)
        if with_machine:
            _compare_big_tensors(table, folder / "big")
    finally:
        torch.distributed.destroy_process_group()


def _allow_many_files() -> None:
    """Some peers hold one or two descriptors per tensor, all of them at once."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (max(most, MANY_FILES), most):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            return
        except (ValueError, OSError):
            continue  # only root raises the hard limit


def _compare(table: Table, folder: Path, state: State, *, with_machine: bool) -> None:
    copy = {name: tensor.clone() for name, tensor in state.items()}
    ours = Shardstore(folder / "ours", memory=memory_for(table.nbytes))
    systems: list[System] = [ours, *usable(PEERS, table, folder, state, copy)]
    huge = machine.huge_pages(table.nbytes)
    verify(ours, state, copy)
    try:
        for run in range(table.runs):
            if with_machine:
                _measure_machine(table, state, copy, huge, folder)
            for system in systems if run % 2 else reversed(systems):
                table.add("bare: warm copy", machine.warm_copy_s(state, copy))
                _measure(table, system, state)
    finally:
        for system in systems:
            system.close()


def verify(system: System, state: State, copy: State) -> None:
    """Save, wipe and load once; AssertionError unless the values are back. Also the warm run."""
    system.save(state)
    for tensor in state.values():
        tensor.fill_(-1)
    system.load(state)
    for name, tensor in state.items():
        assert torch.equal(tensor, copy[name]), f"{system.name} loaded other values into {name}"


def usable(
    peers: Sequence[type[System]], table: Table, folder: Path, state: State, copy: State
) -> list[System]:
    """Peers that run here, each after one verified save and load; the table says why the others do not."""
    found: list[System] = []
    for number, peer in enumerate(peers):
        why = peer.why_not()
        system = None
        if why is None:
            try:
                system = peer(folder / str(number))
                verify(system, state, copy)
            except (Exception, CheckpointException) as error:  # noqa: BLE001 - the others go on
                why = _last_line(error)
                for name, tensor in state.items():
                    tensor.copy_(copy[name])
                if system is not None:
                    system.close()
        if why is not None:
            table.skip(peer.name, why)
        elif system is not None:
            found.append(system)
    return found


def _last_line(error: BaseException) -> str:
    """DCP's errors end with the one that caused them, after its traceback."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1].strip()}" if lines else type(error).__name__


def _measure_machine(
    table: Table, state: State, copy: State, huge: memoryview, folder: Path
) -> None:
    table.add("bare: warm copy, one thread", machine.one_thread_copy_s(state, copy))
    table.add("bare: first touch of tmpfs", machine.first_touch_s(table.nbytes))
    path = folder / "bare"
    table.add("bare: write + fsync", machine.bare_write_s(huge, path))
    table.add("bare: cold read", machine.bare_read_s(path, huge))
    path.unlink()


def _measure(table: Table, system: System, state: State) -> None:
    blocked_s, durable_s = system.save(state)
    if system.measures_save:
        table.add(f"{system.name}: save blocks", blocked_s)
        table.add(f"{system.name}: save until durable", durable_s)
    if isinstance(system, Shardstore):
        table.add("shardstore: from the return of save to committed", durable_s - blocked_s)
        table.add("shardstore: restore from memory, same process", system.load_memory(state))
    if system.measures_load:
        table.add(f"{system.name}: load, cold", system.load(state))
        table.add(f"{system.name}: load, warm page cache", system.load(state, cold=False))


def _compare_big_tensors(table: Table, folder: Path) -> None:
    """Tensors above malloc's largest mmap threshold: fresh pages for each copy that allocates."""
    state = large(table.nbytes, max(1, table.nbytes // BIG_TENSOR_BYTES))
    copy = {name: tensor.clone() for name, tensor in state.items()}
    systems: tuple[System, ...] = (
        Shardstore(folder / "ours", memory=memory_for(table.nbytes)),
        DCPAsync(folder / "dcp"),
    )
    try:
        for system in systems:
            system.save(state)
        for run in range(table.runs):
            for system in systems if run % 2 else reversed(systems):
                machine.warm_copy_s(state, copy)  # the first of many threads after a pause is slow
                blocked_s, _ = system.save(state)
                table.add(f"{system.name}: save blocks, 64 MiB tensors", blocked_s)
    finally:
        for system in systems:
            system.close()


def per_tensor(table: Table, num_tensors: int) -> None:
    """Turn the rows of seconds into microseconds per tensor."""
    for name, row in list(table.rows.items()):
        if row.unit == "s":
            for value in row.values:
                table.add(f"{name}, per tensor", value / num_tensors * 1e6, "us")
            del table.rows[name]
