"""Host memory in huge pages, as far as the kernel gives them.

Copies, digests and direct transfers of huge pages are faster than those of small ones, and a direct write
interrupts the processors less: docs/design/0007 has figures. For private memory advice is enough. Files
on a tmpfs get small pages on most machines (`shmem_enabled` is "never" by default), but a process may
have them collapsed (MADV_COLLAPSE, Linux 6.1), for which address and offset must be aligned alike.
Nothing here is needed for anything but speed: where the kernel refuses, pages stay small.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Final

_SIZE_FILE: Final = "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size"
_USUAL_BYTES: Final = 2 << 20
_MAP_FIXED: Final = 0x10
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_MADV_POPULATE_WRITE: Final = 23
_MADV_COLLAPSE: Final = 25

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


_never_unmapped: Final[list[mmap.mmap]] = []
"""Reservations that may have a hole, in which somebody else's memory may be by now."""


@cache
def huge_page_bytes() -> int:
    """Size of a huge page of this machine, in bytes: a power of two."""
    try:
        with open(_SIZE_FILE, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return _USUAL_BYTES


def map_file(fd: int, nbytes: int) -> tuple[mmap.mmap, memoryview]:
    """Map the first `nbytes` of a file for reading and writing, where it may have huge pages.

    Returns:
        What owns the addresses, and the bytes: closing the first unmaps the second. Forked children get
        neither. `fd` may be closed at once.

    Raises:
        OSError: It cannot be mapped.
    """
    huge = huge_page_bytes()
    found = _map_aligned(fd, nbytes, huge) if nbytes >= huge else None
    if found is None:
        owner = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        found = owner, memoryview(owner)
    # A forked loader worker must not copy page tables of tens of GiB, nor keep the pages alive.
    found[0].madvise(mmap.MADV_DONTFORK)
    return found


def _map_aligned(fd: int, nbytes: int, huge: int) -> tuple[mmap.mmap, memoryview] | None:
    """Map into the aligned part of a reservation, which owns the addresses; None if that fails."""
    try:
        reserved = mmap.mmap(-1, nbytes + huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None  # the machine counts reservations strictly
    begin = address_of(memoryview(reserved))
    skipped = -begin % huge
    mode = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(begin + skipped, nbytes, *mode, fd, 0) == _MAP_FAILED:
        _never_unmapped.append(reserved)
        return None
    return reserved, memoryview(reserved)[skipped : skipped + nbytes]


def private_pages(nbytes: int) -> memoryview:
    """Page-aligned memory for transfers, which forked children do not get.

    A fork during a direct transfer could otherwise leave the bytes with the child (open(2), O_DIRECT).
    """
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    try:
        pages.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without them
    return memoryview(pages)


def collapse(view: memoryview, start: int, stop: int) -> bool:
    """Make [start, stop) of a mapped file huge pages; False if the kernel would not for all of it.

    Each huge page's part of the file must have a page already; the rest of it may be a hole, and becomes
    zeros. Waits for memory to be zeroed or copied, with the GIL released.
    """
    return _advise(view, start, stop, _MADV_COLLAPSE)


def populate(view: memoryview) -> None:
    """Have every page of a fresh file mapped here as well, with the GIL released; all of it is zeros.

    For files whose memory is reserved already.
    """
    if not _advise(view, 0, len(view), _MADV_POPULATE_WRITE):
        ctypes.memset(address_of(view), 0, len(view))  # before Linux 5.14


def _advise(view: memoryview, start: int, stop: int, advice: int) -> bool:
    # mmap.madvise would hold the GIL.
    return not _libc.madvise(address_of(view) + start, stop - start, advice)


def address_of(view: memoryview) -> int:
    """Address of the first of some writable bytes."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
