"""What a tier promises: the protocol, and the durability contract in prose.

A tier holds shard files, the same bytes in each, under (snapshot id, rank).

1. **Whole or absent.** A shard is visible under its final name only after its last byte is in place. A
   process that dies at any instruction leaves either nothing under that name or the whole file.
2. **Written once.** Nothing is ever written into a file that carries a final name, and a name is never
   given to a second content: every attempt has a new id.
3. **Durable when `publish` returns** (disk, root): file, folder and parent folder were synced.
4. **The manifest is a register** (root): created exclusively, as `committed` or `aborted`; an answer
   that is in doubt is settled by reading it back. `committed` may be replaced by `aborted`, never the
   other way.
5. **Errors are TierErrors** that name tier, key and operation, with the original as cause.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from types import TracebackType
from typing import NamedTuple, Protocol

from shardstore.errors import TierError
from shardstore.format.marks import Mark
from shardstore.format.records import SnapshotId


class Found(NamedTuple):
    """A file in a root, as a listing shows it."""

    nbytes: int
    """-1: not looked at."""
    tag: str = ""
    """Unequal for two contents of one name; empty where the tier has nothing like it."""


class Survey(NamedTuple):
    """A root at one moment."""

    attempts: dict[SnapshotId, dict[str, Found]]
    """Files in the folder of every attempt, by name."""
    names: tuple[str, ...]
    """Of the files in the root itself."""


class ShardReader(Protocol):
    """An open shard file. A context manager: bytes handed out are valid until it is left."""

    tier: str
    source: str
    """Path or address, for messages."""
    nbytes: int
    is_mapped: bool
    """Whether `read` hands out the tier's own memory."""
    may_differ_again: bool
    """Whether wrong bytes may have become so on the way here: then they are worth reading once more."""
    chunk_bytes: int
    """The most that `stream` asks `place` for at once."""
    num_places: int
    """Places that `stream` has in use at a time, at most."""

    def read(self, start: int, stop: int) -> memoryview | bytes:
        """Bytes [start, stop), fewer at the end of the file; a view where the tier has them mapped.

        From any thread.
        """
        ...

    def forget(self) -> None:
        """Read anew what was read before."""
        ...

    def stream(
        self,
        start: int,
        stop: int,
        place: Callable[[int, int], memoryview],
        arrived: Callable[[memoryview, int], None],
    ) -> int:
        """Read bytes [start, stop) in order, further ones while `arrived` works on those that came.

        Args:
            start: First byte.
            stop: End of the range.
            place: Memory for the bytes of a range of offsets, which may reach a page beyond this one;
                not used where the tier has the bytes mapped.
            arrived: Called on this thread, in order, with bytes and their offset. They are valid until
                it returns, or as long as `place`'s memory. What it raises ends the reading.

        Returns:
            The end of what there was, less than `stop` where the file is truncated.
        """
        ...

    def __enter__(self) -> ShardReader: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class ShardWriter(Protocol):
    """A shard on its way into a tier; nobody sees it before `publish`."""

    piece_bytes: int
    """A good size for the data of one `write`."""
    is_aligned: bool
    """Pieces should begin at multiples of `piece_bytes`: others are put together in a copy."""
    num_parallel: int
    """How many threads may write at the same time."""
    is_in_order: bool
    """Pieces must come from the first byte on, one after the other: the header first."""

    def write(self, data: memoryview, offset: int) -> None:
        """Write a part at its place in the file. `data` may be reused on return."""
        ...

    def publish(self) -> None:
        """Make it durable and visible under its final name."""
        ...

    def discard(self) -> None:
        """Give up: nothing of it stays. After `publish` it does nothing."""
        ...


