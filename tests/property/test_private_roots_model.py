"""Roots that hosts do not share, under everybody who may write to them at once: they stay one (P4).

Every host's root is a real folder. A run's rank 0 works on all of them through the real `JointTier`; the
first rank of each other host answers its questions with the real code, as an actor of its own, which may
be slow, or dead, or come to a question long after rank 0 gave up on it. All take turns at single operations
of storage, in an order that a seed decides.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from shardstore import ShardStoreError, SnapshotStore
from shardstore.engine.catalog import Catalog
from shardstore.engine.choose import Candidate, Chooser, Inventory, Nothing
from shardstore.engine.joining import complete_commits
from shardstore.engine.jointroot import JointTier
from shardstore.engine.latepublish import publish_late
from shardstore.engine.liveness import RootClass, RunRecord
from shardstore.engine.orphans import find_orphans, remove_orphan
from shardstore.engine.peers import Answer, Peers, Question, value_of
from shardstore.engine.pruning import prune
from shardstore.engine.sealed import SealedShard, manifest_of
from shardstore.engine.steward import answer_for
from shardstore.errors import TierError
from shardstore.format.records import FORMAT_VERSION, SnapshotId
from shardstore.testing import FileOps, ThreadRank, run_rank_threads
from shardstore.tiers.disk import DiskTier
from tests.property.stepping import Actor, take_turns

_NUM_SEEDS = 80
_NUM_NIGHTLY_SEEDS = 3000
_NUM_RANKS = 3


@dataclass
class Saved:
    """The bytes of one real snapshot, to be saved anew in each run of the test."""

    id: SnapshotId
    files: list[bytes]
    shards: dict[int, SealedShard]


@pytest.fixture(scope="module")
def saved() -> Iterator[Saved]:
    with tempfile.TemporaryDirectory(prefix="shardstore-test-", dir="/dev/shm") as folder:

        def save(rank: ThreadRank) -> None:
            store = SnapshotStore(f"{folder}/root", memory=0, process_group=rank, timeout_s=10)
            assert store.save({"w": torch.full((5,), float(rank.rank))}, step=7).wait()
            store.close()

        run_rank_threads(_NUM_RANKS, save)
        catalog = Catalog(DiskTier(f"{folder}/root", name="root", ops=FileOps()))
        (snapshot_id,) = catalog.ids()
        ranks = range(_NUM_RANKS)
        files = [Path(folder, "root", snapshot_id.name, f"rank-{r:05d}.safetensors") for r in ranks]
        shards = {rank: catalog.read_header(snapshot_id, rank) for rank in ranks}
        yield Saved(snapshot_id, [file.read_bytes() for file in files], shards)


Ask = Callable[[Question, Sequence[int]], dict[int, Answer | None]]


class _Peers(Peers):
    """Asks in the way of the test instead of over a key-value store."""

    def __init__(self, classes: Sequence[RootClass], own: RootClass, ask: Ask) -> None:
        self.all = tuple(classes)
        self.classes = {c.first: c for c in classes if c is not own}
        self._ask = ask

    def ask(
        self, question: Question, *, whom: Collection[int] | None = None
    ) -> dict[int, bytes | TierError]:
        targets = sorted(self.classes if whom is None else whom)
        silent = TierError("root: no answer", tier="root", operation="ask")
        return {
            rank: silent if answer is None else value_of(answer, host="h", rank=rank)
            for rank, answer in self._ask(question, targets).items()
        }


@dataclass
class Run:
    """What one run's rank 0 has asked of its other first ranks, and they have not yet come to."""

    queues: dict[int, list[tuple[Question, list[Answer]]]]

    def ask(
        self, me: Actor, patience: int, question: Question, whom: Sequence[int]
    ) -> dict[int, Answer | None]:
        boxes: dict[int, list[Answer]] = {rank: [] for rank in whom}
        for rank, box in boxes.items():
            self.queues[rank].append((question, box))
        waited = iter(range(patience))
        me.step(lambda: all(boxes.values()) or next(waited, None) is None)
        return {rank: box[0] if box else None for rank, box in boxes.items()}


