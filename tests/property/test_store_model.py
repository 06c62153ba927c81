"""A store driven at random against a plain dict: saves, spills, crashes, pins, deletes, prunes, restores."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shardstore import Keep, ShardStoreError, SnapshotNotFoundError, SnapshotStore
from shardstore.engine.catalog import Catalog
from shardstore.engine.listing import SnapshotInfo
from shardstore.engine.orphans import find_orphans, remove_orphan
from shardstore.engine.pruning import prune
from shardstore.tiers.disk import DiskTier
from shardstore.tiers.fileops import FileOps, use_ops
from tests.faults.breaking_ops import WatchedOps

_IS_NIGHTLY = bool(os.environ.get("SHARDSTORE_NIGHTLY"))
_WRITER = {"shardstore": "test"}
_NUM_ELEMENTS = 700

KEEPS = (None, Keep(last=1), Keep(last=2, every_steps=3), Keep(last=3))
BUDGETS = (0, "24KiB", "64KiB", "1MiB")
"""Nothing, two slots, some, and more than is ever used."""


@dataclass
class Entry:
    """What the model knows of one save. Its value is its key, and grows with every save."""

    step: int
    is_counted: bool
    """Saved with persist=True."""
    is_pinned: bool | None = False
    """None: a crash came in between, and the next listing says."""
    is_sure: bool = False
    """It must be listed and restorable; else it may be: a crash came in between."""
    is_on_root: bool = False
    was_sure: bool = False
    """Whatever is left of it: nobody commits it again."""


class DyingOps(WatchedOps):
    """Lets some more operations that change storage happen, and then none, as if the process were gone."""

    def __init__(self) -> None:
        super().__init__(self._spend)
        self._left: int | None = None
        self._counting = threading.Lock()
        self.arm()

    def die_after(self, number: int) -> None:
        with self._counting:
            self._left = number

    def _spend(self, name: str, _at: int) -> None:
        with self._counting:
            if self._left is None or name.startswith("point:"):
                return
            if self._left == 0:
                raise OSError(errno.EIO, "the process is gone")
            self._left -= 1

    def store(self, slot: memoryview, offset: int, data: bytes) -> None:
        """Memory never fails: what the dead would have written is just not there."""
        with contextlib.suppress(OSError):
            super().store(slot, offset, data)


class StoreModel(RuleBasedStateMachine):
    """One process, which crashes and comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="shardstore-test-", dir="/dev/shm"))
        (self.folder / "memory").mkdir()
        self.entries: dict[int, Entry] = {}
        self.last = 0
        self.store: SnapshotStore | None = None

    @initialize(keep=st.sampled_from(KEEPS), budget=st.sampled_from(BUDGETS))
    def begin(self, keep: Keep | None, budget: int | str) -> None:
        self.keep, self.budget = keep, budget
        self.open()

    def open(self) -> None:
        self.ops = DyingOps()
        with use_ops(self.ops):
            self.store = SnapshotStore(
                self.folder / "root",
                memory=self.budget,
                memory_dir=self.folder / "memory",
                keep=self.keep,
                timeout_s=8.0,
            )

    def teardown(self) -> None:
        if self.store is not None:
            self.store.take_leave("the test ends")
        shutil.rmtree(self.folder)

    # ------------------------------------------------------------------- helpers

    @property
    def opened(self) -> SnapshotStore:
        assert self.store is not None
        return self.store

    def catalog(self, ops: FileOps | None = None) -> Catalog:
        return Catalog(DiskTier(str(self.folder / "root"), name="root", ops=ops or FileOps()))

    def state(self, value: int) -> dict[str, Any]:
        return {
            "w": torch.full((_NUM_ELEMENTS,), float(value)),
            "position": {"value": value, "list": [value, [value]]},
        }

    def at(self, step: int) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.step == step]

    def released(self, candidates: set[int]) -> set[int]:
        """What the policy lets go of these values, said of one after the other."""
        if self.keep is None:
            return set()
        gone = set()
        for value in candidates:
            entry = self.entries[value]
            newer = [v for v in candidates if v > value]
            same = [v for v in newer if self.entries[v].step == entry.step]
            every = self.keep.every_steps
            is_multiple = every is not None and entry.step % every == 0 and not same
            if len(newer) >= self.keep.last and not is_multiple and not entry.is_pinned:
                gone.add(value)
        return gone

    def counted(self, listed: dict[int, SnapshotInfo]) -> set[int]:
        """What retention counts: committed on the root, and not saved with persist=False."""
        return {
            v for v, info in listed.items() if "root" in info.tiers and self.entries[v].is_counted
        }

    def listed(self) -> dict[int, SnapshotInfo]:
        found = self.opened.snapshots()
        values = [info.metadata["value"] for info in found if isinstance(info.metadata, dict)]
        assert values == sorted(values), "oldest first, each once"
        return dict(zip(values, found, strict=True))

    def look(self) -> dict[int, SnapshotInfo]:
        """Compare the listing with the model; what was in doubt is known then."""
        listed = self.listed()
        sure = {value for value, entry in self.entries.items() if entry.is_sure}
        assert sure <= listed.keys() <= self.entries.keys(), (sure, listed.keys(), self.entries)
        for value, info in listed.items():
            entry = self.entries[value]
            assert info.step == entry.step
            if entry.is_sure and entry.is_pinned is not None:
                assert info.pinned == entry.is_pinned, (value, info)
            entry.is_pinned = info.pinned
            assert "root" in info.tiers or not (entry.is_sure and entry.is_on_root)
            entry.is_on_root = "root" in info.tiers
            # What was cut between memory and the root stays as long as nothing newer is committed.
            entry.is_sure = entry.is_on_root or not entry.is_counted or info.pinned
            entry.was_sure |= entry.is_sure
        return listed

    # -------------------------------------------------------------------- rules

    def save_now(self, step: int, *, persist: bool) -> None:
        self.last += 1
        value = self.last
        entry = self.entries[value] = Entry(step, persist)
        before = self.listed()
        live = self.state(value)
        info = self.opened.save(live, step=step, metadata={"value": value}, persist=persist)
        live["w"].fill_(-1.0)
        assert info.wait() is not None
        self.opened.drain()
        entry.is_sure = entry.was_sure = True
        after = self.listed()
        if persist:
            # What an earlier run left whole may have been committed first, and counts then.
            candidates = self.counted(before) | self.counted(after)
            for gone in self.released(candidates):
                del self.entries[gone]
        for late in [v for v, e in self.entries.items() if not e.is_sure and v not in after]:
            del self.entries[late]  # older than the newest committed: nobody commits it any more

    @rule(step=st.integers(0, 7), persist=st.sampled_from([True, True, False]))
    def save(self, step: int, persist: bool) -> None:
        self.save_now(step, persist=persist or self.budget == 0)

    @rule(step=st.integers(0, 7), number=st.integers(2, 5))
    @precondition(lambda self: self.budget != 0)
    def fill_memory(self, step: int, number: int) -> None:
        """Memory-only snapshots until some have to leave memory."""
        for _ in range(number):
            self.save_now(step, persist=False)

    @rule(step=st.none() | st.integers(0, 7))
    def restore(self, step: int | None) -> None:
        live = self.state(-1)
        report = self.opened.restore(live, step=step, required=False)
        wanted = {v: e for v, e in self.entries.items() if step in (None, e.step)}
        sure = [v for v, e in wanted.items() if e.is_sure]
        if report is None:
            assert not sure
            assert live["position"]["value"] == -1
            return
        value = live["position"]["value"]
        assert torch.equal(live["w"], torch.full((_NUM_ELEMENTS,), float(value))), "no mixture"
        assert live["position"] == {"value": value, "list": [value, [value]]}
        assert value in wanted
        assert value >= max(sure, default=0), "the newest there is"
        assert report.step == wanted[value].step

    @rule(step=st.integers(0, 7))
    def delete(self, step: int) -> None:
        self.on_step(step, self.opened.delete)
        for value in [v for v, e in self.entries.items() if e.step == step]:
            del self.entries[value]

    @rule(step=st.integers(0, 7))
    def pin(self, step: int) -> None:
        self.on_step(step, self.opened.pin)
        for value in self.listed():
            entry = self.entries[value]
            if entry.step == step:
                entry.is_pinned = entry.is_sure = entry.was_sure = True

    @rule(step=st.integers(0, 7))
    def unpin(self, step: int) -> None:
        self.on_step(step, self.opened.unpin)
        for entry in self.at(step):
            entry.is_pinned = False

    def on_step(self, step: int, call: Callable[[int], None]) -> None:
        if any(entry.is_sure for entry in self.at(step)):
            call(step)
        else:
            with contextlib.suppress(SnapshotNotFoundError):
                call(step)

    @rule(keep=st.sampled_from(KEEPS[1:]))
    def prune(self, keep: Keep) -> None:
        """What the operator does, while the job runs."""
        before = self.listed()
        with self.policy(keep):
            expected = self.released(self.counted(before))
        pruned = prune(self.catalog(), keep, writer=_WRITER, dry_run=False)
        assert [p.problem for p in pruned] == [""] * len(pruned)
        steps = sorted(self.entries[value].step for value in expected)
        assert sorted(p.id.step for p in pruned) == steps
        for value in expected:
            if "memory" in before[value].tiers:
                self.entries[value].is_sure = False  # until its memory serves another one
            else:
                del self.entries[value]

    @contextlib.contextmanager
    def policy(self, keep: Keep) -> Iterator[None]:
        own, self.keep = self.keep, keep
        try:
            yield
        finally:
            self.keep = own

    @rule()
    def gc(self) -> None:
        catalog = self.catalog()
        for orphan in find_orphans(catalog, memory_dirs=[str(self.folder / "memory")]):
            if orphan.may_go:
                assert remove_orphan(catalog, orphan, writer=_WRITER) == ""

    @rule()
    def leave_and_return(self) -> None:
        self.opened.close(keep_memory=True)
        self.open()

    @rule()
    def close_and_return(self) -> None:
        """Memory is freed: what was in memory alone is gone."""
        listed = self.listed()
        self.opened.close()
        for value, entry in list(self.entries.items()):
            if value in listed and "root" not in listed[value].tiers:
                entry.is_sure = entry.is_pinned = False
                if not entry.is_counted:
                    del self.entries[value]  # nothing of it is anywhere else
        self.open()

    @rule(
        after=st.integers(0, 40),
        step=st.integers(0, 7),
        act=st.sampled_from(["save", "save", "keep", "delete", "pin", "unpin", "prune", "gc"]),
    )
    def crash(self, after: int, step: int, act: str) -> None:
        """The process ends at some operation of a call, and comes back."""
        listed = self.look()
        self.ops.die_after(after)
        with contextlib.suppress(ShardStoreError, OSError):
            self.act(act, step, listed)
        self.opened.take_leave("it crashed")
        self.open()
        found = self.look()
        for value, entry in list(self.entries.items()):
            if value not in found and entry.was_sure:
                del self.entries[value]  # what was being deleted is gone

    def act(self, act: str, step: int, listed: dict[int, SnapshotInfo]) -> None:
        """Begin something, after telling the model what may become of it."""
        catalog = self.catalog(self.ops)
        if act in ("save", "keep"):
            persist = act == "save" or self.budget == 0
            self.last += 1
            self.entries[self.last] = Entry(step, persist)
            # Late publishing may come first: each way of counting is possible.
            hidden = [v for v, e in self.entries.items() if not e.is_sure]
            for more in range(len(hidden) + 1):
                self.doubt(self.released(self.counted(listed) | {*hidden[more:], self.last}))
            live, metadata = self.state(self.last), {"value": self.last}
            self.opened.save(live, step=step, metadata=metadata, persist=persist).wait()
        elif act == "delete":
            self.doubt({v for v, e in self.entries.items() if e.step == step})
            self.opened.delete(step)
        elif act in ("pin", "unpin"):
            for entry in self.at(step):
                entry.is_pinned = None
            (self.opened.pin if act == "pin" else self.opened.unpin)(step)
        elif act == "prune":
            keep = Keep(last=2, every_steps=3)
            with self.policy(keep):
                self.doubt(self.released(self.counted(listed)))
            prune(catalog, keep, writer=_WRITER, dry_run=False)
        else:
            for orphan in find_orphans(catalog, memory_dirs=[str(self.folder / "memory")]):
                if orphan.may_go:
                    remove_orphan(catalog, orphan, writer=_WRITER)

    def doubt(self, values: set[int]) -> None:
        """These may or may not be there afterwards."""
        for value in values:
            self.entries[value].is_sure = False

    # ---------------------------------------------------------------- invariants

    @invariant()
    @precondition(lambda self: self.store is not None)
    def the_listing_is_that_of_the_model(self) -> None:
        self.look()


StoreModel.TestCase.settings = hypothesis.settings(
    max_examples=600 if _IS_NIGHTLY else 40,
    stateful_step_count=60 if _IS_NIGHTLY else 25,
    deadline=None,
    suppress_health_check=[*hypothesis.HealthCheck],
)
TestStoreModel = pytest.mark.timeout(3600 if _IS_NIGHTLY else 120)(StoreModel.TestCase)
