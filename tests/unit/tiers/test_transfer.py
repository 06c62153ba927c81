"""Direct and windowed transfers give the same bytes, whatever sizes, alignments and refusals."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from pathlib import Path

import pytest

from shardstore.tiers.fileops import CHUNK_BYTES, FileOps
from shardstore.tiers.transfer import PacedWriter, Ring, read_ahead

SIZES = (0, 1, 511, 4096, 4097, CHUNK_BYTES, 2 * CHUNK_BYTES + 4096 + 17)


class Taken:
    """What has arrived, checked to be without holes."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self.end: int | None = None

    def take(self, data: memoryview, offset: int) -> None:
        assert self.end in (None, offset)
        self.bytes += data
        self.end = offset + len(data)


class Recording(FileOps):
    """Counts direct and cached bytes, and can refuse O_DIRECT as some file systems do."""

    def __init__(self, refuse: str = "") -> None:
        self.refuse = refuse
        self.is_direct = self.had_direct = False
        self.direct_bytes = self.cached_bytes = 0
        self.dropped: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def bypass_cache(self, fd: int, on: bool) -> bool:
        if on and self.refuse == "flag":
            return False
        done = super().bypass_cache(fd, on)
        self.is_direct = on and done
        self.had_direct |= self.is_direct
        return done

    def _count(self, nbytes: int) -> None:
        if self.is_direct and self.refuse == "transfer":
            raise OSError(errno.EINVAL, "this device wants another alignment")
        with self._lock:
            if self.is_direct:
                self.direct_bytes += nbytes
            else:
                self.cached_bytes += nbytes

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        self._count(len(data))
        super().write_at(fd, data, offset)

    def read_at(self, fd: int, into: memoryview, offset: int) -> int:
        self._count(len(into))
        return super().read_at(fd, into, offset)

    def drop_written(self, fd: int, offset: int, nbytes: int) -> None:
        self.dropped.append((offset, nbytes))
        super().drop_written(fd, offset, nbytes)


@pytest.fixture(params=["", "flag", "transfer"])
def ops(request: pytest.FixtureRequest) -> Recording:
    """File systems that take O_DIRECT, that refuse the flag, and that refuse every direct transfer."""
    return Recording(request.param)


@pytest.fixture
def memory() -> memoryview:
    """Page-aligned memory with content."""
    mapping = mmap.mmap(-1, max(SIZES))
    mapping[:] = random.Random(7).randbytes(max(SIZES))
    return memoryview(mapping)


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_written_is_the_file_and_reads_back(
    ops: Recording, memory: memoryview, disk_folder: Path, nbytes: int
) -> None:
    path = disk_folder / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    writer = PacedWriter(ops, fd)
    for start in range(0, nbytes, CHUNK_BYTES):
        writer.write(memory[start : min(start + CHUNK_BYTES, nbytes)], start)
    writer.finish()
    assert path.read_bytes() == memory[:nbytes]
    if ops.refuse or not ops.had_direct:
        assert ops.direct_bytes == 0
        assert sum(n for _, n in ops.dropped) == nbytes, "nothing of it stays in the page cache"
    else:
        assert ops.direct_bytes == nbytes // 4096 * 4096

    for start, stop in ((0, nbytes), (nbytes // 3, nbytes), (nbytes // 3, nbytes // 2)):
        whole = memoryview(mmap.mmap(-1, max(1, nbytes)))
        taken = Taken()
        assert (
            read_ahead(
                ops,
                fd,
                start,
                stop,
                lambda a, b: whole[a:b],  # noqa: B023
                taken.take,
            )
            == stop
        )
        assert whole[start:stop] == memory[start:stop]
        assert taken.bytes == memory[start:stop]
        passing = Taken()
        assert read_ahead(ops, fd, start, stop, Ring().place, passing.take) == stop
        assert passing.bytes == memory[start:stop]
    assert os.read(fd, 1) == memory[:nbytes][:1], "the descriptor reads anything again"
    os.close(fd)


def test_a_file_that_is_shorter_than_it_should_be_says_where_it_ends(
    ops: Recording, memory: memoryview, disk_folder: Path
) -> None:
    path = disk_folder / "file"
    path.write_bytes(memory[: CHUNK_BYTES + 5000])
    fd = os.open(path, os.O_RDONLY)
    taken = Taken()
    assert read_ahead(ops, fd, 100, max(SIZES), Ring().place, taken.take) == CHUNK_BYTES + 5000
    assert taken.bytes == memory[100 : CHUNK_BYTES + 5000]
    os.close(fd)


def test_what_the_consumer_raises_ends_the_reading(
    ops: Recording, memory: memoryview, disk_folder: Path
) -> None:
    path = disk_folder / "file"
    path.write_bytes(memory)
    fd = os.open(path, os.O_RDONLY)

    def refuse(data: memoryview, offset: int) -> None:
        raise ValueError(f"{len(data)} bad bytes at {offset}")

    with pytest.raises(ValueError, match="bad bytes"):
        read_ahead(ops, fd, 0, max(SIZES), Ring().place, refuse)
    assert os.read(fd, 7) == memory[:7], "the descriptor reads anything again"
    os.close(fd)


def test_a_full_disk_in_a_direct_write_is_told_as_it_is(
    memory: memoryview, disk_folder: Path
) -> None:
    class Full(FileOps):
        def write_at(self, fd: int, data: memoryview, offset: int) -> None:
            raise OSError(errno.ENOSPC, "full")

    fd = os.open(disk_folder / "file", os.O_RDWR | os.O_CREAT)
    with pytest.raises(OSError, match="full"):
        PacedWriter(Full(), fd).write(memory[:8192], 0)
    os.close(fd)
