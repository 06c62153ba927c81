"""Lives of a small job, to be ended at any operation, and what the next life must find."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from shardstore import SnapshotStore
from shardstore.engine.handle import Snapshot
from shardstore.testing import CountingOps, ThreadRank, use_ops
from tests.faults.clients import client_options

_NAME_BYTES = 200


class Told:
    """Shared with a child that may die: what it was certain of last, and which operation came last."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1 + _NAME_BYTES)

    @property
    def phase(self) -> int:
        return self._memory[0]

    @phase.setter
    def phase(self, phase: int) -> None:
        self._memory[0] = phase

    @property
    def operation(self) -> str:
        return self._memory[1:].rstrip(b"\0").decode()

    @operation.setter
    def operation(self, name: str) -> None:
        self._memory[1:] = name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")


NUMEL = 5001
"""Of the largest tensor, as a rule."""


def state_of(version: int, rank: int = 0, numel: int = NUMEL) -> dict[str, Any]:
    """A state every bit of which says which version it is."""
    chance = torch.Generator().manual_seed(1000 * version + rank)
    model = nn.Linear(30, 40, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        model.weight.copy_(torch.randn(40, 30, generator=chance))
    optimizer.state[model.weight] = {"momentum_buffer": torch.randn(40, 30, generator=chance)}
    return {
        "model": model,
        "optimizer": optimizer,
        "w": torch.randn(numel, generator=chance),
        "b": torch.randint(0, 255, (77 + rank,), dtype=torch.uint8, generator=chance),
        "progress": {"version": version, "ratio": version / 7, "rank": rank},
    }


def version_of(state: dict[str, Any], rank: int = 0) -> int:
    """Which version all of a state is, bit for bit."""
    version: int = state["progress"]["version"]
    expected = state_of(version, rank, state["w"].numel())
    assert state["progress"] == expected["progress"]
    for mine, theirs in zip(_tensors(state), _tensors(expected), strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), (
            f"progress says {version}, a tensor says something else"
        )
    return version


def _tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    weight = state["model"].weight
    momentum = state["optimizer"].state[weight]["momentum_buffer"]
    return [weight.detach(), momentum, state["w"], state["b"]]


@dataclass
class Life:
    """One rank of one life: stores are opened over `ops`."""

    folder: str
    disk_folder: str
    url: str
    """Of the root; empty: it is a folder."""
    storage_options: Mapping[str, Any]
    ops: CountingOps
    told: Told
    options: Mapping[str, Any]
    rank: ThreadRank | None
    all_there: Barrier
    """Of the ranks."""
    number: int = 0
    """Of this rank."""
    numel: int = NUMEL

    def arm(self) -> None:
        """Count operations from here on, once every rank has come here."""
        self.all_there.wait(30)
        self.ops.arm()
        self.all_there.wait(30)

    def open(self) -> SnapshotStore:
        options = {"memory": "1MiB", "timeout_s": 10.0, "name": "job", "root": True, **self.options}
        root = (self.url or f"{self.folder}/root") if options.pop("root") else None
        if options.get("shared") is False:
            root = f"{self.folder}/root-{self.number}"
        if self.url:
            options["storage_options"] = client_options(self.url, self.storage_options)
        if options.get("disk"):
            options["disk"] = f"{self.disk_folder}/disk"
        memory_dir = Path(self.folder) / "memory"
        memory_dir.mkdir(exist_ok=True)
        with use_ops(self.ops):
            return SnapshotStore(root, memory_dir=memory_dir, process_group=self.rank, **options)

    def state(self, version: int) -> dict[str, Any]:
        """Of this rank."""
        return state_of(version, self.number, self.numel)

    def save(
        self, store: SnapshotStore, version: int, *, step: int | None = None, **options: Any
    ) -> Snapshot:
        """Begin to save a version, at the step of its number or another one."""
        step = version if step is None else step
        state = self.state(version)
        return store.save(state, step=step, metadata={"version": version}, **options)

    def commit(self, store: SnapshotStore, version: int, **options: Any) -> None:
        """Save a version, and wait until it is safe and what that entails is done."""
        assert self.save(store, version, **options).wait(20) is not None
        store.drain(20)


class Barrier(Protocol):
    """Where all ranks meet."""

    def wait(self, timeout: float | None = None, /) -> object: ...


def roots_of(folder: str, options: Mapping[str, Any], num_ranks: int) -> list[str]:
    """Where a life's snapshots are: one root, one of each rank, or none."""
    if options.get("shared") is False:
        return [f"{folder}/root-{rank}" for rank in range(num_ranks)]
    return [f"{folder}/root"] if options.get("root", True) else []


Act = Callable[[Life], None]


@dataclass(frozen=True)
class Scenario:
    """What a life does that ends at some operation, and what is true afterwards."""

    act: Act
    """Arms the operations that are to be tried, and raises `told.phase` when something is certain."""
    found: Mapping[int, set[int | None]]
    """By phase: versions that the next life may restore; None: it may find nothing."""
    options: Mapping[str, Any] = field(default_factory=dict)
    before: tuple[tuple[Act, str], ...] = ()
    """Lives before that one, each ended when the last of its ranks comes to a named point."""
    always: frozenset[int] = frozenset()
    """Versions that can be restored by their step, whatever happens."""
    num_ranks: int = 1
    """Threads of one process: all die at once."""
    count_reads: bool = False
    numel: int = NUMEL
    is_listed: bool = True
    """The root lists a snapshot at every moment (G6), as one was committed there before."""


def _save_first(life: Life) -> None:
    store = life.open()
    life.arm()
    life.commit(store, 1)
    life.told.phase = 1


def _save_second(life: Life, *, step: int | None = None, **options: Any) -> None:
    store = life.open()
    life.commit(store, 1, step=step)
    life.arm()
    assert life.save(store, 2, step=step, **options).wait(20) is not None
    life.told.phase = 1
    store.drain(20)


def _save_same_step(life: Life) -> None:
    _save_second(life, step=5)


def _save_overlapping(life: Life) -> None:
    _save_second(life, overlap=True)


def _open_and_save_second(life: Life) -> None:
    """Everything from the very first system call of a life on."""
    life.arm()
    store = life.open()
    life.commit(store, 1)
    life.commit(store, 2)
    life.told.phase = 1


def _save_beyond_kept(life: Life) -> None:
    """Memory is full of snapshots of persist=False: one of them goes to the root for this one."""
    store = life.open()
    life.commit(store, 1, persist=False)
    life.commit(store, 2, persist=False)
    life.arm()
    assert life.save(store, 3).wait(20) is not None
    life.told.phase = 1
    store.drain(20)


def _save_pinned(life: Life) -> None:
    store = life.open()
    life.commit(store, 1)
    store.pin(1)
    life.arm()
    assert life.save(store, 2).wait(20) is not None
    life.told.phase = 1
    store.drain(20)


def _flush(life: Life) -> None:
    """The newest of several that are under way goes past the older ones."""
    store = life.open()
    life.commit(store, 1)
    life.arm()
    for version in range(2, _NUM_FLUSHED + 1):
        life.save(store, version)
    info = store.flush(10.0)
    if info is not None and info.step == _NUM_FLUSHED:
        life.told.phase = 1
    store.drain(20)


def _delete(life: Life) -> None:
    store = life.open()
    life.commit(store, 1)
    life.commit(store, 2)
    life.arm()
    store.delete(2)
    life.told.phase = 1


def _close(life: Life) -> None:
    store = life.open()
    life.commit(store, 1)
    life.commit(store, 2)
    life.arm()
    store.close()
    life.told.phase = 1


def _restore(life: Life) -> None:
    store = life.open()
    life.commit(store, 1)
    life.commit(store, 2)
    life.arm()
    live = life.state(9)
    store.restore(live)
    assert version_of(live, life.number) == 2


def _open_and_restore(life: Life) -> None:
    life.arm()
    store = life.open()
    store.restore(life.state(9))
    life.ops.disarm()


def _open_and_save_third(life: Life) -> None:
    life.arm()
    store = life.open()
    assert life.save(store, 3).wait(20) is not None
    life.told.phase = 1
    store.drain(20)


_NUM_FLUSHED = 7
_ANY_OR_LAST: Mapping[int, set[int | None]] = {
    0: {*range(1, _NUM_FLUSHED + 1)},
    1: {_NUM_FLUSHED},
}
_OLD_OR_NEW: Mapping[int, set[int | None]] = {0: {1, 2}, 1: {2}}
_SECOND: Mapping[int, set[int | None]] = {0: {2}, 1: {2}}
_SECOND_OR_THIRD: Mapping[int, set[int | None]] = {0: {2, 3}, 1: {3}}

SCENARIOS: Mapping[str, Scenario] = {
    "save, no older one": Scenario(_save_first, {0: {None, 1}, 1: {1}}, is_listed=False),
    "open and save": Scenario(_open_and_save_second, {0: {None, 1, 2}, 1: {2}}, is_listed=False),
    "save, an older one": Scenario(_save_second, _OLD_OR_NEW, always=frozenset({1})),
    "save, the same step": Scenario(_save_same_step, _OLD_OR_NEW),
    "save, retention": Scenario(_save_second, _OLD_OR_NEW, {"keep": 1}),
    "save, retention and a pin": Scenario(
        _save_pinned, _OLD_OR_NEW, {"keep": 1}, always=frozenset({1})
    ),
    "save, streamed": Scenario(_save_second, _OLD_OR_NEW, {"memory": 0, "keep": 1}),
    "save, by way of a disk": Scenario(_save_second, _OLD_OR_NEW, {"disk": True, "keep": 1}),
    "save, a disk alone": Scenario(
        _save_second, _OLD_OR_NEW, {"disk": True, "root": False, "keep": 1}, is_listed=False),
    "save, memory alone": Scenario(_save_second, _OLD_OR_NEW, {"root": False, "keep": 1}, is_listed=False),
    "save, overlapping": Scenario(_save_overlapping, _OLD_OR_NEW, {"keep": 1}),
    "save, two ranks": Scenario(_save_second, _OLD_OR_NEW, {"keep": 1}, num_ranks=2),
    "save, persist=False leaves memory": Scenario(
        _save_beyond_kept,
        _SECOND_OR_THIRD,
        {"memory": 90_000},
        always=frozenset({1, 2}), is_listed=False),
    "flush": Scenario(_flush, _ANY_OR_LAST, always=frozenset({1})),
    "flush, two ranks": Scenario(_flush, _ANY_OR_LAST, {"keep": 2}, num_ranks=2),
    "delete": Scenario(_delete, {0: {1, 2}, 1: {1}}, always=frozenset({1})),
    "delete, two ranks": Scenario(
        _delete, {0: {1, 2}, 1: {1}}, always=frozenset({1}), num_ranks=2
    ),
    "close": Scenario(_close, _SECOND, {"keep": 1}),
    "close, memory alone": Scenario(_close, {0: {2, None}, 1: {None}}, {"root": False}, is_listed=False),
    "restore from memory": Scenario(_restore, _SECOND, count_reads=True),
    "restore from the root": Scenario(_restore, _SECOND, {"memory": 0}, count_reads=True),
    "adopt, sealed by the dead": Scenario(
        _open_and_restore, _SECOND, before=((_save_second, "post sealed"),), count_reads=True
    ),
    "adopt twice, two ranks": Scenario(
        _open_and_save_third, _SECOND_OR_THIRD, {"keep": 1},
        before=((_save_second, "post durable"), (_open_and_restore, "none")), num_ranks=2,
    ),
    "publish late": Scenario(
        _open_and_save_third, _SECOND_OR_THIRD, {"memory": 0},
        before=((_save_second, "post durable"),), always=frozenset({2}),
    ),
    "save, private roots": Scenario(
        _open_and_save_third, {0: {2, 3}, 1: {3}}, {"keep": 1, "shared": False, "memory": 0},
        before=((_save_second, "post durable"),), num_ranks=2,
    ),
    "publish late, two ranks": Scenario(
        _open_and_save_third, _SECOND_OR_THIRD, {"keep": 1},
        before=((_save_second, "post durable"),), num_ranks=2,
    ),
}  # fmt: skip
"""Every life that is ended at every operation."""
