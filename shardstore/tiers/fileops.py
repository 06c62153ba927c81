"""Every system call that storage goes through, one method each: the seam where tests break things."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

from shardstore.errors import TierError, TierFullError

CHUNK_BYTES: Final = 16 << 20
"""Bytes per read: large enough to stream, small enough to work on them while further ones come."""

WRITE_BYTES: Final = 64 << 20
"""Bytes per write: direct writes of less do not reach the device's speed."""

_SYNC_WRITE: Final = 2
_SYNC_WAIT: Final = 1 | 2 | 4


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Linux's call, which Python does not have; called through ctypes it releases the GIL."""
    found = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
        found.restype = ctypes.c_int
    return found


_native_sync_file_range: Final = _find_sync_file_range()


def _sync_file_range(fd: int, offset: int, nbytes: int, flags: int) -> None:
    """Errors do not matter: fsync follows, and says."""
    if _native_sync_file_range is not None and nbytes:
        _native_sync_file_range(fd, offset, nbytes, flags)


_MEMORY_TYPES: Final = (0x01021994, 0x858458F6)
"""TMPFS_MAGIC and RAMFS_MAGIC of statfs(2)."""


def _file_system_type(path: str) -> int | None:
    """First field of statfs(2), which Python does not have; None where the call is missing or fails."""
    native = getattr(ctypes.CDLL(None), "statfs", None)
    answer = (ctypes.c_ulong * 64)()  # more than the struct of any architecture
    if native is None or native(os.fsencode(path), answer) != 0:
        return None
    return int(answer[0])


