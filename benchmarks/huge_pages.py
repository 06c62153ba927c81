"""Slots in small pages and in huge ones, alternating: why `tiers/pages.py` asks for huge ones.

    python -m benchmarks.huge_pages

Getting the memory of a slot, copying a state into it, its digest, and writing it directly while a loop of
pure Python runs beside: how many percent that is slowed, mostly by interrupts that let go of written pages.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash

from benchmarks.disk_paths import paced
from benchmarks.slowdown import Behind, PythonLoop, disturb
from shardstore.tiers import pages
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.pages import populate
from shardstore.tiers.slotfiles import SlotFiles

ALONE_S = 0.4


@contextmanager
def without_huge_pages() -> Iterator[None]:
    """A kernel that does not collapse pages."""
    before = pages.collapse
    pages.collapse = lambda view, start, stop: False
    try:
        yield
    finally:
        pages.collapse = before


def measure(files: SlotFiles, state: torch.Tensor, folder: Path) -> dict[str, float]:
    """Seconds of each step with a new slot, and percent."""
    found: dict[str, float] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        started = time.perf_counter()
        work()
        found[name] = time.perf_counter() - started

    started = time.perf_counter()
    slot = files.allocate(state.numel(), patient=True)
    assert slot is not None, files.refusal
    populate(slot.view)
    found["get memory"] = time.perf_counter() - started
    target = torch.frombuffer(slot.view, dtype=torch.uint8)
    target.copy_(state)  # the first after a pause
    timed("copy into it", functools.partial(target.copy_, state))
    timed("digest", lambda: xxhash.xxh3_128_digest(slot.view))
    path = folder / "file"
    write = paced(FileOps(), 64)
    timed("write directly", lambda: write(slot.view, path))
    path.unlink()
    slower, _ = disturb(PythonLoop().work, lambda: Behind(lambda: write(slot.view, path)), ALONE_S)
    found["pure Python slowed by writing, %"] = slower * 100
    path.unlink()
    del target
    files.free(slot)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="shardstore-benchmark-"))
    memory = Path("/dev/shm") / f"benchmark-{os.getpid()}"
    files = SlotFiles(str(memory), rank=0, owner="0" * 8, ops=FileOps())
    state = torch.full((options.mib << 20,), 7, dtype=torch.uint8)
    rows: dict[str, tuple[list[float], list[float]]] = {}
    try:
        for _ in range(options.runs):
            with without_huge_pages():
                small = measure(files, state, folder)
            huge = measure(files, state, folder)
            for name in small:
                both = rows.setdefault(name, ([], []))
                both[0].append(small[name])
                both[1].append(huge[name])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
    print(f"{options.mib} MiB, medians of {options.runs}:       small pages   huge pages")
    for name, (small_s, huge_s) in rows.items():
        print(f"{name:36} {statistics.median(small_s):10.3f} {statistics.median(huge_s):12.3f}")


if __name__ == "__main__":
    main()
