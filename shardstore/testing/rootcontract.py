"""What every root tier promises beyond its shard files: registers, runs, deletion."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from shardstore.errors import TierError
from shardstore.format.records import SnapshotId
from shardstore.testing.contract import ID, OTHER, ShardContract, content
from shardstore.testing.ops import CountingOps, raise_at
from shardstore.tiers.base import RootTier
from shardstore.tiers.fileops import FileOps

_NUM_THREADS = 12
_ROUNDS = 4


class TierContract(ShardContract):
    """The suite that a root tier passes; `make_tier` is all that one on a file system must give.

    class TestMyTier(TierContract):
        def make_tier(self, ops):
            return MyTier(str(self.folder), ops)
    """

    has_folders = True
    """Whether an attempt's folder can be renamed away from under foreign files in it."""

    def make_tier(self, ops: FileOps) -> RootTier:
        """See ShardContract."""
        raise NotImplementedError

    # ----------------------------------------------------------------- listing

    def test_reading_a_root_that_is_not_there_finds_nothing_and_makes_nothing(self) -> None:
        """A read-only root restores."""
        tier = self.make_tier(FileOps())
        assert tier.list_ids() == []
        assert tier.list_ranks(ID) == []
        assert tier.run_numbers() == []
        assert tier.read_manifest(ID) is None
        assert tier.read_run(1) is None
        assert not self.has(tier)
        assert not self.folder.exists()
        assert not self.folder.parent.exists()

    def test_attempts_and_ranks_are_listed_in_any_state_and_foreign_names_passed_over(self) -> None:
        """Whole names count, never parts of them."""
        tier = self.make_tier(FileOps())
        for rank in (2, 0, 11):
            self.put(tier, b"x", ID, rank)
        tier.create_manifest(OTHER, b"aborted", make_folder=True)
        for name in (
            "notes.txt",
            f"{ID.name}-copy/rank-00000.safetensors",
            "step-1/x",
            "run-1.json",
        ):
            self.raw_write(name, b"foreign")
        self.raw_write(f"{ID.name}/rank-00005.safetensors.tmp", b"torn")
        self.raw_write(f"{ID.name}/rank-7.safetensors", b"foreign")
        assert sorted(tier.list_ids(), key=lambda i: i.order) == [ID, OTHER]
        assert tier.list_ranks(ID) == [0, 2, 11]
        assert tier.run_numbers() == []

    def test_a_missing_shard_is_a_tier_error_with_its_cause(self) -> None:
        """Promise 5."""
        tier = self.make_tier(FileOps())
        with pytest.raises(TierError) as caught:
            tier.open_shard(ID, 3)
        assert isinstance(caught.value.__cause__, FileNotFoundError)
        assert caught.value.tier == tier.name
        assert "rank-00003" in str(caught.value.key)

    # ---------------------------------------------------------------- register

    def test_the_first_content_of_a_register_stands(self) -> None:
        """Promise 4."""
        tier = self.make_tier(FileOps())
        self.put(tier, b"x")
        assert tier.create_manifest(ID, b"committed", make_folder=False) == b"committed"
        assert tier.create_manifest(ID, b"aborted", make_folder=True) == b"committed"
        assert tier.read_manifest(ID) == b"committed"
        assert sum(data == b"committed" for data in self.raw_files().values()) == 1
        assert len(self.raw_files()) == 2, "nothing temporary is left"

    def test_a_commit_never_makes_the_folder_of_an_attempt_that_is_gone(self) -> None:
        """P4: a late publisher must not commit what was removed."""
        tier = self.make_tier(FileOps())
        assert tier.create_manifest(ID, b"committed", make_folder=False) is None
        assert tier.read_manifest(ID) is None
        assert tier.list_ids() == []

    def test_a_commit_needs_the_shards_of_all_its_ranks(self) -> None:
        """P4: the folder may have been removed, and made anew by a rank that was late."""
        tier = self.make_tier(FileOps())
        self.put(tier, b"zero", ID, 0)
        before = self.raw_files()
        assert tier.create_manifest(ID, b"committed", make_folder=False, ranks=(0, 1)) is None
        assert self.raw_files() == before
        self.put(tier, b"one", ID, 1)
        assert (
            tier.create_manifest(ID, b"committed", make_folder=False, ranks=(0, 1)) == b"committed"
        )

    def test_of_many_who_create_a_register_one_wins_and_all_hear_the_same(self) -> None:
        """Promise 4."""
        tier = self.make_tier(FileOps())
        contents = [b"content %d" % i * 50 for i in range(_NUM_THREADS)]
        start = threading.Barrier(_NUM_THREADS)

        def create(snapshot_id: SnapshotId, data: bytes) -> bytes | None:
            start.wait()
            return tier.create_manifest(snapshot_id, data, make_folder=True)

        for number in range(_ROUNDS):
            snapshot_id = SnapshotId(100, 1, number, "9f3c1d20")
            with ThreadPoolExecutor(_NUM_THREADS) as pool:
                answers = set(pool.map(partial(create, snapshot_id), contents))
            assert len(answers) == 1
            assert answers == {tier.read_manifest(snapshot_id)}
            assert answers <= set(contents)

    def test_readers_see_the_old_or_the_new_content_while_it_is_replaced(self) -> None:
        """Promise 4: a replacement is atomic."""
        tier = self.make_tier(FileOps())
        versions = [(b"%d" % i) * (5000 + 700 * i) for i in range(8)]
        tier.create_manifest(ID, versions[0], make_folder=True)
        done = threading.Event()

        def read() -> set[bytes | None]:
            seen: set[bytes | None] = set()
            while not done.is_set():
                seen.add(tier.read_manifest(ID))
            return seen

        with ThreadPoolExecutor(4) as pool:
            readers = [pool.submit(read) for _ in range(4)]
            for _ in range(_ROUNDS):
                for version in versions:
                    tier.replace_manifest(ID, version)
            done.set()
            seen = set().union(*(reader.result() for reader in readers))
        assert seen <= set(versions)
        assert tier.read_manifest(ID) == versions[-1]

    @pytest.mark.parametrize("replace", [False, True], ids=["create", "replace"])
    def test_a_register_is_synced_before_it_is_named_and_its_folder_after(
        self, replace: bool
    ) -> None:
        """Promise 3, of the commit itself."""
        if not self.uses_file_ops:
            pytest.skip("this tier uses no FileOps: show in another way what it syncs")
        self.make_tier(FileOps()).create_manifest(
            OTHER if not replace else ID, b"x", make_folder=True
        )
        self.put(self.make_tier(FileOps()), b"shard")
        ops = CountingOps()
        tier = self.make_tier(ops)
        ops.arm()
        if replace:
            tier.replace_manifest(ID, b"aborted")
        else:
            tier.create_manifest(ID, b"committed", make_folder=False)
        names = [name.split()[0] for name in ops.names]
        named = names.index("rename" if replace else "link")
        assert names[:named].index("write_at") < names[:named].index("fsync")
        assert "fsync" in names[named:], ops.names

    def test_an_answer_in_doubt_is_settled_by_reading_the_register(self) -> None:
        """Promise 4: the link was made and its answer lost."""
        if not self.uses_file_ops:
            pytest.skip("this tier uses no FileOps")

        class _LostAnswer(FileOps):
            def link(self, source: str, target: str) -> None:
                super().link(source, target)
                raise OSError(errno.EIO, "the answer was lost")

        self.put(self.make_tier(FileOps()), b"x")
        answer = self.make_tier(_LostAnswer()).create_manifest(ID, b"committed", make_folder=False)
        assert answer == b"committed"

    @pytest.mark.parametrize("operation", ["open_new", "write_at", "fsync", "link"])
    def test_a_register_that_cannot_be_written_is_a_tier_error_and_does_not_exist(
        self, operation: str
    ) -> None:
        """Promises 4 and 5."""
        if not self.uses_file_ops:
            pytest.skip("this tier uses no FileOps")
        self.put(self.make_tier(FileOps()), b"x")
        before = self.raw_files()
        ops = CountingOps(raise_at(operation, OSError(errno.EIO, "broken")))
        ops.arm()
        with pytest.raises(TierError) as caught:
            self.make_tier(ops).create_manifest(ID, b"committed", make_folder=False)
        assert caught.value.operation == "publish"
        assert self.raw_files() == before

    # ------------------------------------------------------------------ runs

    def test_a_run_number_is_claimed_once(self) -> None:
        """P1."""
        tier = self.make_tier(FileOps())
        tier.make_location()
        start = threading.Barrier(_NUM_THREADS)

        def claim(number: int) -> bool:
            start.wait()
            return tier.claim_run(42, b"owner %d" % number)

        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            won = list(pool.map(claim, range(_NUM_THREADS)))
        assert won.count(True) == 1
        assert tier.read_run(42) == b"owner %d" % won.index(True)
        assert tier.run_numbers() == [42]

    def test_a_small_file_is_made_replaced_and_removed(self) -> None:
        """RootTier.put_small: an index of what is here."""
        tier = self.make_tier(FileOps())
        tier.put_small("index-0000002a.json", b"one")
        tier.put_small("index-0000002a.json", b"another")
        assert tier.read_small("index-0000002a.json") == b"another"
        assert self.raw_files() == {"index-0000002a.json": b"another"}
        tier.remove_small("index-0000002a.json")
        tier.remove_small("index-0000002a.json")
        assert tier.read_small("index-0000002a.json") is None
        assert self.raw_files() == {}

    # -------------------------------------------------------------- deletion

    def test_removal_takes_the_bytes_before_the_register(self) -> None:
        """P4: what dies half way is still known as aborted."""
        if not self.uses_file_ops:
            pytest.skip("this tier uses no FileOps")
        self._store_aborted()
        ops = CountingOps()
        tier = self.make_tier(ops)
        ops.arm()
        tier.remove(ID)
        shards = [i for i, name in enumerate(ops.names) if ".safetensors" in name]
        register = next(i for i, n in enumerate(ops.names) if ID.name in n or "manifest" in n)
        assert len(shards) == 2
        assert max(shards) < register
        assert self.raw_files() == {}
        assert tier.list_ids() == []

    def test_removal_touches_nothing_foreign_and_may_be_repeated(self) -> None:
        """What is not ours stays, bytes and all."""
        tier = self._store_aborted()
        self.raw_write(f"{ID.name}/notes.txt", b"mine")
        self.put(tier, content(10), OTHER)
        tier.remove(ID)
        tier.remove(ID)
        assert sorted(self.raw_files().values()) == sorted([b"mine", content(10)])
        assert OTHER in tier.list_ids()
        if self.has_folders:
            assert tier.list_ids() == [OTHER]

    def test_what_a_rank_left_of_a_failed_attempt_goes_and_the_others_files_stay(self) -> None:
        """RootTier.remove_shard."""
        tier = self.make_tier(FileOps())
        self.put(tier, b"zero", ID, 0)
        self.put(tier, b"one", ID, 1)
        tier.remove_shard(ID, 0)
        tier.remove_shard(ID, 0)
        assert tier.list_ranks(ID) == [1]
        tier.remove_shard(ID, 1)
        assert self.raw_files() == {}
        assert tier.list_ids() == []

    def test_shards_of_another_run_are_synced_with_their_folders(self) -> None:
        """P4: before a late publish."""
        if not self.uses_file_ops:
            pytest.skip("this tier uses no FileOps: show in another way what it syncs")
        self.put(self.make_tier(FileOps()), b"zero", ID, 0)
        self.put(self.make_tier(FileOps()), b"one", ID, 1)
        ops = CountingOps()
        tier = self.make_tier(ops)
        ops.arm()
        tier.make_durable(ID, [0, 1])
        assert [name.split()[0] for name in ops.names] == ["fsync"] * 4
        with pytest.raises(TierError):
            tier.make_durable(ID, [0, 1, 2])

    def _store_aborted(self) -> RootTier:
        tier = self.make_tier(FileOps())
        self.put(tier, b"zero", ID, 0)
        self.put(tier, b"one", ID, 1)
        tier.create_manifest(ID, b"aborted", make_folder=False)
        return tier