@dataclass
class World:
    """All roots, and what the actors tell each other and the trainer."""

    saved: Saved
    folder: Path
    classes: tuple[RootClass, ...]
    chance: random.Random
    entries: set[int] = field(default_factory=set)
    outcome: str | None = None
    is_being_deleted: bool = False
    is_unlisted: bool = False
    has_left: bool = False
    """Rank 0 gave up waiting."""
    lost: set[int] = field(default_factory=set)
    """First ranks of roots that were lost with their disks."""
    broken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for c in self.classes:
            self.make_root(c)

    def root(self, c: RootClass) -> Path:
        return self.folder / f"root-{c.first}"

    def make_root(self, c: RootClass) -> None:
        self.root(c).mkdir()
        self.claim(c, self.saved.id.run, self.saved.id.nonce)

    def claim(self, c: RootClass, run: int, nonce: str) -> None:
        record = RunRecord(
            FORMAT_VERSION, nonce, "h", "a host far away", 0.0, roots=self.classes, first_rank=c.first
        )  # fmt: skip
        (self.root(c) / f"run-{run:08x}.json").write_bytes(msgspec.json.encode(record))

    def own(self, c: RootClass, ops: FileOps | None = None) -> Catalog:
        return Catalog(DiskTier(str(self.root(c)), name="root", ops=ops or FileOps()))

    def class_of(self, rank: int) -> RootClass:
        return next(c for c in self.classes if rank in c.ranks)

    # ------------------------------------------------------------------ actors

    def joint(self, run: Run, me: Actor) -> Catalog:
        patience = self.chance.choice([3, 30, 300])
        peers = _Peers(self.classes, self.classes[0], partial(run.ask, me, patience))
        own = DiskTier(str(self.root(self.classes[0])), name="root", ops=me.ops)
        return Catalog(JointTier(own, peers), spans_hosts=True)

    def steward(self, c: RootClass, run: Run, me: Actor) -> None:
        """Answers one question after the other, in the order in which they were asked."""
        queue, catalog = run.queues[c.first], self.own(c, me.ops)
        while True:
            me.step(lambda: bool(queue))
            question, box = queue.pop(0)
            box.append(answer_for(catalog, question))

    def rank(self, number: int, me: Actor) -> None:
        """Writes its shard on its host; takes it away if the save failed."""
        catalog = self.own(self.class_of(number), me.ops)
        data = memoryview(self.saved.files[number])
        try:
            writer = catalog.tier.create_shard(self.saved.id, number, len(data))
            writer.write(data, 0)
            writer.publish()
        except ShardStoreError:
            self.has_left = True
            return
        self.entries.add(number)
        me.step(lambda: self.outcome is not None)
        if self.outcome == "failed" and catalog.state(self.saved.id) not in (
            "committed",
            "damaged",
        ):
            catalog.tier.remove_shard(self.saved.id, number)

    def coordinator(self, patience: int, run: Run, me: Actor) -> None:
        """Publishes once all shards are durable, or gives up and closes the registers, as `commit` does."""
        everybody = set(range(_NUM_RANKS))
        waited = iter(range(patience))
        me.step(lambda: self.entries == everybody or next(waited, None) is None or self.has_left)
        catalog = self.joint(run, me)
        is_committed = False
        if self.entries == everybody:
            try:
                is_committed = catalog.publish(manifest_of(self.saved.shards, writer={}))
            except ShardStoreError:
                pass
        if not is_committed:
            try:
                is_committed = not catalog.abort(self.saved.id, reason="a rank is late", writer={})
            except ShardStoreError:
                try:
                    is_committed = catalog.settled_state(self.saved.id) == "committed"
                except ShardStoreError:
                    return  # unknown: nobody is told, nobody removes a byte
        self.outcome = "committed" if is_committed else "failed"
        if not is_committed:
            catalog.try_remove(self.saved.id)

    def deleter(self, run: Run, me: Actor) -> None:
        """Retention, or `delete`, of the run itself or of a later one."""
        patience = iter(range(200))
        me.step(lambda: self.outcome is not None or next(patience, None) is None)
        catalog = self.joint(run, me)
        try:
            if catalog.settled_state(self.saved.id) != "committed":
                return
            self.is_being_deleted = True
            catalog.unlist(self.saved.id, reason="retention", writer={})
            self.is_unlisted = True
        except ShardStoreError:
            return  # it is told, and tried again
        catalog.try_remove(self.saved.id)

    def successor(self, run: Run, me: Actor) -> None:
        """The first save of a later run on all hosts."""
        self.start(self.joint(run, me))

    def start(self, catalog: Catalog) -> None:
        complete_commits(catalog, warn=lambda *_: None)
        publish_late(catalog, before_run=self.saved.id.run + 1, writer={})
        catalog.remove_aborted()
        for orphan in find_orphans(catalog, memory_dirs=(), including_unknown=True):
            if orphan.may_go:
                remove_orphan(catalog, orphan, writer={})

    def lonely(self, c: RootClass, me: Actor) -> None:
        """A later run on one of the hosts alone."""
        self.start_alone(self.own(c, me.ops))

    def start_alone(self, catalog: Catalog) -> None:
        publish_late(catalog, before_run=self.saved.id.run + 1, writer={})
        catalog.remove_aborted()
        for orphan in find_orphans(catalog, memory_dirs=(), held=()):
            if orphan.may_go:
                remove_orphan(catalog, orphan, writer={})
        if self.chance.random() < 0.3 and catalog.state(self.saved.id) == "committed":
            self.is_being_deleted = True
            catalog.unlist(self.saved.id, reason="deleted by the user", writer={})
            self.is_unlisted = True
            catalog.try_remove(self.saved.id)

    def commands(self, c: RootClass, me: Actor) -> None:
        """The command line on one of the hosts, used by somebody who answers for everything."""
        catalog = self.own(c, me.ops)
        for orphan in find_orphans(catalog, memory_dirs=(), including_unknown=True):
            if orphan.may_go:
                remove_orphan(catalog, orphan, writer={})
        prune(catalog, 1, writer={}, dry_run=False)

    # -------------------------------------------------------------- invariants

    def states(self) -> dict[int, str]:
        return {c.first: self.own(c).state(self.saved.id) for c in self.classes}

    def state(self) -> str:
        """What the registers say together, read past all that is tested."""
        states = {*self.states().values()}
        return next((state for state in ("aborted", "committed") if state in states), "torn")

    def is_whole(self, c: RootClass) -> bool:
        folder = self.root(c) / self.saved.id.name
        paths = [folder / f"rank-{rank:05d}.safetensors" for rank in c.ranks]
        return all(
            path.exists() and path.read_bytes() == self.saved.files[rank]
            for path, rank in zip(paths, c.ranks, strict=True)
        )

    def check(self) -> None:
        """After every operation, past all tiers."""
        state = self.state()
        here = [c for c in self.classes if c.first not in self.lost]
        are_whole = all(self.is_whole(c) for c in here)
        if self.lost:
            # Nobody restores it any more; but a root that is there keeps its part: the disk may come back.
            is_owed = self.outcome == "committed" and not self.is_being_deleted
            if is_owed and not (are_whole and state == "committed"):
                self.broken.add("a root was lost, and another one gave up what was committed")
            return
        if state == "committed" and not are_whole:
            self.broken.add("committed with bytes missing on a root that is there")
        if state == "committed" and self.is_unlisted:
            self.broken.add("a deleted snapshot was listed again")
        if state == "committed" and self.outcome == "failed":
            self.broken.add("the trainer heard that it failed, and it was listed")
        if state != "committed" and self.outcome == "committed" and not self.is_being_deleted:
            self.broken.add("the trainer heard that it was committed, and it vanished")

    def seen_from(self, c: RootClass) -> Catalog:
        """All roots, where rank 0 runs on one of the hosts and all answer at once."""
        others = {o.first: self.own(o) for o in self.classes}

        def ask(question: Question, whom: Sequence[int]) -> dict[int, Answer | None]:
            return {rank: answer_for(others[rank], question) for rank in whom}

        peers = _Peers(self.classes, c, ask)
        return Catalog(JointTier(self.own(c).tier, peers), spans_hosts=True)

    def lose(self, c: RootClass) -> None:
        """The disk of a host was replaced."""
        shutil.rmtree(self.root(c))
        self.make_root(c)
        self.lost.add(c.first)

    def sweep(self) -> None:
        """A last start on all hosts, when all others are dead: everybody is told the same, nothing is half."""
        for c in self.classes:
            told, state = self.seen_from(c).state(self.saved.id), self.state()
            if c is self.classes[0] and told != state:
                self.broken.add(f"a start is told {told}, and the registers say {state}")
        catalog = self.seen_from(self.classes[0])
        if self.state() == "committed" and not self.lost:
            found = Chooser([Inventory()] * _NUM_RANKS, catalog, step=None).next()
            if not isinstance(found, Candidate) or found.id != self.saved.id:
                self.broken.add(f"committed, and not restored: {found}")
        self.start(catalog)
        self.check()
        if not self.lost:
            self._check_leftovers()

    def _check_leftovers(self) -> None:
        states = {*self.states().values()}
        whole = all(self.is_whole(c) for c in self.classes)
        left = [p for p in self.folder.rglob("*") if p.is_file() and not p.name.startswith("run-")]
        if states == {"committed"} and whole:
            if len(left) != _NUM_RANKS + len(self.classes):
                self.broken.add(f"more than a snapshot is left: {left}")
        elif left:
            self.broken.add(f"left behind: {left}")
        elif not isinstance(
            Chooser([Inventory()] * _NUM_RANKS, self.seen_from(self.classes[0]), step=None).next(),
            Nothing,
        ):
            self.broken.add("nothing is there, and it is restored")


