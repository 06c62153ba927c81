"""What the bare machine does: the limits that every system is measured against, in the same run."""

from __future__ import annotations

import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path

import torch

CHUNK_BYTES = 64 << 20
NUM_WRITERS = 2


def warm_copy_s(state: dict[str, torch.Tensor], copy: dict[str, torch.Tensor]) -> float:
    """Copy a state into memory that was written before, with torch's threads."""
    started = time.perf_counter()
    for name, tensor in state.items():
        copy[name].copy_(tensor)
    return time.perf_counter() - started


def one_thread_copy_s(state: dict[str, torch.Tensor], copy: dict[str, torch.Tensor]) -> float:
    """The same on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return warm_copy_s(state, copy)
    finally:
        torch.set_num_threads(before)


def first_touch_s(nbytes: int, folder: str = "/dev/shm") -> float:
    """Get fresh memory on a tmpfs and write every page of it."""
    path = Path(folder) / f"benchmark-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        started = time.perf_counter()
        os.posix_fallocate(fd, 0, nbytes)
        pages = mmap(fd, nbytes)
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(pages)), 1, nbytes)
        return time.perf_counter() - started
    finally:
        os.close(fd)
        path.unlink()


def huge_pages(nbytes: int) -> memoryview:
    """Anonymous memory in huge pages, touched: the best source of direct writes."""
    pages = mmap(-1, nbytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    pages.madvise(MADV_HUGEPAGE)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(pages)), 7, nbytes)
    return memoryview(pages)


def bare_write_s(source: memoryview, path: Path) -> float:
    """Reserve, write directly from huge pages, fsync: as fast as the device takes one file."""
    started = time.perf_counter()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    try:
        os.posix_fallocate(fd, 0, len(source))

        def write(start: int) -> None:
            os.pwrite(fd, source[start : start + CHUNK_BYTES], start)

        with ThreadPoolExecutor(NUM_WRITERS) as pool:
            list(pool.map(write, range(0, len(source), CHUNK_BYTES)))
        os.fsync(fd)
    finally:
        os.close(fd)
    return time.perf_counter() - started


def bare_read_s(path: Path, into: memoryview) -> float:
    """Read a file that is in no cache directly into huge pages."""
    drop_cache(path)
    started = time.perf_counter()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:

        def read(start: int) -> None:
            os.preadv(fd, [into[start : start + CHUNK_BYTES]], start)

        with ThreadPoolExecutor(NUM_WRITERS) as pool:
            list(pool.map(read, range(0, len(into), CHUNK_BYTES)))
    finally:
        os.close(fd)
    return time.perf_counter() - started


def drop_cache(path: Path) -> None:
    """Take files, or all files of a folder, out of the page cache."""
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def fill_cache(path: Path) -> None:
    """Read files, or all files of a folder, into the page cache."""
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        with file.open("rb", buffering=0) as opened:
            while opened.read(CHUNK_BYTES):
                pass
