"""The real memory tier under seeded random interleavings, with crashes and restarts (P3).

The idea is that of the slot model behind the protocols: ranks that stage, seal, spill, commit, fail and
hear of each other late, in several lives on one tmpfs. Here the slots are MemoryTiers, one per rank in one
process, adopted through `adopt_files` after each crash, under the engine's own opening agreement.
"""

from __future__ import annotations

import gc
import random
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

from shardstore.engine.listing import SnapshotInfo
from shardstore.engine.opening import _agree, _inventory, _Report
from shardstore.engine.protecting import protect
from shardstore.engine.retention import Keep, plan_deletions
from shardstore.engine.session import Session
from shardstore.errors import TierFullError
from shardstore.format.records import SnapshotId
from shardstore.format.shardfile import digest_of, header_length, parse_header
from shardstore.tiers import ownership
from shardstore.tiers.adoption import Adopted, adopt_files
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.memory import MemoryTier
from shardstore.tiers.slots import Slot
from tests.unit.format.builders import MESH, ShardFile, make_header, row, seal

_NUM_BLOCKS: Final = 6
_SEEDS_PER_BLOCK: Final = 40
_NUM_LIVES: Final = 4
_ELEMENTS: Final = 1024
_MAX_TURNS: Final = 1500

Task = Iterator[Callable[[], bool] | None]


def _tag(snapshot_id: SnapshotId) -> int:
    return (snapshot_id.run * 16 + snapshot_id.count) % 256


def _shard(snapshot_id: SnapshotId, rank: int, world_size: int) -> ShardFile:
    """One rank's file; every byte of its tensor says which save it is of."""
    header = make_header(
        (row("w", "uint8", (_ELEMENTS,)),),
        rank=rank,
        step=snapshot_id.step,
        run=snapshot_id.run,
        count=snapshot_id.count,
        nonce=snapshot_id.nonce,
        world_size=world_size,
        meshes=(MESH,) if world_size == 2 else (),
        coordinates=((rank,),) if world_size == 2 else (),
    )
    return seal(header, lambda nbytes: bytes([_tag(snapshot_id)]) * nbytes, room=8192)


def _is_whole(data: bytes, snapshot_id: SnapshotId, rank: int) -> bool:
    """Whether these bytes are that shard, digests verified, with nothing of another save in them."""
    if not any(data[:8]):
        return False
    length = header_length(data[:8], len(data), source="model")
    parsed = parse_header(data[: 8 + length], len(data), source="model")
    start, stop = parsed.layout.spans[0]
    return (
        parsed.header.id == snapshot_id
        and parsed.header.rank == rank
        and digest_of(data[start:stop]) == parsed.header.pieces[0].digest
        and set(data[start:stop]) == {_tag(snapshot_id)}
    )


def _newest(ids: Iterable[SnapshotId]) -> SnapshotId | None:
    return max(ids, key=lambda i: i.order, default=None)


class World:
    """What outlives a process: the tmpfs, the root, and what an omniscient observer saw."""

    def __init__(self, seed: int, folder: str) -> None:
        self.rng = rng = random.Random(seed)
        self.folder = folder
        self.ops = FileOps()
        self.world_size = rng.choice([2, 2, 3])
        self.has_root = rng.random() < 0.5
        self.keep = None if self.has_root else Keep(last=rng.choice([1, 1, 2]))
        self.num_slots = max(rng.choice([2, 2, 3]), (self.keep.last if self.keep else 1) + 1)
        self.root: dict[SnapshotId, dict[int, bytes]] = {}
        self.committed: set[SnapshotId] = set()
        self.best: SnapshotId | None = None
        """The newest that ever was complete: sealed on all ranks, or committed."""
        self.num_complete = 0

    @property
    def ranks(self) -> range:
        return range(self.world_size)

    def note_complete(self, snapshot_id: SnapshotId) -> None:
        self.num_complete += 1
        self.best = _newest(i for i in (self.best, snapshot_id) if i is not None)

    def files(self, rank: int) -> dict[SnapshotId, bytes]:
        """Whole shards of a rank on the tmpfs, read without the tier."""
        found = {}
        for path in Path(self.folder).glob(f"step-*/rank-{rank:05d}.safetensors"):
            snapshot_id = SnapshotId.parse(path.parent.name)
            assert snapshot_id is not None
            data = path.read_bytes()
            if _is_whole(data, snapshot_id, rank):
                found[snapshot_id] = data
        return found


