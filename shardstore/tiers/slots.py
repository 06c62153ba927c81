"""One slot: a mapped file (or anonymous memory) that is built in place into a shard file."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal

from shardstore.errors import CorruptSnapshotError
from shardstore.format.records import ShardHeader, SnapshotId
from shardstore.format.shardfile import header_length, is_header_whole, parse_header
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.pages import map_file
from shardstore.tiers.transfer import Place

_LENGTH_BYTES: Final = 8


@dataclass(eq=False, slots=True)
class Slot:
    """Memory for one shard file, kept mapped from save to save.

    Owned by the memory tier; whoever holds it between `reserve` and `seal` may write into `view`.
    """

    nbytes: int
    mapping: mmap.mmap
    """Owns the addresses of `view`."""
    view: memoryview
    """The whole file."""
    path: str | None
    """Current name on the tmpfs; None for anonymous memory."""
    state: Literal["free", "staging", "sealed"] = "free"
    id: SnapshotId | None = None
    users: int = 0
    """Readers and spills under way."""
    is_failed: bool = False
    """The save failed, was deleted, or (adopted) some rank cannot read it: nobody can use it."""
    is_safe: bool = False
    """Committed further out, or superseded for good."""
    is_kept: bool = False
    """persist=False: stays until it is deleted, or goes further out because its memory is needed."""
    is_leaving: bool = False
    """Somebody needs its memory: the ranks are asked to spill it."""
    is_only_here: bool = False
    """Pinned, and gone from further out: nothing will ever free its memory."""
    views: object = None
    """The owner's cache of typed views, dropped with the slot."""

    @property
    def source(self) -> str:
        """Name for messages."""
        return self.path or f"anonymous memory of {self.id.name if self.id else 'a slot'}"

    def unmap(self) -> None:
        """Drop the mapping; it goes when the last tensor that views it does."""
        self.views = None
        try:
            self.view.release()
            self.mapping.close()
        except BufferError:
            pass  # a view is still alive: the memory follows it


def map_slot(fd: int, nbytes: int, path: str | None) -> Slot:
    """Map a file of `nbytes`."""
    mapping, view = map_file(fd, nbytes)
    return Slot(nbytes, mapping, view, path)


def read_slot_header(view: memoryview, source: str) -> tuple[ShardHeader, str]:
    """Parse the header of a sealed slot; returns it with its digest.

    Raises:
        FormatError, CorruptSnapshotError: Not a whole shard file.
    """
    nbytes = len(view)
    if nbytes < _LENGTH_BYTES:
        raise CorruptSnapshotError(
            f"{source} has {nbytes} bytes: too short", tier="memory", file=source
        )
    length = header_length(view[:_LENGTH_BYTES], nbytes, source=source)
    parsed = parse_header(view[: _LENGTH_BYTES + length], nbytes, source=source)
    return parsed.header, parsed.digest


def check_slot_header(view: memoryview, source: str) -> None:
    """Check a sealed slot's header by its digest, without parsing it.

    Raises:
        FormatError, CorruptSnapshotError: It is damaged.
    """
    length = header_length(view[:_LENGTH_BYTES], len(view), source=source)
    if not is_header_whole(view[: _LENGTH_BYTES + length]):
        raise CorruptSnapshotError(
            f"{source}: the header is damaged: it does not have the digest it was sealed with",
            tier="memory", file=source,
        )  # fmt: skip


def write_header(ops: FileOps, slot: Slot, header: bytes) -> None:
    """Complete the file in `slot`: header text first, its length (which makes it readable) last."""
    ops.store(slot.view, _LENGTH_BYTES, header[_LENGTH_BYTES:])
    ops.store(slot.view, 0, header[:_LENGTH_BYTES])


def erase_header(ops: FileOps, slot: Slot) -> None:
    """Make the file in `slot` unreadable, before anything else is written into it."""
    ops.store(slot.view, 0, bytes(_LENGTH_BYTES))


class SlotReader:
    """A sealed slot as a ShardReader: hands out views, no copies, and keeps the slot from reuse."""

    tier = "memory"
    is_mapped = True
    may_differ_again = False
    chunk_bytes = 0
    num_places = 0

    def __init__(self, slot: Slot, release: Callable[[Slot], None]) -> None:
        """`release` is called with the slot when the reader is left."""
        self._slot = slot
        self._release = release
        self.source = slot.source
        self.nbytes = slot.nbytes

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of the mapping itself."""
        return self._slot.view[start:stop]

    def forget(self) -> None:
        """Nothing is kept."""

    def stream(
        self,
        start: int,
        stop: int,
        place: Place,  # noqa: ARG002 - mapped already
        arrived: Callable[[memoryview, int], None],
    ) -> int:
        """Hand out the mapping itself; see ShardReader."""
        data = self._slot.view[start:stop]
        arrived(data, start)
        return start + len(data)

    def __enter__(self) -> SlotReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release(self._slot)
