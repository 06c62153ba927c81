"""One shard file on a file system: written under a temp name until it is whole, or opened for reading."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from types import TracebackType

from shardstore.tiers.fileops import CHUNK_BYTES, WRITE_BYTES, FileOps, translated
from shardstore.tiers.transfer import MAX_PLACES, PacedWriter, Place, read_ahead


class DiskWriter:
    """A shard file on its way. If the process dies before `publish`, only a temp name is left."""

    piece_bytes = WRITE_BYTES
    is_aligned = False
    num_parallel = 1
    is_in_order = False

    def __init__(self, ops: FileOps, tier: str, target: str, nbytes: int) -> None:
        """Create and reserve; errors are those of `os`, nothing is left then."""
        self._ops = ops
        self._tier = tier
        self._target = target
        self._temp = f"{target}.tmp"
        self._nbytes = nbytes
        self._fd: int | None = ops.open_new(self._temp)
        try:
            self._reserve(self._fd, nbytes)
            self._writer = PacedWriter(ops, self._fd)
        except BaseException:
            self.discard()
            raise

    def _reserve(self, fd: int, nbytes: int) -> None:
        try:
            self._ops.allocate(fd, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise

    def own(self) -> None:
        """Show others, until this process ends or the file is published, that somebody writes it."""
        assert self._fd is not None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pass  # no locks here: what a dead run left is taken for somebody's

    def write(self, data: memoryview, offset: int) -> None:
        """Write a part; whole pages from page-aligned memory are the fast way."""
        with translated(self._tier, "write", self._target, needed_bytes=self._nbytes):
            self._writer.write(data, offset)

    def publish(self) -> None:
        """Make it durable and give it its final name."""
        assert self._fd is not None
        with translated(self._tier, "write", self._target, needed_bytes=self._nbytes):
            self._writer.finish()
            os.close(self._fd)
            self._fd = None
            self._ops.rename(self._temp, self._target)
            self._ops.fsync_folder(os.path.dirname(self._target))

    def discard(self) -> None:
        """Give the space back, unless it was published."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        try:
            self._ops.unlink(self._temp)
        except OSError:
            pass


def remove_if_orphan(ops: FileOps, path: str) -> None:
    """Remove a file under a temp name that nobody owns (see `DiskWriter.own`); never raises for one in use."""
    try:
        fd = ops.open_existing(path)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ops.unlink(path)
        ops.remove_folder(os.path.dirname(path))
    except OSError:
        pass  # it is in use, or other files are beside it
    finally:
        os.close(fd)


class DiskReader:
    """One shard file, opened for reading."""

    is_mapped = False
    may_differ_again = False
    chunk_bytes = CHUNK_BYTES
    num_places = MAX_PLACES

    def __init__(self, ops: FileOps, tier: str, path: str) -> None:
        """Open `path`; a symbolic link or a missing file is a TierError."""
        self._ops = ops
        self.tier = tier
        self.source = path
        with translated(tier, "open", path):
            self._fd = ops.open_existing(path)
            self.nbytes = os.fstat(self._fd).st_size

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop), fewer at the end of the file."""
        buffer = memoryview(bytearray(max(0, min(stop, self.nbytes) - start)))
        with translated(self.tier, "read", self.source):
            got = self._ops.read_at(self._fd, buffer, start)
        return buffer[:got].toreadonly()

    def forget(self) -> None:
        """Nothing is kept."""

    def stream(
        self, start: int, stop: int, place: Place, arrived: Callable[[memoryview, int], None]
    ) -> int:
        """Read a range; see ShardReader."""
        with translated(self.tier, "read", self.source):
            return read_ahead(self._ops, self._fd, start, stop, place, arrived)

    def __enter__(self) -> DiskReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)
