"""What every tier of shard files promises, as tests that look past the tier at what is stored."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shardstore.errors import TierError, TierFullError
from shardstore.format.records import SnapshotId
from shardstore.testing.ops import CountingOps, raise_at
from shardstore.tiers.base import ShardReader, ShardWriter
from shardstore.tiers.fileops import CHUNK_BYTES, FileOps
from shardstore.tiers.pages import private_pages

ID = SnapshotId(100, 1, 7, "9f3c1d20")
OTHER = SnapshotId(100, 2, 1, "00aa11bb")


def content(nbytes: int, salt: int = 0) -> bytes:
    """Bytes that differ at every place where a mix-up would put them."""
    return bytes((i * 7 + i // 251 + salt) % 256 for i in range(nbytes))


class ShardContract:
    """The suite for a tier of shard files; subclass it in a test module and give it the hooks.

    The hooks that are given reach a tier which stores files in `self.folder`; for others override
    `raw_files`, `raw_write` and `raw_truncate` as well. They must not go through the tier: what a tier
    says of itself proves nothing.
    """

    folder: Path
    """Where the tier of this test stores; does not exist yet."""
    uses_file_ops = True
    """Whether all of its system calls go through the FileOps that it is made with."""

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "parent" / "tier"

    # ------------------------------------------------------------------- hooks

    def make_tier(self, ops: FileOps) -> Any:
        """A tier over what is stored in `self.folder`, as another process would make it."""
        raise NotImplementedError

    def create(self, tier: Any, snapshot_id: SnapshotId, rank: int, nbytes: int) -> ShardWriter:
        """Begin a shard."""
        writer: ShardWriter = tier.create_shard(snapshot_id, rank, nbytes)
        return writer

    def open(self, tier: Any, snapshot_id: SnapshotId, rank: int) -> ShardReader | None:
        """Open a shard; None, or a TierError, if there is none."""
        reader: ShardReader = tier.open_shard(snapshot_id, rank)
        return reader

    def raw_files(self) -> dict[str, bytes]:
        """All that is stored, by name."""
        found = self.folder.rglob("*") if self.folder.exists() else ()
        return {str(p.relative_to(self.folder)): p.read_bytes() for p in found if p.is_file()}

    def raw_write(self, name: str, data: bytes) -> None:
        """Store something behind the tier's back."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_truncate(self, name: str, nbytes: int) -> None:
        """Shorten a file behind the tier's back."""
        with open(self.folder / name, "r+b") as file:
            file.truncate(nbytes)

    # ----------------------------------------------------------------- helpers

    def put(self, tier: Any, data: bytes, snapshot_id: SnapshotId = ID, rank: int = 0) -> None:
        """Store a whole shard."""
        writer = self.create(tier, snapshot_id, rank, len(data))
        writer.write(memoryview(data), 0)
        writer.publish()

    def put_or_give_up(self, tier: Any, data: bytes) -> None:
        """Store a whole shard, as the engine does: what fails is given up."""
        writer = self.create(tier, ID, 0, len(data))
        try:
            writer.write(memoryview(data), 0)
            writer.publish()
        except BaseException:
            writer.discard()
            raise

    def has(self, tier: Any, snapshot_id: SnapshotId = ID, rank: int = 0) -> bool:
        """Whether a shard can be opened."""
        try:
            reader = self.open(tier, snapshot_id, rank)
        except TierError as error:
            if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                raise
            return False
        if reader is None:
            return False
        with reader:
            return True

    def get(self, tier: Any, snapshot_id: SnapshotId = ID, rank: int = 0) -> bytes:
        """A whole shard."""
        reader = self.open(tier, snapshot_id, rank)
        assert reader is not None
        with reader:
            return bytes(reader.read(0, reader.nbytes))

    def shard_name(self) -> str:
        """Name of the one file that is stored."""
        (name,) = self.raw_files()
        return name

    # ---------------------------------------------------------- whole or absent

    def test_a_shard_is_absent_until_published_and_then_whole(self) -> None:
        """Promise 1."""
        tier = self.make_tier(FileOps())
        data = content(10_000)
        writer = self.create(tier, ID, 0, len(data))
        writer.write(memoryview(data), 0)
        assert not self.has(tier)
        assert not self.has(self.make_tier(FileOps()))
        assert not any(name.endswith(".safetensors") for name in self.raw_files())
        writer.publish()
        assert self.get(tier) == self.get(self.make_tier(FileOps())) == data
        assert list(self.raw_files().values()) == [data]

    @pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 40_001])
    def test_parts_may_come_in_any_order_and_size(self, nbytes: int) -> None:
        """Promise 1: the header, which makes a file valid, is written last."""
        data = content(nbytes)
        tier = self.make_tier(FileOps())
        writer = self.create(tier, ID, 0, nbytes)
        pages = private_pages(max(4096, nbytes))[:nbytes]
        pages[:] = data
        starts = [*range(0, nbytes, 8192)]
        for start in starts[::-1]:
            writer.write(pages[start : start + 8192], start)
        pages[:] = bytes(nbytes)  # it is the caller's again
        writer.publish()
        assert self.get(tier) == data

    def test_what_is_given_up_leaves_nothing(self) -> None:
        """Promise 1."""
        tier = self.make_tier(FileOps())
        writer = self.create(tier, ID, 0, 5000)
        writer.write(memoryview(content(2000)), 0)
        writer.discard()
        writer.discard()
        assert not self.has(tier)
        assert self.raw_files() == {}

    def test_giving_up_what_was_published_does_nothing(self) -> None:
        """Promise 2: a failure further on must not take a file that others may count on."""
        tier = self.make_tier(FileOps())
        writer = self.create(tier, ID, 0, 3)
        writer.write(memoryview(b"abc"), 0)
        writer.publish()
        writer.discard()
        assert self.get(tier) == b"abc"

    def test_attempts_at_one_step_do_not_touch_each_other(self) -> None:
        """Promise 2."""
        tier = self.make_tier(FileOps())
        self.put(tier, b"first", ID)
        self.put(tier, b"second", OTHER)
        assert (self.get(tier, ID), self.get(tier, OTHER)) == (b"first", b"second")

    def test_attempts_are_written_at_the_same_time_from_many_threads(self) -> None:
        """Promise 1: folders that all of them need are made by whoever comes first."""
        tier = self.make_tier(FileOps())
        ids = [SnapshotId(step, 1, step, "9f3c1d20") for step in range(16)]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda i: self.put(tier, content(3000, i.step), i), ids))
        assert [self.get(tier, i) for i in ids] == [content(3000, i.step) for i in ids]

    # ----------------------------------------------------------------- reading

    def test_a_read_past_the_end_returns_what_there_is(self) -> None:
        """ShardReader.read."""
        tier = self.make_tier(FileOps())
        self.put(tier, b"0123456789")
        reader = self.open(tier, ID, 0)
        assert reader is not None
        with reader:
            assert reader.nbytes == 10
            assert bytes(reader.read(3, 6)) == b"345"
            assert bytes(reader.read(8, 20)) == b"89"
            assert bytes(reader.read(30, 40)) == b""

    def test_a_stream_hands_out_every_byte_once_and_in_order(self) -> None:
        """ShardReader.stream, within a chunk, over several, and from the middle of a page."""
        nbytes = CHUNK_BYTES + 12_345
        data = content(4099) * (nbytes // 4099 + 1)
        data = data[:nbytes]
        tier = self.make_tier(FileOps())
        self.put(tier, data)
        for start, stop in [(0, nbytes), (5000, 5001), (4097, nbytes - 3), (7, 7)]:
            assert self._streamed(tier, start, stop) == (data[start:stop], stop)

    def test_a_stream_of_a_file_that_was_cut_off_says_where_it_ends(self) -> None:
        """ShardReader.stream."""
        tier = self.make_tier(FileOps())
        self.put(tier, content(20_000))
        self.raw_truncate(self.shard_name(), 9_001)
        assert self._streamed(tier, 100, 20_000) == (content(20_000)[100:9_001], 9_001)

    def _streamed(self, tier: Any, start: int, stop: int) -> tuple[bytes, int]:
        memory = private_pages(stop - start // 4096 * 4096 + 2 * CHUNK_BYTES)
        base = start // 4096 * 4096
        got = bytearray()
        reader = self.open(tier, ID, 0)
        assert reader is not None

        def arrived(data: memoryview, offset: int) -> None:
            assert offset == start + len(got)
            got.extend(data)

        with reader:
            end = reader.stream(start, stop, lambda a, b: memory[a - base : b - base], arrived)
        return bytes(got), end

    # ------------------------------------------------------- durable, and errors

    def test_publish_syncs_the_file_before_it_is_named_and_the_folders_after(self) -> None:
        """Promise 3."""
        if not self.uses_file_ops:
            pytest.skip("this tier uses no FileOps: show in another way what it syncs")
        ops = CountingOps()
        ops.arm()
        self.put(self.make_tier(ops), content(5000))
        names = [name.split()[0] for name in ops.names]
        named = names.index("rename")
        assert "fsync" in names[_last(names[:named], "write_at") : named], ops.names
        assert "fsync" in names[named:], ops.names
        made = _last(names, "make_folder")
        assert "fsync" in names[made:named], f"the folder's name: {ops.names}"
        assert names.count("fsync") >= names.count("make_folder") + 2, ops.names

    @pytest.mark.parametrize(
        "operation", ["make_folder", "open_new", "allocate", "write_at", "fsync", "rename"]
    )
    @pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])  # fmt: skip
    def test_an_error_of_the_system_is_a_tier_error_and_leaves_nothing(
        self, operation: str, code: int
    ) -> None:
        """Promise 5."""
        if not self.uses_file_ops:
            pytest.skip("this tier uses no FileOps")
        cause = OSError(code, "broken")
        ops = CountingOps(raise_at(operation, cause))
        tier = self.make_tier(ops)
        ops.arm()
        with pytest.raises(TierError) as caught:
            self.put_or_give_up(tier, content(5000))
        assert caught.value.__cause__ is cause
        assert caught.value.tier == tier.name
        assert caught.value.key
        assert caught.value.operation
        assert isinstance(caught.value, TierFullError) == (code != errno.EIO)
        assert not self.has(tier)
        assert self.raw_files() == {}

    def test_an_error_while_reading_is_a_tier_error(self) -> None:
        """Promise 5."""
        if not self.uses_file_ops:
            pytest.skip("this tier uses no FileOps")
        self.put(self.make_tier(FileOps()), b"shard")
        cause = OSError(errno.EIO, "broken")
        ops = CountingOps(raise_at("read_at", cause), count_reads=True)
        ops.arm()
        tier = self.make_tier(ops)
        with pytest.raises(TierError, match="EIO") as caught:
            self.get(tier)
        assert caught.value.__cause__ is cause
        assert (caught.value.tier, caught.value.operation) == (tier.name, "read")


def _last(names: list[str], name: str) -> int:
    return len(names) - 1 - names[::-1].index(name)
