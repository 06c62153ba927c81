"""Ways to write a slot to disk and to read it back, alternating: why `tiers/transfer.py` does what it does.

python -m benchmarks.disk_paths
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path

from benchmarks.machine import drop_cache
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.transfer import PacedWriter, read_ahead

MIB = 1 << 20


class Cached(FileOps):
    """A file system without O_DIRECT."""

    def bypass_cache(self, fd: int, on: bool) -> bool:
        return not on


@contextmanager
def tmpfs_slot(nbytes: int) -> Iterator[memoryview]:
    """Mapped tmpfs memory, as a slot is."""
    path = Path("/dev/shm") / f"benchmark-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        view = memoryview(mmap(fd, nbytes))
        block = os.urandom(MIB)
        for start in range(0, nbytes, MIB):
            view[start : start + MIB] = block
        yield view
    finally:
        os.close(fd)
        path.unlink()


def plain(view: memoryview, path: Path) -> None:
    """Through the page cache, then fsync."""
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(view), 16 * MIB):
            file.write(view[start : start + 16 * MIB])
        os.fsync(file.fileno())


def paced(ops: FileOps, call_mib: int) -> Callable[[memoryview, Path], None]:
    """As a spill writes."""

    def write(view: memoryview, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, len(view))
        writer = PacedWriter(ops, fd)
        for start in range(0, len(view), call_mib * MIB):
            writer.write(view[start : start + call_mib * MIB], start)
        writer.finish()
        os.close(fd)

    return write


def mapped_read(view: memoryview, path: Path) -> None:
    """Map and copy."""
    fd = os.open(path, os.O_RDONLY)
    pages = memoryview(mmap(fd, len(view), prot=1))
    view[:] = pages
    os.close(fd)


def streamed_read(ops: FileOps) -> Callable[[memoryview, Path], None]:
    """As a restore reads."""

    def read(view: memoryview, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY)
        read_ahead(ops, fd, 0, len(view), lambda a, b: view[a:b], lambda data, at: None)
        os.close(fd)

    return read


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    nbytes = options.mib * MIB
    folder = Path(tempfile.mkdtemp(prefix="shardstore-benchmark-"))
    writes = {
        "write: page cache, then fsync": plain,
        "write: page cache, paced window": paced(Cached(), 64),
        "write: O_DIRECT, 16 MiB a call": paced(FileOps(), 16),
        "write: O_DIRECT, 64 MiB a call": paced(FileOps(), 64),
    }
    reads = {
        "read: map and copy": mapped_read,
        "read: page cache, chunks ahead, dropped": streamed_read(Cached()),
        "read: O_DIRECT, chunks ahead": streamed_read(FileOps()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*writes, *reads)}
    try:
        with tmpfs_slot(nbytes) as view:
            for _ in range(options.runs):
                for name, write in writes.items():
                    path = folder / "file"
                    started = time.perf_counter()
                    write(view, path)
                    seconds[name].append(time.perf_counter() - started)
                    if name != list(writes)[-1]:
                        path.unlink()
                for name, read in reads.items():
                    drop_cache(folder / "file")
                    started = time.perf_counter()
                    read(view, folder / "file")
                    seconds[name].append(time.perf_counter() - started)
                (folder / "file").unlink()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, found in seconds.items():
        print(f"{name:48} {nbytes / statistics.median(found) / 1e9:6.2f} GB/s")


if __name__ == "__main__":
    main()