def _run(saved: Saved, classes: tuple[RootClass, ...], seed: int, folder: str) -> set[str]:
    chance = random.Random(seed)
    world = World(saved, Path(folder), classes, chance)
    everybody: list[Actor] = []

    def actor(name: str, life: Callable[[Actor], None], delay: int = 0) -> Actor:
        def late(me: Actor) -> None:
            for _ in range(delay):
                me.step()
            life(me)

        made = Actor(name, late, chance.choice([0.2, 1, 3]))
        everybody.append(made)
        return made

    def new_run() -> tuple[Run, list[Actor]]:
        run = Run({c.first: [] for c in classes[1:]})
        return run, [
            actor(f"steward {c.first}", partial(world.steward, c, run)) for c in classes[1:]
        ]

    first, stewards = new_run()
    owners = {r: actor(f"rank {r}", partial(world.rank, r)) for r in range(_NUM_RANKS)}
    patience = chance.choice([20, 60, 400])
    leads = [actor("coordinator", partial(world.coordinator, patience, first))]
    if chance.random() < 0.5:
        leads.append(actor("deleter", partial(world.deleter, first), chance.choice([0, 40, 120])))
    others: list[list[Actor]] = []
    for _ in range(chance.choice([0, 1, 1, 2])):
        run, more = new_run()
        more.append(actor("successor", partial(world.successor, run), chance.choice([0, 60, 200])))
        if chance.random() < 0.3:
            more.append(actor("its deleter", partial(world.deleter, run), chance.choice([0, 120])))
        others.append(more)
    for life in (world.lonely, world.commands):
        if chance.random() < 0.4:
            one = actor(
                life.__name__, partial(life, chance.choice(classes)), chance.choice([0, 90])
            )
            others.append([one])
    deaths: dict[int, list[Actor]] = {}
    if chance.random() < 0.4:
        deaths[chance.randrange(1, 250)] = [*owners.values(), *leads, *stewards]
    elif chance.random() < 0.5:  # one host of them
        dead = chance.choice(classes)
        mine = [owners[rank] for rank in dead.ranks]
        at = classes.index(dead)
        deaths[chance.randrange(1, 250)] = mine + (leads if at == 0 else [stewards[at - 1]])
    if others and chance.random() < 0.5:
        victims = chance.choice(others)
        deaths.setdefault(chance.randrange(1, 300), []).extend(
            victims if chance.random() < 0.5 else [chance.choice(victims)]
        )
    half = chance.choice([0, 1, 5, 20]), [*leads] if chance.random() < 0.6 else [*stewards]
    turns_half = 0

    def after_each() -> None:
        """Look; and end who works on it while the roots say different things."""
        nonlocal turns_half
        world.check()
        turns_half += len({*world.states().values()}) > 1
        if half[0] and turns_half == half[0]:
            turns_half += 1
            for victim in half[1]:
                if not victim.is_over:
                    victim.kill()

    take_turns(chance, everybody, after_each=after_each, deaths=deaths)
    for one in everybody:
        if one.error is not None and not isinstance(one.error, ShardStoreError):
            raise one.error
    if chance.random() < 0.2:
        world.lose(chance.choice(classes))
    if chance.random() < 0.4:
        world.start_alone(world.own(chance.choice(classes)))
    world.sweep()
    return world.broken


_TWO_HOSTS = (RootClass("a", (0, 1)), RootClass("b", (2,)))
_THREE_HOSTS = (RootClass("a", (0,)), RootClass("b", (1,)), RootClass("c", (2,)))


def _check(saved: Saved, classes: tuple[RootClass, ...], seeds: range) -> None:
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="shardstore-test-", dir="/dev/shm") as folder:
            broken = _run(saved, classes, seed, folder)
        assert not broken, f"seed {seed}: {broken}"


@pytest.mark.parametrize("classes", [_TWO_HOSTS, _THREE_HOSTS], ids=["2 hosts", "3 hosts"])
def test_whoever_works_on_the_roots_of_several_hosts_they_stay_one(
    saved: Saved, classes: tuple[RootClass, ...]
) -> None:
    _check(saved, classes, range(_NUM_SEEDS))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("classes", [_TWO_HOSTS, _THREE_HOSTS], ids=["2 hosts", "3 hosts"])
def test_many_orders_of_those_who_work_on_the_roots_of_several_hosts(
    saved: Saved, classes: tuple[RootClass, ...]
) -> None:
    _check(saved, classes, range(_NUM_SEEDS, _NUM_NIGHTLY_SEEDS))
