"""Ours, the peers and the bare machine, alternating in one process on one state and disk.

    python -m benchmarks.compare                      # 1 GiB in 64 tensors, 5 runs
    python -m benchmarks.compare --mib 64 --runs 2    # a quick look

Absolute figures swing with the neighbours of a machine; ratios of medians in one run are what counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch._C._distributed_c10d import HashStore

from benchmarks import machine
from benchmarks.systems import PEERS, DCPAsyncShared, Shardstore, System

NUM_TENSORS = 64


def make_state(nbytes: int) -> dict[str, torch.Tensor]:
    """Equal float32 tensors, every page touched."""
    numel = nbytes // NUM_TENSORS // 4
    return {f"t{i}": torch.full((numel,), float(i)) for i in range(NUM_TENSORS)}


class Table:
    """Seconds by row, and what they are worth against each other."""

    def __init__(self, nbytes: int) -> None:
        """`nbytes` turns seconds into GB/s."""
        self.nbytes = nbytes
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, row: str, seconds: float) -> None:
        """Note one measurement."""
        self.seconds[row].append(seconds)

    def median_s(self, row: str) -> float:
        """Median of a row."""
        return statistics.median(self.seconds[row])

    def speed_ratio(self, row: str, against: str) -> float:
        """How many times as fast as another row."""
        return self.median_s(against) / self.median_s(row)

    def print(self) -> None:
        """All rows: median, spread, GB/s."""
        print(f"{'':58} {'median':>9} {'best':>9} {'worst':>9} {'GB/s':>7}")
        for row, found in self.seconds.items():
            median = statistics.median(found)
            speed = self.nbytes / median / 1e9
            print(f"{row:58} {median:8.3f}s {min(found):8.3f}s {max(found):8.3f}s {speed:7.2f}")


def compare(table: Table, folder: Path, *, runs: int) -> None:
    """Fill the table."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    state = make_state(table.nbytes)
    copy = {name: tensor.clone() for name, tensor in state.items()}
    huge = machine.huge_pages(table.nbytes)
    ours = Shardstore(folder / "ours", memory=2 * table.nbytes + (64 << 20))
    peers = [peer(folder / str(i)) for i, peer in enumerate(PEERS)]
    for system in (ours, *peers):
        system.save(state)  # warm
    for run in range(runs):
        _measure_machine(table, state, copy, huge, folder)
        _measure_first_save(table, state, folder / "first")
        for system in (ours, *peers) if run % 2 else (*peers, ours):
            table.add("bare: warm copy", machine.warm_copy_s(state, copy))
            _measure_save(table, system, state)
            if isinstance(system, Shardstore):
                table.add("shardstore: restore from memory, same process", ours.load_memory(state))
            elif not isinstance(system, DCPAsyncShared):
                table.add(f"{system.name}: load, cold", system.load(state))
    for system in (ours, *peers):
        system.close()
    torch.distributed.destroy_process_group()


def _measure_machine(
    table: Table,
    state: dict[str, torch.Tensor],
    copy: dict[str, torch.Tensor],
    huge: memoryview,
    folder: Path,
) -> None:
    table.add("bare: warm copy, one thread", machine.one_thread_copy_s(state, copy))
    table.add("bare: first touch of tmpfs", machine.first_touch_s(table.nbytes))
    path = folder / "bare"
    table.add("bare: write + fsync", machine.bare_write_s(huge, path))
    table.add("bare: cold read", machine.bare_read_s(path, huge))
    path.unlink()


def _measure_first_save(table: Table, state: dict[str, torch.Tensor], folder: Path) -> None:
    fresh = Shardstore(folder, memory=2 * table.nbytes + (64 << 20))
    fresh.warmup(state)
    table.add("shardstore: first save after warmup, blocked", fresh.save(state)[0])
    fresh.close()


def _measure_save(table: Table, system: System, state: dict[str, torch.Tensor]) -> None:
    blocked_s, durable_s = system.save(state)
    table.add(f"{system.name}: save blocks", blocked_s)
    table.add(f"{system.name}: save until durable", durable_s)
    if isinstance(system, Shardstore):
        table.add("shardstore: from the return of save to committed", durable_s - blocked_s)


# ------------------------------------------------------------ restarts, each in a process of its own


def _life(command: str, folder: Path, nbytes: int, *options: str) -> dict[str, float]:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.compare", "--life", command, "--folder", str(folder),
         "--bytes", str(nbytes), *options],
        stdout=subprocess.PIPE, check=False, text=True,
    )  # fmt: skip
    expected = -signal.SIGKILL if command == "die" else 0
    assert run.returncode == expected, run.returncode
    return {} if command == "die" else dict(json.loads(run.stdout))


