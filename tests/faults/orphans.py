"""Roots with leftovers on them, made by real stores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardstore.engine.catalog import Catalog
from shardstore.format.records import SnapshotId
from shardstore.tiers.disk import DiskTier
from shardstore.tiers.fileops import FileOps
from tests.faults.breaking_ops import WatchedOps
from tests.faults.scenario import open_store

WRITER = {"shardstore": "test"}


class CrashError(BaseException):
    """The process ends here."""


def crash_from(number: int) -> Callable[[str, int], None]:
    """No operation happens from `number` on, as if the process were gone."""

    def act(_name: str, at: int) -> None:
        if at >= number:
            raise CrashError

    return act


def catalog_of(folder: str | Path, ops: FileOps | None = None) -> Catalog:
    """The catalog of `<folder>/root`."""
    return Catalog(DiskTier(str(Path(folder, "root")), name="root", ops=ops or FileOps()))


def crashing(folder: str | Path, number: int) -> tuple[Catalog, WatchedOps]:
    """A catalog whose process ends at operation `number`."""
    ops = WatchedOps(crash_from(number))
    ops.arm()
    return catalog_of(folder, ops), ops


def state(value: float) -> dict[str, torch.Tensor]:
    """A state that says which step it is."""
    return {"w": torch.full((4,), float(value))}


def save_steps(folder: str, *steps: int, **options: Any) -> list[SnapshotId]:
    """One run that saves these steps and ends; the ids of its snapshots."""
    options.setdefault("memory", 0)
    with open_store(folder, **options) as store:
        saved = [store.save(state(step), step=step).wait() for step in steps]
    ids = [SnapshotId.parse(info.id) for info in saved if info is not None]
    return [i for i in ids if i is not None]


def tear(folder: str | Path, snapshot_id: SnapshotId, *, whole: bool) -> Path:
    """Make a committed snapshot a torn attempt, as if its run had died before it published."""
    path = Path(folder, "root", snapshot_id.name)
    (path / "manifest.json").unlink()
    if not whole:
        shard = path / "rank-00000.safetensors"
        shard.rename(shard.with_suffix(".safetensors.tmp"))
    return path


def edit_record(folder: str | Path, run: int, **changes: Any) -> None:
    """Change what a run's record says."""
    path = Path(folder, "root", f"run-{run:08x}.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
