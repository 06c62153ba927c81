"""End a life at one operation, look at what the next one finds, and what is left when all is cleaned up."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from shardstore import CorruptSnapshotError, SnapshotStore, list_snapshots
from shardstore.engine.catalog import Catalog
from shardstore.engine.orphans import Orphan, find_orphans, remove_orphan
from shardstore.testing import (
    CountingOps,
    ThreadRank,
    kill_at,
    kill_at_point,
    run_forked,
    run_rank_threads,
)
from shardstore.testing.forked import Ended
from shardstore.testing.ops import Before
from shardstore.tiers.base import RootTier
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.roots import open_root
from tests.faults.clients import client_options
from tests.faults.lives import SCENARIOS, Act, Life, Scenario, Told, roots_of, state_of, version_of

AFTER = 99
"""Version, and step, that the next life saves."""


class Crash(NamedTuple):
    """One life, and what the next one found."""

    was_killed: bool
    operation: str
    phase: int
    restored: int | None


class Places(NamedTuple):
    """Where a job keeps its files: on the tmpfs, and on another file system; and its root, if that is remote."""

    folder: str
    disk_folder: str
    url: str = ""
    storage_options: Mapping[str, Any] = MappingProxyType({})

    def roots(self, scenario: Scenario) -> list[str]:
        """Where a scenario's snapshots are."""
        if self.url and scenario.options.get("root", True):
            return [self.url]
        return roots_of(self.folder, scenario.options, scenario.num_ranks)

    def tier(self, root: str) -> RootTier:
        """A root, looked at past the store."""
        options = client_options(root, self.storage_options) if self.url else None
        return open_root(root, FileOps(), storage_options=options, timeout_s=30.0)


