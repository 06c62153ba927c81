"""Hostile snapshots are refused with a typed error: no code run, no large allocation, no waiting."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from shardstore import ShardStoreError, SnapshotStore, list_snapshots
from tests.cases.bits import bits, soil
from tests.faults.hostile import HOSTILE, MARKER, save_two, state

_GROWTH_BYTES = 64 << 20
_GROWTH_OF_100_MB = 256 << 20
"""Where it begins as ours, it is read once and its digest taken."""
_PATIENCE_S = 20.0


def _reset_peak() -> int:
    """Resident bytes now; the kernel forgets the peak."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(name))
    return int(line.split()[1]) << 10


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_two(folder)
    return folder


def _values(live: dict[str, Any]) -> int:
    found = {*live["w"].reshape(-1).tolist(), float(live["progress"]["epoch"])}
    assert len(found) == 1, f"a mixture of {found}"
    return int(found.pop())


@pytest.mark.parametrize("kind", HOSTILE)
def test_it_is_refused_and_the_older_snapshot_is_found(
    saved: Path, tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    root = folder / "root"
    newest = next(root.glob("step-000000000002.*"))
    HOSTILE[kind](newest)
    started, before = time.monotonic(), _reset_peak()

    listed = [info.step for info in list_snapshots(root)]
    assert listed[0] == 1
    with SnapshotStore(root, memory=0, timeout_s=_PATIENCE_S) as store:
        live = state()
        soil(live)
        soiled = bits(live)
        with pytest.raises(ShardStoreError) as refused:
            store.restore(live, step=2, fallback=False)
        assert bits(live) == soiled
        assert len(str(refused.value)) < 300_000
        assert store.restore(live).step == 1
        assert _values(live) == 1
        live["w"].fill_(3)
        live["progress"]["epoch"] = 3
        store.save(live, step=3).wait(_PATIENCE_S)
        soil(live)
        assert store.restore(live).step == 3
        assert _values(live) == 3

    allowed = _GROWTH_OF_100_MB if "100 MB" in kind else _GROWTH_BYTES
    assert _status("VmHWM") - before < allowed
    assert time.monotonic() - started < _PATIENCE_S
    assert not (folder / MARKER).exists()
    assert not os.path.exists("/tmp/" + MARKER)


NEAR = [kind for kind in HOSTILE if kind.startswith("shard: ") and "link" not in kind]


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_in_a_near_tier_it_gives_way_to_the_root(folder: str, disk_folder: Path, tier: str) -> None:
    """Every kind of hostile shard, as a dead run's file in memory or on the disk."""
    here = Path(folder)
    near: dict[str, Any] = {"memory": "1MiB", "memory_dir": here / "memory", "name": "job"}
    (here / "memory").mkdir()
    if tier == "disk":
        near["disk"] = disk_folder
    with SnapshotStore(here / "root", timeout_s=_PATIENCE_S, **near) as store:
        live = state()
        store.save(live, step=1).wait(_PATIENCE_S)
        store.drain()
        store.close(keep_memory=True)
    place = here / "memory" if tier == "memory" else disk_folder
    (name,) = [path.parent.relative_to(place) for path in place.rglob("rank-00000.safetensors")]
    original = (place / name / "rank-00000.safetensors").read_bytes()
    if tier == "disk":
        shutil.rmtree(here / "memory")
        (here / "memory").mkdir()
    for kind in NEAR:
        shard = place / name / "rank-00000.safetensors"
        if shard.is_dir():
            shard.rmdir()
        shard.unlink(missing_ok=True)
        shard.parent.mkdir(parents=True, exist_ok=True)
        shard.write_bytes(original)
        HOSTILE[kind](shard.parent)
        before = _reset_peak()
        store = SnapshotStore(here / "root", timeout_s=_PATIENCE_S, **near)
        live = state()
        soil(live)
        report = store.restore(live)
        assert (report.step, report.tier) == (1, "root (1 rank)"), kind
        assert bits(live) == bits(state()), kind
        store.take_leave("the next kind")
        assert _status("VmHWM") - before < _GROWTH_OF_100_MB, kind
    assert not (here / MARKER).exists()
