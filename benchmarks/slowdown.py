"""What training loses while a snapshot is written behind it.

    python -m benchmarks.slowdown

Two kinds of work that a save may disturb: a loop of pure Python, which shares the interpreter's lock with
our threads, and a loop of matrix products on all cores, which shares the cores. Each is timed alone,
then from the return of `save` until its snapshot is durable, then alone again; the speed alone is the
mean of both sides, so that a machine that drifts does not count as a slow-down. The bare steps of a
spill in another process, which shares no lock with the loop, show what the machine itself takes; the
same steps on two threads of this process, what any library takes that does them in the interpreter of
the training: each call that ends there has to wait for its lock, and interrupts the loop to get it.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from torch._C._distributed_c10d import HashStore

from benchmarks import machine
from benchmarks.bare_steps import bare_steps
from benchmarks.children import call
from benchmarks.states import NUM_LARGE, large
from benchmarks.systems import memory_for
from benchmarks.table import Table

ALONE_S = 0.4
MATRIX = 256


class Pending(Protocol):
    """A save that goes on behind."""

    def done(self) -> bool:
        """Whether it is durable, or failed."""

    def result(self) -> object:
        """Wait for it."""


class Behind:
    """Work on a thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        """Begin it."""
        self._thread = threading.Thread(target=work)
        self._thread.start()

    def done(self) -> bool:
        """Whether it is over."""
        return not self._thread.is_alive()

    def result(self) -> None:
        """Wait for it."""
        self._thread.join()


class PythonLoop:
    """Pure Python, on one core."""

    name = "pure Python loop"

    def work(self) -> None:
        """About a tenth of a millisecond."""
        total = 0
        for i in range(2000):
            total += i ^ (total & 7)


class TorchLoop:
    """Matrix products, on all cores."""

    name = "all-core torch loop"

    def __init__(self) -> None:
        """Allocates nothing later."""
        self.left = torch.rand(MATRIX, MATRIX)
        self.right = torch.rand(MATRIX, MATRIX)
        self.out = torch.empty(MATRIX, MATRIX)

    def work(self) -> None:
        """Less than a millisecond."""
        torch.mm(self.left, self.right, out=self.out)


def pace(work: Callable[[], None], is_over: Callable[[], bool]) -> tuple[float, float]:
    """Calls per second until it is over, and for how many seconds."""
    num_calls = 0
    started = time.perf_counter()
    while True:
        work()
        num_calls += 1
        if is_over():
            break
    elapsed_s = time.perf_counter() - started
    return num_calls / elapsed_s, elapsed_s


def _alone(work: Callable[[], None], duration_s: float) -> float:
    end = time.perf_counter() + duration_s
    return pace(work, lambda: time.perf_counter() >= end)[0]


def disturb(
    work: Callable[[], None], begin: Callable[[], Pending], alone_s: float
) -> tuple[float, float]:
    """How much slower (0.05: takes 5 % longer) work is beside a save, and the seconds that it loses."""
    before = _alone(work, alone_s)
    pending = begin()
    beside, elapsed_s = pace(work, pending.done)
    pending.result()
    alone = (before + _alone(work, alone_s)) / 2
    return alone / beside - 1, elapsed_s * (1 - beside / alone)


def digest_bare(memory: memoryview) -> None:
    """A digest of each of as many parts as the state has tensors."""
    nbytes = len(memory) // NUM_LARGE
    for start in range(0, len(memory), nbytes):
        xxhash.xxh3_128_digest(memory[start : start + nbytes])


def slowdowns(table: Table, folder: Path) -> None:
    """Fill the rows of slow-down, measured in a process of its own."""
    for loop, system, slower, lost_s in call(_measure, folder, table.nbytes, table.runs):
        if loop == PythonLoop.name:
            table.add(f"{system}: {loop} slowed while writing", slower * 100, "%")
        else:
            lost = lost_s / (table.nbytes / (1 << 30))
            table.add(f"{system}: {loop} loses while writing", lost, "s/GiB")


def _measure(folder: Path, nbytes: int, runs: int) -> list[tuple[str, str, float, float]]:
    import torch.distributed.checkpoint as dcp

    from shardstore import SnapshotStore

    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    state = large(nbytes)
    alone_s = ALONE_S if nbytes >= 1 << 28 else ALONE_S / 10
    found = []
    steps = 0
    with (
        SnapshotStore(folder / "slowdown", memory=memory_for(nbytes), keep=1) as store,
        bare_steps(folder, nbytes) as bare,
    ):

        def save() -> Pending:
            return store.save(state, step=steps).committed

        def dcp_save() -> Pending:
            path = folder / "slowdown-dcp" / str(steps)
            response: Any = dcp.async_save(dict(state), checkpoint_id=path)  # type: ignore[attr-defined]
            return getattr(response, "upload_completion", response)  # type: ignore[no-any-return]

        huge = machine.huge_pages(nbytes)

        def write_bare() -> None:
            digests = Behind(lambda: digest_bare(huge))
            machine.bare_write_s(huge, folder / "slowdown-bare")
            digests.result()
            (folder / "slowdown-bare").unlink()

        systems: dict[str, Callable[[], Pending]] = {
            "shardstore": save,
            "DCP async_save": dcp_save,
            "bare digest and write, another process": bare.begin,
            "bare digest and write, this process": lambda: Behind(write_bare),
        }
        loops = (PythonLoop(), TorchLoop())
        store.warmup(state)
        for begin in systems.values():
            begin().result()
        for run in range(2 * runs):
            for loop in loops:
                for name in systems if run % 2 else reversed(systems):
                    steps += 1
                    found.append((loop.name, name, *disturb(loop.work, systems[name], alone_s)))
                    shutil.rmtree(folder / "slowdown-dcp", ignore_errors=True)
    torch.distributed.destroy_process_group()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="shardstore-benchmark-"))
    table = Table(f"{options.mib} MiB", options.mib << 20, options.runs)
    try:
        slowdowns(table, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, row in table.rows.items():
        print(f"{name:62} {statistics.median(row.values):7.3f} {row.unit}")


if __name__ == "__main__":
    main()