class FileOps:
    """The operating system, as tiers use it.

    Stateless and thread-safe. Subclasses count, delay, break or end the process at the n-th call; no
    tier calls `os` for anything that changes storage or reads content other than through this.
    Errors are those of `os`: tiers translate them with `translated`.
    """

    def point(self, name: str) -> None:
        """Pass a named protocol step that is not a system call of its own."""

    def request(self, operation: str, key: str, *, changes: bool) -> None:
        """Pass the moment before a request to remote storage, or before its answer is used."""

    def open_new(self, path: str, mode: int = 0o666) -> int:
        """Create a file that must not exist, for reading and writing."""
        return os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode
        )

    def open_existing(self, path: str, *, writable: bool = False) -> int:
        """Open a regular file. Links, pipes, devices and folders are refused, and not waited for."""
        flags = os.O_RDWR if writable else os.O_RDONLY
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file")
        return fd

    def open_lock(self, path: str) -> int:
        """Open a lock file for writing, made if it is missing, for this user alone."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def allocate(self, fd: int, nbytes: int, offset: int = 0) -> None:
        """Reserve blocks, so that a full file system says ENOSPC here and not by a signal later."""
        if nbytes:
            os.posix_fallocate(fd, offset, nbytes)

    def set_size(self, fd: int, nbytes: int) -> None:
        """Make a file `nbytes` long: a new one, without memory or blocks, or a lock file."""
        os.ftruncate(fd, nbytes)

    def begin_pages(self, fd: int, offsets: Iterable[int]) -> None:
        """Give a new file's pages at `offsets` memory, of zeros."""
        for offset in offsets:
            os.pwrite(fd, b"\0", offset)

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        """Write all of `data`, whatever the kernel's appetite per call."""
        done = 0
        while done < len(data):
            written = os.pwrite(fd, data[done : done + WRITE_BYTES], offset + done)
            if written <= 0:
                raise OSError(errno.EIO, "write made no progress")
            done += written

    def read_at(self, fd: int, into: memoryview, offset: int) -> int:
        """Fill `into`; returns fewer bytes than asked only at the end of the file."""
        done = 0
        while done < len(into):
            got = os.preadv(fd, [into[done : done + CHUNK_BYTES]], offset + done)
            if got == 0:
                break
            done += got
        return done

    def bypass_cache(self, fd: int, on: bool) -> bool:
        """Turn O_DIRECT of an open file on or off; False if the file system does not have it."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        wanted = flags | os.O_DIRECT if on else flags & ~os.O_DIRECT
        if wanted != flags:
            try:
                fcntl.fcntl(fd, fcntl.F_SETFL, wanted)
            except OSError:
                return False
        return True

    def start_writeback(self, fd: int, offset: int, nbytes: int) -> None:
        """Begin to write dirty pages of a range, and do not wait. Pacing only, never durability."""
        _sync_file_range(fd, offset, nbytes, _SYNC_WRITE)

    def drop_written(self, fd: int, offset: int, nbytes: int) -> None:
        """Wait until a range is written, and let the page cache have its pages back."""
        _sync_file_range(fd, offset, nbytes, _SYNC_WAIT)
        try:
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
        except OSError:
            pass  # advice only

    def fsync(self, fd: int) -> None:
        """Make a file's content durable."""
        os.fsync(fd)

    def fsync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: str, target: str) -> None:
        """Rename within one file system, replacing `target`."""
        os.rename(source, target)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name that must not exist: the exclusive create of P4."""
        os.link(source, target)

    def unlink(self, path: str) -> None:
        """Remove a name."""
        os.unlink(path)

    def make_folder(self, path: str, mode: int = 0o777) -> None:
        """Create a folder that must not exist."""
        os.mkdir(path, mode)

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def list_folder(self, path: str) -> list[str]:
        """Names in a folder, unordered."""
        return os.listdir(path)

    def read_text(self, path: str) -> str:
        """Read a small file in which the kernel tells of this process or machine."""
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()

    def is_memory(self, path: str) -> bool:
        """Whether files in this folder are memory (tmpfs or ramfs); assumed where nobody can say."""
        return _file_system_type(path) in (None, *_MEMORY_TYPES)

    def free_space(self, path: str) -> int | None:
        """Bytes that this user may still write where `path` is; None where nobody can say."""
        try:
            found = os.statvfs(path)
        except OSError:
            return None
        return found.f_bavail * found.f_frsize if found.f_blocks else None

    def store(self, slot: memoryview, offset: int, data: bytes) -> None:
        """Write bytes into a mapped slot."""
        slot[offset : offset + len(data)] = data


_current = FileOps()


def current_ops() -> FileOps:
    """System calls for stores that are opened from now on."""
    return _current


@contextmanager
def use_ops(ops: FileOps) -> Iterator[FileOps]:
    """Open stores inside the `with` over other system calls: for tests that count and break them."""
    global _current  # noqa: PLW0603 - one process, one operating system
    before, _current = _current, ops
    try:
        yield ops
    finally:
        _current = before


def make_folders(ops: FileOps, path: str, mode: int = 0o777) -> list[str]:
    """Make a folder and what is missing above it, outermost first; others may do so at the same time.

    Returns:
        What was missing, whoever made it then: innermost first.
    """
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        try:
            ops.make_folder(folder, mode)
        except FileExistsError:
            pass
    return missing


@contextmanager
def translated(tier: str, operation: str, key: str, *, needed_bytes: int = 0) -> Iterator[None]:
    """Turn an OSError of the body into a TierError that says where; the original stays its cause."""
    try:
        yield
    except TierError:
        raise
    except OSError as error:
        raise_translated(error, tier, operation, key, needed_bytes)


def raise_translated(
    error: OSError, tier: str, operation: str, key: str, needed_bytes: int = 0
) -> NoReturn:
    """Raise `error` as a TierError, or as a TierFullError when the device or quota is full."""
    code = errno.errorcode.get(error.errno or 0, "OSError")
    text = f"{tier}: {operation} {key} failed: {code} ({error.strerror or error})"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = free_bytes(os.path.dirname(key))
        raise TierFullError(
            f"{text}; needed {needed_bytes:,} bytes, {free:,} are free. Free space, or use keep= to "
            "delete old snapshots.",
            tier=tier, key=key, operation=operation, needed_bytes=needed_bytes, free_bytes=free,
        ) from error  # fmt: skip
    raise TierError(text, tier=tier, key=key, operation=operation) from error


def free_bytes(path: str) -> int:
    """Bytes that this user may still write where `path` is, or at its nearest existing parent."""
    while path and path != "/" and not os.path.exists(path):
        path = os.path.dirname(path)
    try:
        stats = os.statvfs(path or "/")
    except OSError:
        return 0
    return stats.f_bavail * stats.f_frsize