@contextmanager
def places(
    url: str = "", storage_options: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[Places]:
    """Fresh ones, removed afterwards, but for a remote root."""
    found = Places(
        tempfile.mkdtemp(prefix="shardstore-test-", dir="/dev/shm"),
        tempfile.mkdtemp(prefix="shardstore-test-"),
        url,
        storage_options,
    )
    try:
        yield found
    finally:
        for path in (found.folder, found.disk_folder):
            shutil.rmtree(path, ignore_errors=True)


def crashes_of(name: str, first: int, stride: int) -> list[Crash]:
    """End the lives of a scenario at operations `first`, `first + stride`, ... as long as there are any."""
    state_of(1)  # what torch imports for it, children have then
    found = [crash_at(name, first)]
    while found[-1].was_killed:
        first += stride
        found.append(crash_at(name, first))
    return found


def crash_at(name: str, at: int) -> Crash:
    """One life that ends at operation `at` of its armed part, and the next one."""
    scenario = SCENARIOS[name]
    with places() as where:
        live_before(where, scenario, name)
        told = Told()
        ended = live_once(where, scenario, scenario.act, told, telling(told, kill_at(at)))
        what = f"{name}, ended at {at}, {told.operation}, in phase {told.phase}"
        assert not ended.error, f"{what}: {ended.error}"
        after = run_forked(lambda: look(where, scenario))
        assert not after.error, f"{what}: {after.error}"
        assert not after.was_killed
        allowed = scenario.found[told.phase]
        assert after.value in allowed, f"{what}: restored {after.value}, not one of {allowed}"
        return Crash(ended.was_killed, told.operation, told.phase, after.value)


def live_before(where: Places, scenario: Scenario, name: str) -> None:
    """The lives that came before, each of which died."""
    for act, point in scenario.before:
        ended = live_once(where, scenario, act, Told(), _kill_at_last(point, scenario.num_ranks))
        assert not ended.error, f"{name}: the life before: {ended.error}"


def _kill_at_last(point: str, num_ranks: int) -> Before:
    """End the process when the last rank comes to a named point: the others have passed it."""
    kill = kill_at_point(point)
    left = itertools.count(num_ranks - 1, -1)

    def act(name: str, number: int) -> None:
        if name == f"point:{point}" and next(left) == 0:
            kill(name, number)

    return act


def telling(told: Told, before: Before) -> Before:
    def act(name: str, number: int) -> None:
        told.operation = name
        before(name, number)

    return act


def live_once(
    where: Places,
    scenario: Scenario,
    act: Act,
    told: Told,
    before: Before,
    *,
    counting: type[CountingOps] = CountingOps,
) -> Ended:
    """A life in a forked child."""

    def live() -> None:
        ops = counting(before, count_reads=scenario.count_reads)
        all_there = threading.Barrier(scenario.num_ranks)

        def one(rank: ThreadRank | None) -> None:
            number = rank.rank if rank else 0
            act(Life(*where, ops, told, scenario.options, rank, all_there, number, scenario.numel))

        on_ranks(scenario.num_ranks, one)

    return run_forked(live)


def on_ranks(num_ranks: int, function: Callable[[ThreadRank | None], Any]) -> list[Any]:
    """Call it for each rank, on threads if there are several."""
    return [function(None)] if num_ranks == 1 else run_rank_threads(num_ranks, function)


def look(where: Places, scenario: Scenario) -> int | None:
    """The next life: which version it restores. It lists, restores, saves and leaves nothing behind."""
    roots = where.roots(scenario)
    options = client_options(where.url, where.storage_options) if where.url else None
    committed = [info for root in roots for info in list_snapshots(root, storage_options=options)]
    assert committed or not scenario.is_listed, (
        "the old one went before its successor was committed"
    )

    all_there = threading.Barrier(scenario.num_ranks)

    def one(rank: ThreadRank | None) -> int | None:
        number = rank.rank if rank else 0
        life = Life(
            *where, CountingOps(), Told(), scenario.options, rank, all_there, number, scenario.numel
        )
        store = life.open()
        live = life.state(AFTER + 1)
        report = store.restore(live, required=False)
        restored = version_of(live, life.number) if report else None
        if report is None:
            assert version_of(live, life.number) == AFTER + 1, "live state was touched"
            assert not committed, f"{committed} are listed, but nothing is found"
        _compare_listing(life, store, None if report is None else report.id)
        for version in scenario.always:
            live = life.state(AFTER + 1)
            store.restore(live, step=version)
            assert version_of(live, life.number) == version
        life.commit(store, AFTER)
        live = life.state(AFTER + 1)
        assert store.restore(live).step == AFTER
        assert version_of(live, life.number) == AFTER
        store.close()
        return restored

    found = on_ranks(scenario.num_ranks, one)
    assert len(set(found)) == 1, f"ranks restored different versions: {found}"
    if scenario.options.get("disk"):
        # A start clears disks of what a restart has no use for; gc spares it until then.
        on_ranks(scenario.num_ranks, lambda rank: _open_and_close(where, scenario, rank))
    _check_nothing_is_left(where)
    for root in roots:
        _check_root(where, root, scenario.options)
    result: int | None = found[0]
    return result


def _open_and_close(where: Places, scenario: Scenario, rank: ThreadRank | None) -> None:
    barrier = threading.Barrier(scenario.num_ranks)
    Life(*where, CountingOps(), Told(), scenario.options, rank, barrier).open().close()


def look_for_values(where: Places, scenario: Scenario) -> int | None:
    """The next life after storage has lied: what it restores, if anything, is bit for bit what was saved."""
    life = Life(*where, CountingOps(), Told(), scenario.options, None, threading.Barrier(1))
    store = life.open()
    live = state_of(AFTER + 1)
    try:
        report = store.restore(live, required=False)
    except CorruptSnapshotError:
        assert version_of(live) == AFTER + 1, "live state was touched"
        return None
    finally:
        store.close()
    return version_of(live) if report else None


def _is_the_operators(catalog: Catalog, orphan: Orphan) -> bool:
    """Whether nobody else may say that its run is dead."""
    record = None if orphan.run is None else catalog.run_record(orphan.run)
    return record is not None and not record.is_exclusive


def _names_in(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}


def _names_in_remote(catalog: Catalog) -> set[str]:
    """What is not there by design: the index, and registers of what is gone, which stay for a day."""
    survey, overview = catalog.tier.survey(), catalog.overview()
    names = {f"{i.name}/{name}" for i, found in survey.attempts.items() for name in found}
    names |= {name for name in survey.names if not name.startswith("index-")}
    closed = (i for i in survey.attempts if overview.state(i) == "aborted")
    return names - {f"{i.name}/manifest.json" for i in closed}


def _compare_listing(life: Life, store: SnapshotStore, newest: str | None) -> None:
    """What is listed can be restored by its step, and nothing listed is newer than what was restored."""
    listed = store.snapshots()
    if life.options.get("shared") is False:  # a rank sees what is committed on its own root
        everywhere = [list_snapshots(root) for root in roots_of(life.folder, life.options, 2)]
        life.all_there.wait(30)
        listed = [i for i in listed if all(i.id in [o.id for o in found] for found in everywhere)]
    by_step = {info.step: info for info in listed}
    for step, info in by_step.items():
        live = life.state(AFTER + 1)
        report = store.restore(live, step=step)
        assert report.id == info.id
        assert isinstance(info.metadata, Mapping)
        assert version_of(live, life.number) == info.metadata["version"]
    if newest in [info.id for info in listed]:
        assert listed[-1].id == newest
    else:
        # Whole, though nobody came to commit it: the next save of a new run does.
        assert all(info.id[-29:] < (newest or "")[-29:] for info in listed)


def _check_nothing_is_left(where: Places) -> None:
    """After `close` memory is empty, and after gc the root holds whole committed snapshots alone."""
    memory = list(Path(where.folder, "memory").rglob("*"))
    assert not memory, f"close left {memory}"
    on_disk = {p.name for p in Path(where.disk_folder).rglob("*") if p.is_file()}
    assert all(name.endswith((".safetensors", ".complete")) for name in on_disk), on_disk


def _check_root(where: Places, root: str, options: Mapping[str, Any]) -> None:
    catalog = Catalog(where.tier(root))
    for orphan in find_orphans(
        catalog, memory_dirs=[f"{where.folder}/memory"], including_unknown=True
    ):
        nameless = orphan.kind == "temp" and orphan.name.startswith(
            (".run-", ".probe-")
        )  # whose, nothing says
        assert orphan.liveness == "dead" or nameless or _is_the_operators(catalog, orphan), orphan
        problem = remove_orphan(catalog, orphan, writer={})
        assert not problem, f"{orphan}: {problem}"
    assert not catalog.tier.list_unfinished()
    whole = set()
    for register in catalog.committed():
        ranks = register.ranks_here
        whole |= {f"{register.id.name}/{name}" for name in ("manifest.json",)}
        whole |= {f"{register.id.name}/rank-{rank:05d}.safetensors" for rank in ranks}
        whole |= {f"{register.id.name}/pinned"} if catalog.is_pinned(register.id) else set()
    left = _names_in_remote(catalog) if where.url else _names_in(Path(root))
    strange = {name for name in left - whole if not name.startswith("run-")}
    assert whole <= left
    assert not strange, f"gc left {strange}"
    if options.get("keep") == 1:
        unpinned = [r.id for r in catalog.committed() if not catalog.is_pinned(r.id)]
        assert [i.step for i in unpinned] == [AFTER], unpinned