def restarts(table: Table, folder: Path, *, runs: int) -> None:
    """Save, SIGKILL, and restore in a new process: from memory, from disk fresh, and from disk warm."""
    for run in range(runs):
        own = folder / f"restart-{run}"
        _life("die", own, table.nbytes)
        for row, seconds in _life("memory", own, table.nbytes).items():
            table.add(row, seconds)
        for command in ("cold", "warm"):
            for row, seconds in _life(command, own, table.nbytes).items():
                table.add(row, seconds)
        shutil.rmtree(own)


def _live(command: str, folder: Path, nbytes: int) -> None:
    from shardstore import SnapshotStore

    state = make_state(nbytes)
    memory = nbytes + (64 << 20)
    if command == "die":
        store = SnapshotStore(folder, memory=memory, name=f"benchmark-{folder.name}-{os.getppid()}")
        store.save(state, step=1).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    for tensor in state.values():
        tensor.zero_()
    name = f"benchmark-{folder.name}-{os.getppid()}" if command == "memory" else None
    with SnapshotStore(folder, memory=memory, name=name) as store:
        if command == "warm":
            store.warmup(state)
        machine.drop_cache(folder)
        started = time.perf_counter()
        report = store.restore(state)
        taken_s = time.perf_counter() - started
        assert report.tier.startswith("memory" if command == "memory" else "root"), report.tier
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(state.values()))
    rows = {
        "memory": "shardstore: restore from memory after SIGKILL",
        "cold": "shardstore: restore from disk, cold, fresh process",
        "warm": "shardstore: restore from disk, cold, warmed slot",
    }
    found = {rows[command]: taken_s}
    if command == "warm":
        found["shardstore: read and verify from disk, cold, warmed slot"] = report.verify_s
    print(json.dumps(found))


def report_ratios(table: Table) -> list[tuple[str, float, str, bool]]:
    """The targets of the design that one process can show: what, ratio, target, met."""
    speed = table.speed_ratio
    blocks = "shardstore: save blocks"
    after = "shardstore: from the return of save to committed"
    whole = "shardstore: save until durable"
    found = [
        ("save blocks / warm copy", 1 / speed(blocks, "bare: warm copy"), "<= 1.15"),
        ("first save after warmup / steady", 1 / speed("shardstore: first save after warmup, blocked", blocks), "<= 1.15"),
        ("save blocks / DCP async_save", 1 / speed(blocks, "DCP async_save: save blocks"), "<= 0.33"),
        ("save blocks / DCP async_save, reused shared memory", 1 / speed(blocks, "DCP async_save, reused shared memory: save blocks"), "<= 1.05"),
        ("return -> committed, speed against bare write", speed(after, "bare: write + fsync"), ">= 0.85"),
        ("start -> committed, speed against bare write", speed(whole, "bare: write + fsync"), ">= 0.70"),
        ("until durable, speed against DCP save", speed(whole, "DCP save: save until durable"), ">= 1.50"),
        ("until durable, speed against save_file + fsync", speed(whole, "safetensors save_file + fsync: save until durable"), ">= 1.50"),
        ("restore from memory after SIGKILL, speed against one-thread copy", speed("shardstore: restore from memory after SIGKILL", "bare: warm copy, one thread"), ">= 0.45"),
        ("read and verify from disk, speed against bare cold read", speed("shardstore: read and verify from disk, cold, warmed slot", "bare: cold read"), ">= 0.95"),
        ("restore from disk, warmed slot, speed against bare cold read", speed("shardstore: restore from disk, cold, warmed slot", "bare: cold read"), ">= 0.65"),
        ("restore from disk, fresh process, speed against bare cold read", speed("shardstore: restore from disk, cold, fresh process", "bare: cold read"), ">= 0.45"),
        ("restore from disk, warmed slot, speed against DCP load", speed("shardstore: restore from disk, cold, warmed slot", "DCP save: load, cold"), ">= 1.30"),
    ]  # fmt: skip
    return [(what, ratio, target, _is_met(ratio, target)) for what, ratio, target in found]


def _is_met(ratio: float, target: str) -> bool:
    relation, limit = target.split()
    return ratio <= float(limit) if relation == "<=" else ratio >= float(limit)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; default: a temporary one"
    )
    parser.add_argument("--life", choices=["die", "memory", "cold", "warm"], help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.life:
        _live(options.life, options.folder, options.bytes)
        return
    folder = Path(tempfile.mkdtemp(prefix="shardstore-benchmark-", dir=options.folder))
    table = Table(options.mib << 20)
    try:
        compare(table, folder, runs=options.runs)
        restarts(table, folder, runs=options.runs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(
        f"{options.mib} MiB in {NUM_TENSORS} tensors, {options.runs} runs, torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}\n"
    )
    table.print()
    print()
    for what, ratio, target, met in report_ratios(table):
        print(f"{what:68} {ratio:6.2f}  {target:8} {'met' if met else 'NOT MET'}")


if __name__ == "__main__":
    main()
