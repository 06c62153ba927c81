"""A root tier around another one, which does what that does: the base of tiers that misbehave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from types import TracebackType

from shardstore.errors import TierError
from shardstore.format.marks import Mark
from shardstore.format.records import SnapshotId
from shardstore.tiers.base import RootTier, ShardReader, ShardWriter, Survey


class WrappedTier:
    """Hands every call on. Subclasses override `enter`, which sees each operation first, or the calls."""

    def __init__(self, inner: RootTier) -> None:
        """Around `inner`, which keeps what is stored."""
        self.inner = inner
        self.name = inner.name
        self.location = inner.location
        self.keeps_index = inner.keeps_index
        self.keep_closed_s = inner.keep_closed_s
        self.is_shared = inner.is_shared

    @property
    def is_exclusive(self) -> bool | None:
        """See RootTier."""
        return self.inner.is_exclusive

    @property
    def is_failing(self) -> bool:
        """See RootTier."""
        return self.inner.is_failing

    def check(self) -> None:
        """See RootTier."""
        self.enter("check")
        self.inner.check()

    def check_writable(self) -> None:
        """See RootTier."""
        self.enter("check_writable")
        self.inner.check_writable()

    def on_wait(self, waiting: Callable[[], None]) -> None:
        """See RootTier."""
        self.inner.on_wait(waiting)

    def close(self) -> None:
        """See RootTier. It is no operation: what a dead process opened is closed as well."""
        self.inner.close()

    def enter(self, operation: str, nbytes: int = 0) -> None:
        """Before each operation of the tier, of its writers and of its readers. On any thread.

        Args:
            operation: The method's name.
            nbytes: Bytes that it moves.
        """

    def list_ids(self) -> list[SnapshotId]:
        """See RootTier."""
        self.enter("list_ids")
        return self.inner.list_ids()

    def survey(self) -> Survey:
        """See RootTier."""
        self.enter("survey")
        return self.inner.survey()

    def list_ranks(self, snapshot_id: SnapshotId) -> list[int]:
        """See RootTier."""
        self.enter("list_ranks")
        return self.inner.list_ranks(snapshot_id)

    def create_shard(self, snapshot_id: SnapshotId, rank: int, nbytes: int) -> ShardWriter:
        """See RootTier."""
        self.enter("create_shard")
        return WrappedWriter(self, self.inner.create_shard(snapshot_id, rank, nbytes))

    def open_shard(self, snapshot_id: SnapshotId, rank: int) -> ShardReader:
        """See RootTier."""
        self.enter("open_shard")
        return WrappedReader(self, self.inner.open_shard(snapshot_id, rank))

    def read_manifest(self, snapshot_id: SnapshotId) -> bytes | None:
        """See RootTier."""
        self.enter("read_manifest")
        return self.inner.read_manifest(snapshot_id)

    def read_manifests(
        self, ids: Collection[SnapshotId]
    ) -> dict[SnapshotId, bytes | TierError | None]:
        """See RootTier."""
        self.enter("read_manifests")
        return self.inner.read_manifests(ids)

    def register_tag(self, snapshot_id: SnapshotId) -> str:
        """See RootTier."""
        self.enter("register_tag")
        return self.inner.register_tag(snapshot_id)

    def create_manifest(
        self,
        snapshot_id: SnapshotId,
        data: bytes,
        *,
        make_folder: bool,
        ranks: Collection[int] = (),
    ) -> bytes | None:
        """See RootTier."""
        self.enter("create_manifest", len(data))
        return self.inner.create_manifest(snapshot_id, data, make_folder=make_folder, ranks=ranks)

    def replace_manifest(self, snapshot_id: SnapshotId, data: bytes) -> None:
        """See RootTier."""
        self.enter("replace_manifest", len(data))
        self.inner.replace_manifest(snapshot_id, data)

    def make_durable(self, snapshot_id: SnapshotId, ranks: Iterable[int]) -> None:
        """See RootTier."""
        self.enter("make_durable")
        self.inner.make_durable(snapshot_id, ranks)

    def remove_shard(self, snapshot_id: SnapshotId, rank: int) -> None:
        """See RootTier."""
        self.enter("remove_shard")
        self.inner.remove_shard(snapshot_id, rank)

    def remove(self, snapshot_id: SnapshotId) -> None:
        """See RootTier."""
        self.enter("remove")
        self.inner.remove(snapshot_id)

    def remove_deleted(self, name: str) -> None:
        """See RootTier."""
        self.enter("remove_deleted")
        self.inner.remove_deleted(name)

    def list_deleted(self) -> list[str]:
        """See RootTier."""
        self.enter("list_deleted")
        return self.inner.list_deleted()

    def list_names(self, folder: str = "") -> list[tuple[str, int]]:
        """See RootTier."""
        self.enter("list_names")
        return self.inner.list_names(folder)

    def read_small(self, name: str) -> bytes | None:
        """See RootTier."""
        self.enter("read_small")
        return self.inner.read_small(name)

    def put_small(self, name: str, data: bytes) -> None:
        """See RootTier."""
        self.enter("put_small", len(data))
        self.inner.put_small(name, data)

    def remove_small(self, name: str) -> None:
        """See RootTier."""
        self.enter("remove_small")
        self.inner.remove_small(name)

    def list_unfinished(self) -> list[tuple[SnapshotId, str]]:
        """See RootTier."""
        self.enter("list_unfinished")
        return self.inner.list_unfinished()

    def remove_temp(self, folder: str, name: str) -> None:
        """See RootTier."""
        self.enter("remove_temp")
        self.inner.remove_temp(folder, name)

    def marks(self, snapshot_id: SnapshotId) -> frozenset[Mark]:
        """See RootTier."""
        self.enter("marks")
        return self.inner.marks(snapshot_id)

    def put_mark(self, snapshot_id: SnapshotId, mark: Mark) -> None:
        """See RootTier."""
        self.enter("put_mark")
        self.inner.put_mark(snapshot_id, mark)

    def drop_mark(self, snapshot_id: SnapshotId, mark: Mark) -> None:
        """See RootTier."""
        self.enter("drop_mark")
        self.inner.drop_mark(snapshot_id, mark)

    def make_location(self) -> None:
        """See RootTier."""
        self.enter("make_location")
        self.inner.make_location()

    def run_numbers(self) -> list[int]:
        """See RootTier."""
        self.enter("run_numbers")
        return self.inner.run_numbers()

    def claim_run(self, run: int, record: bytes) -> bool:
        """See RootTier."""
        self.enter("claim_run", len(record))
        return self.inner.claim_run(run, record)

    def read_run(self, run: int) -> bytes | None:
        """See RootTier."""
        self.enter("read_run")
        return self.inner.read_run(run)


class WrappedWriter:
    """A writer of a WrappedTier."""

    def __init__(self, tier: WrappedTier, inner: ShardWriter) -> None:
        """Around a writer of the inner tier."""
        self._tier = tier
        self.inner = inner
        self.piece_bytes = inner.piece_bytes
        self.is_aligned = inner.is_aligned
        self.num_parallel = inner.num_parallel
        self.is_in_order = inner.is_in_order

    def write(self, data: memoryview, offset: int) -> None:
        """See ShardWriter."""
        self._tier.enter("write", len(data))
        self.inner.write(data, offset)

    def publish(self) -> None:
        """See ShardWriter."""
        self._tier.enter("publish")
        self.inner.publish()

    def discard(self) -> None:
        """See ShardWriter."""
        self._tier.enter("discard")
        self.inner.discard()


class WrappedReader:
    """A reader of a WrappedTier. Leaving it is no operation: files of the dead are closed as well."""

    def __init__(self, tier: WrappedTier, inner: ShardReader) -> None:
        """Around a reader of the inner tier."""
        self._tier = tier
        self.inner = inner
        self.tier = inner.tier
        self.source = inner.source
        self.nbytes = inner.nbytes
        self.is_mapped = inner.is_mapped
        self.may_differ_again = inner.may_differ_again
        self.chunk_bytes = inner.chunk_bytes
        self.num_places = inner.num_places

    def forget(self) -> None:
        """See ShardReader."""
        self.inner.forget()

    def read(self, start: int, stop: int) -> memoryview | bytes:
        """See ShardReader."""
        self._tier.enter("read", stop - start)
        return self.inner.read(start, stop)

    def stream(
        self,
        start: int,
        stop: int,
        place: Callable[[int, int], memoryview],
        arrived: Callable[[memoryview, int], None],
    ) -> int:
        """See ShardReader."""
        self._tier.enter("stream", stop - start)
        return self.inner.stream(start, stop, place, arrived)

    def __enter__(self) -> WrappedReader:
        self.inner.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.inner.__exit__(kind, error, trace)