class Life:
    """One process life of all ranks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        self.nonce = secrets.token_hex(4)
        self.run = 0
        self.num_saves = self.rng.choice([3, 5, 7])
        self.sessions: list[Session] = []
        self.queues: list[list[tuple[SnapshotId, Slot | None]]] = [[] for _ in world.ranks]
        self.over: list[set[int]] = [set() for _ in world.ranks]
        """Saves that a rank has sealed, or failed to."""
        self.sealed: dict[int, set[int]] = {}
        self.failed: set[int] = set()
        self.outcomes: dict[int, str] = {}
        self.waits: dict[str, Callable[[], bool] | None] = {}

    # ------------------------------------------------------------------ restart

    def open(self) -> None:
        """Adopt, check the invariants, agree, protect."""
        world = self.world
        nbytes = len(_shard(SnapshotId(1, 1, 1, self.nonce), 0, world.world_size).data)
        adopted = [
            adopt_files(world.folder, rank=rank, owner=self.nonce, ops=world.ops)
            for rank in world.ranks
        ]
        reports = [_Report((), _inventory(a, {}, a.marked), (), None) for a in adopted]
        near = _agree(reports, None).near
        self._check_restart(adopted, near.newest)
        self.run = 1 + max([a.highest_run for a in adopted] + [i.run for i in world.root])
        for rank in world.ranks:
            memory = MemoryTier(
                world.folder, rank=rank, owner=self.nonce, budget_bytes=world.num_slots * nbytes,
                has_outer=world.has_root, ops=world.ops,
            )  # fmt: skip
            coordinator = SimpleNamespace(rank=rank, world_size=world.world_size)
            session = Session(
                coordinator=cast("Any", coordinator), memory=memory, catalog=None, on_disk=None, keep=world.keep,
                timeout_s=1.0, writer={}, nonce=self.nonce,
            )  # fmt: skip
            session.marked |= set(adopted[rank].marked)
            protect(session, adopted[rank], {}, near)
            # What the root adds to the agreement; there is no catalog in this model.
            for snapshot_id in world.committed:
                memory.mark_safe(snapshot_id)
            if world.committed:
                known = [*world.committed, *filter(None, [near.newest])]
                memory.set_newest_complete(_newest(known))
            self.sessions.append(session)

    def _check_restart(self, adopted: list[Adopted], agreed: SnapshotId | None) -> None:
        """I1 no mixture, I2 nothing complete was lost, I3 the newest that is there is agreed on."""
        world = self.world
        files = [world.files(rank) for rank in world.ranks]
        for rank, found in enumerate(adopted):
            assert set(found.headers) == set(files[rank]), (
                "I1, I3: adopted shards are not the whole ones"
            )
        in_memory = _newest(set.intersection(*[set(f) for f in files]))
        assert agreed == in_memory, f"I3: {agreed} was agreed on, {in_memory} is there"
        readable = [
            set(files[rank]) | {i for i, shards in world.root.items() if rank in shards}
            for rank in world.ranks
        ]
        there = _newest(set.intersection(*readable))
        if world.best is not None:
            assert there is not None, f"I2: {world.best} was complete, nothing is left"
            assert there.order >= world.best.order, (
                f"I2: {world.best} was complete, {there} is left"
            )

    # -------------------------------------------------------------------- tasks

    def main(self, rank: int) -> Task:
        """The trainer: stage into a reserved slot, in two halves."""
        memory = self.sessions[rank].memory
        for count in range(1, self.num_saves + 1):
            snapshot_id = SnapshotId(count, self.run, count, self.nonce)
            for _ in range(self.rng.randrange(4)):
                yield None
            if self.rng.random() < 0.1:  # save raises on this rank, before it has a slot
                self.queues[rank].append((snapshot_id, None))
                continue
            file = _shard(snapshot_id, rank, self.world.world_size)
            slot = None
            while slot is None:
                with suppress(TierFullError):
                    slot = memory.reserve(len(file.data), kept=False, timeout_s=0.0)
                if slot is None:
                    yield None
            start = file.layout.data_start
            middle = start + _ELEMENTS // 2
            for part in (slice(start, middle), slice(middle, len(file.data))):
                yield None
                slot.view[part] = file.data[part]
            self.queues[rank].append((snapshot_id, slot))

    def worker(self, rank: int) -> Task:
        """Seal, then spill page by page."""
        world, memory = self.world, self.sessions[rank].memory
        while True:
            yield lambda: bool(self.queues[rank])
            snapshot_id, slot = self.queues[rank].pop(0)
            for _ in range(self.rng.randrange(5)):
                yield None
            if slot is None or self.rng.random() < 0.1:
                if slot is not None:
                    memory.abandon_slot(slot)
                self.failed.add(snapshot_id.count)
                self.over[rank].add(snapshot_id.count)
                continue
            file = _shard(snapshot_id, rank, world.world_size)
            memory.seal(slot, snapshot_id, file.data[: file.layout.data_start], kept=False)
            self.sealed.setdefault(snapshot_id.count, set()).add(rank)
            self.over[rank].add(snapshot_id.count)
            if self._is_complete(snapshot_id):
                world.note_complete(snapshot_id)
            yield None
            reader = memory.open_shard(snapshot_id) if world.has_root else None
            if reader is None:
                continue
            with reader:
                pages = []
                for start in range(0, reader.nbytes, 4096):
                    pages.append(bytes(reader.read(start, start + 4096)))
                    yield None
                data = b"".join(pages)
            if self.outcomes.get(snapshot_id.count) != "failed":
                assert _is_whole(data, snapshot_id, rank), "I1: a spill read bytes of another save"
                world.root.setdefault(snapshot_id, {})[rank] = data

    def _is_complete(self, snapshot_id: SnapshotId) -> bool:
        """Not failed, and at this moment on the tmpfs for all ranks."""
        count, folder = snapshot_id.count, Path(self.world.folder, snapshot_id.name)
        if count in self.failed or len(self.sealed[count]) < self.world.world_size:
            return False
        return all((folder / f"rank-{rank:05d}.safetensors").exists() for rank in self.world.ranks)

    def decide(self) -> Task:
        """Rank 0: one outcome per save, written once; commits on the root."""
        world = self.world
        while True:
            yield None
            for count in range(1, self.num_saves + 1):
                if count in self.failed:
                    self.outcomes.setdefault(count, "failed")
                elif len(self.sealed.get(count, ())) == world.world_size:
                    self.outcomes.setdefault(count, "complete")
            for snapshot_id, shards in list(world.root.items()):
                is_ours = snapshot_id.nonce == self.nonce
                is_whole = len(shards) == world.world_size and snapshot_id not in world.committed
                if is_ours and is_whole and self.outcomes.get(snapshot_id.count) == "complete":
                    yield None
                    world.committed.add(snapshot_id)
                    world.note_complete(snapshot_id)

    def hear(self, rank: int) -> Task:
        """This rank learns outcomes in order, some time later, and tells its tier."""
        session, count = self.sessions[rank], 1
        while True:
            for _ in range(self.rng.choice([1, 5, 25])):
                yield None
            while count in self.outcomes and count in self.over[rank]:
                snapshot_id = SnapshotId(count, self.run, count, self.nonce)
                if self.outcomes[count] == "failed":
                    session.know_failed(snapshot_id)
                else:
                    session.know_complete(_info(snapshot_id), snapshot_id)
                    yield None
                    for old in plan_deletions(list(session.complete), self.world.keep):
                        session.forget(old)
                count += 1
                yield None
            for snapshot_id in list(self.world.committed):
                session.memory.mark_safe(snapshot_id)

    # ---------------------------------------------------------------------- run

    def play(self) -> None:
        """Interleave until a random moment; then sometimes without one rank, which died first."""
        tasks: dict[str, Task] = {"decide-0": self.decide()}
        for rank in self.world.ranks:
            tasks[f"main-{rank}"] = self.main(rank)
            tasks[f"worker-{rank}"] = self.worker(rank)
            tasks[f"hear-{rank}"] = self.hear(rank)
        paces = {name: self.rng.choice([0.3, 1.0, 4.0]) for name in tasks}
        self._interleave(tasks, paces, self.rng.choice([5, 40, 100, 250, 600, _MAX_TURNS]))
        if self.rng.random() < 0.5:
            victim = f"-{self.rng.randrange(self.world.world_size)}"
            alive = {name: task for name, task in tasks.items() if not name.endswith(victim)}
            self._interleave(alive, paces, self.rng.choice([5, 60, 200]))

    def _interleave(self, tasks: dict[str, Task], paces: dict[str, float], num_turns: int) -> None:
        for _ in range(num_turns):
            ready = [n for n in tasks if (wait := self.waits.get(n)) is None or wait()]
            if not ready:
                return
            name = self.rng.choices(ready, [paces[n] for n in ready])[0]
            try:
                self.waits[name] = next(tasks[name])
            except StopIteration:
                del tasks[name]

    def crash(self) -> None:
        """Every rank is gone: nothing is closed, mappings and locks end as the kernel ends them."""
        for session in self.sessions:
            for slot in session.memory._slots:
                slot.unmap()
        for rank in self.world.ranks:
            ownership.release_all(self.world.folder, rank, remove=False)


def _info(snapshot_id: SnapshotId) -> SnapshotInfo:
    return SnapshotInfo(snapshot_id.step, snapshot_id.name, ("memory",), 1, 0.0, False, None)


def _live_and_die(seed: int, folder: str) -> World:
    world = World(seed, folder)
    for _ in range(_NUM_LIVES):
        life = Life(world)
        life.open()
        life.play()
        life.crash()
    last = Life(world)
    last.open()
    last.crash()
    return world


@pytest.mark.parametrize("block", range(_NUM_BLOCKS))
def test_no_complete_snapshot_is_lost_or_mixed_whatever_the_interleaving(
    folder: str, block: int
) -> None:
    num_complete = 0
    for seed in range(block * _SEEDS_PER_BLOCK, (block + 1) * _SEEDS_PER_BLOCK):
        home = Path(folder, str(seed))
        home.mkdir()
        try:
            num_complete += _live_and_die(seed, str(home)).num_complete
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    gc.collect()
    assert num_complete > 2 * _SEEDS_PER_BLOCK, "the interleavings do not get anywhere"
