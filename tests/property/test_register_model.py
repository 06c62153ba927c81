"""The commit register under everybody who may write it at once: no commit without its bytes (P4).

The actors of the model that the rule comes from, owners, a late publisher, two kinds of gc, a deleter and
deaths, run the real code on real files, one operation of storage at a time in an order that a seed decides.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch

from shardstore import ShardStoreError, SnapshotStore
from shardstore.engine.catalog import Catalog
from shardstore.engine.latepublish import publish_late
from shardstore.engine.orphans import find_orphans, remove_orphan
from shardstore.engine.sealed import SealedShard, manifest_of
from shardstore.format.records import SnapshotId
from shardstore.testing import FileOps, ThreadRank, run_rank_threads
from shardstore.tiers.disk import DiskTier
from tests.property.stepping import Actor, take_turns

_NUM_SEEDS = 150
_NUM_NIGHTLY_SEEDS = 5000


@dataclass
class Saved:
    """The bytes of one real snapshot, to be saved anew in each run of the test."""

    id: SnapshotId
    files: list[bytes]
    shards: dict[int, SealedShard]


@pytest.fixture(scope="module", params=[2, 3])
def saved(request: pytest.FixtureRequest) -> Iterator[Saved]:
    with tempfile.TemporaryDirectory(prefix="shardstore-test-", dir="/dev/shm") as folder:

        def save(rank: ThreadRank) -> None:
            store = SnapshotStore(f"{folder}/root", memory=0, process_group=rank, timeout_s=10)
            assert store.save({"w": torch.full((5,), float(rank.rank))}, step=7).wait()
            store.close()

        run_rank_threads(request.param, save)
        catalog = Catalog(DiskTier(f"{folder}/root", name="root", ops=FileOps()))
        (snapshot_id,) = catalog.ids()
        ranks = range(request.param)
        files = [Path(folder, "root", snapshot_id.name, f"rank-{r:05d}.safetensors") for r in ranks]
        shards = {rank: catalog.read_header(snapshot_id, rank) for rank in ranks}
        yield Saved(snapshot_id, [file.read_bytes() for file in files], shards)


@dataclass
class World:
    """One root, and what its actors tell each other and the trainer."""

    saved: Saved
    root: str
    entries: set[int] = field(default_factory=set)
    outcome: str | None = None
    is_being_deleted: bool = False
    is_unlisted: bool = False
    has_left: bool = False
    """Rank 0 gave up waiting."""
    broken: set[str] = field(default_factory=set)

    def catalog(self, ops: FileOps | None = None) -> Catalog:
        return Catalog(DiskTier(self.root, name="root", ops=ops or FileOps()))

    # ------------------------------------------------------------------ actors

    def rank(self, number: int, me: Actor) -> None:
        """Writes its shard; takes it away if the save failed."""
        tier, data = self.catalog(me.ops).tier, memoryview(self.saved.files[number])
        try:
            writer = tier.create_shard(self.saved.id, number, len(data))
            writer.write(data, 0)
            writer.publish()
        except ShardStoreError:
            self.has_left = True
            return
        self.entries.add(number)
        me.step(lambda: self.outcome is not None)
        if self.outcome == "failed":
            tier.remove_shard(self.saved.id, number)

    def coordinator(self, patience: int, me: Actor) -> None:
        """Publishes once all shards are durable, or gives up and closes the register."""
        everybody = set(self.saved.shards)
        waited = iter(range(patience))
        me.step(lambda: self.entries == everybody or next(waited, None) is None or self.has_left)
        catalog = self.catalog(me.ops)
        is_committed = False
        try:
            if self.entries == everybody:
                is_committed = catalog.publish(manifest_of(self.saved.shards, writer={}))
            if not is_committed:
                is_committed = not catalog.abort(self.saved.id, reason="a rank is late", writer={})
        except ShardStoreError:
            return  # unknown: nobody is told, nobody removes a byte
        self.outcome = "committed" if is_committed else "failed"

    def late_publisher(self, me: Actor) -> None:
        """The first save of a later run."""
        publish_late(self.catalog(me.ops), before_run=self.saved.id.run + 1, writer={})

    def careful_gc(self, me: Actor) -> None:
        """Takes every run for dead, rightly or not."""
        catalog = self.catalog(me.ops)
        for orphan in find_orphans(catalog, memory_dirs=(), including_unknown=True):
            if orphan.may_go:
                remove_orphan(catalog, orphan, writer={})

    def rude_gc(self, me: Actor) -> None:
        """Does not even look whether somebody could still publish it."""
        catalog = self.catalog(me.ops)
        if self.saved.id in catalog.ids() and catalog.abort(self.saved.id, reason="gc", writer={}):
            catalog.try_remove(self.saved.id)

    def deleter(self, me: Actor) -> None:
        """Retention, or `delete`."""
        catalog = self.catalog(me.ops)
        patience = iter(range(150))
        me.step(lambda: self.outcome is not None or next(patience, None) is None)
        if catalog.state(self.saved.id) == "committed":
            self.is_being_deleted = True
            catalog.unlist(self.saved.id, reason="retention", writer={})
            self.is_unlisted = True
            catalog.try_remove(self.saved.id)

    # -------------------------------------------------------------- invariants

    def check(self) -> None:
        """After every operation, past all tiers."""
        is_listed = self.catalog().state(self.saved.id) == "committed"
        if is_listed and self._shards() != self.saved.files:
            self.broken.add("committed with bytes missing")
        if is_listed and self.is_unlisted:
            self.broken.add("a deleted snapshot was listed again")
        if is_listed and self.outcome == "failed":
            self.broken.add("the trainer heard that it failed, and it was listed")
        if not is_listed and self.outcome == "committed" and not self.is_being_deleted:
            self.broken.add("the trainer heard that it was committed, and it vanished")

    def _shards(self) -> list[bytes]:
        folder = Path(self.root, self.saved.id.name)
        return [file.read_bytes() for file in sorted(folder.glob("rank-*.safetensors"))]

    def sweep(self) -> None:
        """A last careful process, when all others are dead."""
        catalog = self.catalog()
        publish_late(catalog, before_run=self.saved.id.run + 1, writer={})
        for orphan in find_orphans(catalog, memory_dirs=(), including_unknown=True):
            problem = remove_orphan(catalog, orphan, writer={})
            if problem:
                self.broken.add(f"{orphan}: {problem}")
        self.check()
        left = [path for path in Path(self.root).rglob("*") if path.is_file()]
        whole = {*self._shards()} == {*self.saved.files} and catalog.state(
            self.saved.id
        ) == "committed"
        if left and not (whole and len(left) == len(self.saved.files) + 1):
            self.broken.add(f"left behind: {left}")


def _run(saved: Saved, seed: int, folder: str) -> set[str]:
    chance = random.Random(seed)
    world = World(saved, folder)

    def actor(name: str, life: Callable[[Actor], None], delay: int = 0) -> Actor:
        def late(me: Actor) -> None:
            for _ in range(delay):
                me.step()
            life(me)

        return Actor(name, late, chance.choice([0.2, 1, 3]))

    owners = [actor(f"rank {number}", partial(world.rank, number)) for number in saved.shards]
    owners.append(actor("coordinator", partial(world.coordinator, chance.choice([20, 60, 400]))))
    others = [
        actor(life.__name__, life, chance.choice([0, 40, 120]))
        for life in (world.late_publisher, world.late_publisher, world.careful_gc, world.rude_gc, world.deleter)
        if chance.random() < 0.6
    ]  # fmt: skip
    deaths: dict[int, list[Actor]] = {}
    if chance.random() < 0.5:
        deaths[chance.randrange(1, 150)] = owners
    if others and chance.random() < 0.4:
        deaths[chance.randrange(1, 200)] = [chance.choice(others)]
    take_turns(chance, owners + others, after_each=world.check, deaths=deaths)
    for one in owners + others:
        if one.error is not None and not isinstance(one.error, ShardStoreError):
            raise one.error
    world.sweep()
    return world.broken


def _check(saved: Saved, seeds: range) -> None:
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="shardstore-test-", dir="/dev/shm") as folder:
            broken = _run(saved, seed, folder)
        assert not broken, f"seed {seed}: {broken}"


def test_whoever_writes_the_register_no_commit_is_without_its_bytes(saved: Saved) -> None:
    _check(saved, range(_NUM_SEEDS))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_many_orders_of_those_who_write_the_register(saved: Saved) -> None:
    _check(saved, range(_NUM_SEEDS, _NUM_NIGHTLY_SEEDS))