class RootTier(Protocol):
    """Where snapshots are durable."""

    name: str
    location: str
    """Absolute path or URL, without credentials."""
    keeps_index: bool
    """Reading a register is a request: what is known of them is kept in a file of its own."""
    keep_closed_s: float
    """How long `remove` leaves the register of what it removes, so that no slower process commits it."""
    is_shared: bool | None
    """Whether all hosts see the same; None: that has to be found out."""

    def list_ids(self) -> list[SnapshotId]:
        """Every attempt that has a folder here, in any state, unordered."""
        ...

    def survey(self) -> Survey:
        """All attempts and the files in their folders: one look, whatever their number."""
        ...

    def list_ranks(self, snapshot_id: SnapshotId) -> list[int]:
        """Ranks whose shard is here, sorted."""
        ...

    def create_shard(self, snapshot_id: SnapshotId, rank: int, nbytes: int) -> ShardWriter:
        """Begin one shard of `nbytes`, whose parts come one by one."""
        ...

    def open_shard(self, snapshot_id: SnapshotId, rank: int) -> ShardReader:
        """Open one shard; FileNotFoundError becomes a TierError like the others."""
        ...

    def read_manifest(self, snapshot_id: SnapshotId) -> bytes | None:
        """Content of the register, None while it was not created."""
        ...

    def read_manifests(
        self, ids: Collection[SnapshotId]
    ) -> dict[SnapshotId, bytes | TierError | None]:
        """Many registers, each as from `read_manifest`, or why it cannot be read."""
        ...

    def register_tag(self, snapshot_id: SnapshotId) -> str:
        """Tag of the register, as in a survey; empty if there is none."""
        ...

    def create_manifest(
        self,
        snapshot_id: SnapshotId,
        data: bytes,
        *,
        make_folder: bool,
        ranks: Collection[int] = (),
    ) -> bytes | None:
        """Create the register exclusively and durably; returns what it holds, ours or another's.

        Without `make_folder`: None if the attempt's folder is gone (it was aborted and removed), or does
        not hold a shard of each of `ranks` at that moment. Where `ranks` maps them to sizes in bytes, a
        shard of another size is a TierError.
        """
        ...

    def replace_manifest(self, snapshot_id: SnapshotId, data: bytes) -> None:
        """Replace the register atomically and durably."""
        ...

    def make_durable(self, snapshot_id: SnapshotId, ranks: Iterable[int]) -> None:
        """Sync shards that another run wrote, and their folders."""
        ...

    def remove_shard(self, snapshot_id: SnapshotId, rank: int) -> None:
        """Remove what this rank left of an attempt that failed; absent files are fine."""
        ...

    def remove(self, snapshot_id: SnapshotId) -> None:
        """Remove an attempt whose register says `aborted`: bytes first, then the folder."""
        ...

    def remove_deleted(self, name: str) -> None:
        """Remove one of `list_deleted`."""
        ...

    def list_deleted(self) -> list[str]:
        """Names of what an interrupted `remove` left."""
        ...

    def list_names(self, folder: str = "") -> list[tuple[str, int]]:
        """Names and sizes of all that is in the root, or in one of its folders."""
        ...

    def read_small(self, name: str) -> bytes | None:
        """A small file in the root itself, None if it is not there."""
        ...

    def put_small(self, name: str, data: bytes) -> None:
        """Create or replace a small file in the root itself, which nothing depends on."""
        ...

    def remove_small(self, name: str) -> None:
        """Remove one of those; absent is fine."""
        ...

    def list_unfinished(self) -> list[tuple[SnapshotId, str]]:
        """What was begun in an attempt's folder and no listing shows, by names for `remove_temp`."""
        ...

    def remove_temp(self, folder: str, name: str) -> None:
        """Remove a file that a dead process was writing."""
        ...

    def marks(self, snapshot_id: SnapshotId) -> frozenset[Mark]:
        """Marks beside a snapshot."""
        ...

    def put_mark(self, snapshot_id: SnapshotId, mark: Mark) -> None:
        """Put a mark beside a snapshot that is there, durably. Again is fine."""
        ...

    def drop_mark(self, snapshot_id: SnapshotId, mark: Mark) -> None:
        """Remove a mark, durably. Again is fine."""
        ...

    def run_numbers(self) -> list[int]:
        """Numbers of all claimed runs, unordered."""
        ...

    def make_location(self) -> None:
        """Make the root itself, where it has to be made."""
        ...

    def claim_run(self, run: int, record: bytes) -> bool:
        """Create the run's record exclusively; False if the number is taken."""
        ...

    def read_run(self, run: int) -> bytes | None:
        """A run's record, None if it cannot be seen from here."""
        ...

    def check(self) -> None:
        """Make sure by the smallest request that it can be read from. That it is empty is fine.

        Raises:
            TierError: It cannot.
        """
        ...

    def check_writable(self) -> None:
        """Find out whether it could be written to, as far as can be told without leaving anything.

        Raises:
            TierError: It could not.
        """
        ...

    def on_wait(self, waiting: Callable[[], None]) -> None:
        """Call `waiting`, on any thread, while the tier waits for storage that may come back, or is slow."""
        ...

    @property
    def is_exclusive(self) -> bool | None:
        """Whether the register is created exclusively; None: that was not found out yet."""
        ...

    @property
    def is_failing(self) -> bool:
        """Whether storage has not answered for a while."""
        ...

    def close(self) -> None:
        """Wait for storage no more, from now on."""
        ...
