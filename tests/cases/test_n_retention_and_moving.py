"""Real bug reports on retention, clocks, code in stored files and moved folders (C112 to C118)."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardstore import SaveFailedError, SnapshotStore, list_snapshots
from shardstore.format.digests import table_digest
from shardstore.format.manifest import decode_manifest
from shardstore.tiers.fileops import use_ops
from tests.cases.bits import Outcomes, assert_refused, bits, refusal, soil
from tests.faults.breaking_ops import WatchedOps, raise_at
from tests.faults.scenario import Job, open_store
from tests.unit.format.builders import forge, forge_manifest


def _keep_one(rank: int, folder: str) -> dict[str, Any]:
    ops = WatchedOps(raise_at("write_at", OSError(errno.EIO, "broken")) if rank == 1 else None)
    with use_ops(ops):
        store = open_store(folder, memory=0, keep=1)
    job = Job(rank)
    job.fill(1)
    store.save(job.state, step=1).wait(20)
    old = bits(job.state)
    store.drain()
    ops.arm()
    job.fill(2)
    failed = refusal(lambda: store.save(job.state, step=2).wait(20), job.state)
    with pytest.raises(SaveFailedError):
        store.drain()
    soil(job.state)
    step = store.restore(job.state).step
    old_ok = bits(job.state) == old
    job.fill(2)
    store.save(job.state, step=2).wait(20)
    store.close()
    torch.distributed.barrier()
    left = sorted(path.name[:17] for path in Path(folder, "root").glob("*step-*"))
    return {"failed": failed, "step": step, "old_ok": old_ok, "left": left}


def _moved(rank: int, folder: str) -> dict[str, Any]:
    a, b = Path(folder, "a"), Path(folder, "other parent", "b of a")
    job = Job(rank)
    job.fill(1)
    saved = bits(job.state)
    with open_store(folder, root="a") as store:
        store.save(job.state, step=1).wait(20)
    torch.distributed.barrier()
    if rank == 0:
        b.parent.mkdir()
        a.rename(b)
    torch.distributed.barrier()
    soil(job.state)
    with open_store(folder, root="other parent/b of a") as store:
        store.restore(job.state)
        equal = bits(job.state) == saved
        store.save(job.state, step=2).wait(20)
    text = "".join(path.read_text() for path in b.glob("step-*/manifest.json"))
    listed = [info.step for info in list_snapshots(b)]
    return {"equal": equal, "listed": listed, "gone": not a.exists(), "no path": folder not in text}


@pytest.fixture(scope="module")
def outcomes(shared_folder: str) -> Outcomes:
    return Outcomes(2, shared_folder, _keep_one, _moved)


def test_keep_1_never_deletes_the_only_good_one_before_its_successor(outcomes: Outcomes) -> None:
    """C112."""
    results = outcomes.of(_keep_one)
    assert_refused([r["failed"] for r in results], "rank 1", "EIO", kind="SaveFailedError")
    for result in results:
        assert result["step"] == 1
        assert result["old_ok"]
        assert result["left"] == ["step-000000000002"]


def test_a_moved_folder_restores_and_its_old_place_stays_gone(outcomes: Outcomes) -> None:
    """C118."""
    expected = {"equal": True, "listed": [1, 2], "gone": True, "no path": True}
    assert outcomes.of(_moved) == [expected] * 2


@pytest.mark.parametrize("times", ["backwards", "equal", "in 2038"])
def test_retention_does_not_go_by_file_times_or_the_clock(
    folder: str, monkeypatch: pytest.MonkeyPatch, times: str
) -> None:
    """C113."""
    now = time.time()
    store = open_store(folder, keep=2, memory=0)
    for step in (1, 2, 3):
        monkeypatch.setattr(time, "time", lambda step=step: now - 3600 * step)
        store.save({"w": torch.full((1,), float(step))}, step=step).wait()
        store.drain()
        stamp = {"backwards": now - 86400 * step, "equal": now, "in 2038": 2**31 - step}[times]
        for path in Path(folder, "root").rglob("*"):
            os.utime(path, (stamp, stamp))
    assert [info.step for info in store.snapshots()] == [2, 3]
    live = {"w": torch.zeros(1)}
    assert store.restore(live).step == 3
    assert live["w"].item() == 3
    store.close()
    assert len(list(Path(folder, "root").glob("step-*"))) == 2


def test_retention_does_not_go_by_text_and_leaves_foreign_names_alone(folder: str) -> None:
    """C114."""
    root = Path(folder, "root")
    (root / "step_abc").mkdir(parents=True)
    (root / "step_abc" / "file").write_text("the user's own")
    (root / "step-7").mkdir()
    (root / "notes.txt").write_text("the user's own")
    for steps in ((9000, 9900, 10000), (0, 1, 10, 2)):
        with open_store(folder, keep=2) as store:
            for step in steps:
                store.save({"w": torch.full((1,), float(step))}, step=step).wait()
            store.drain()
            assert [info.step for info in store.snapshots()] == list(steps[-2:])
    assert (root / "step_abc" / "file").read_text() == "the user's own"
    assert (root / "step-7").is_dir()
    assert (root / "notes.txt").exists()


_STATE: dict[str, Any] = {"w": torch.arange(6.0), "rng": torch.ones(2), "progress": {"epoch": 3}}


def test_a_pickle_in_place_of_any_file_is_never_run(folder: str) -> None:
    """C116."""
    marker = Path(folder) / "marker"
    bomb = b"cposix\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    store = open_store(folder, name="job")
    store.save(_STATE, step=1).wait()
    store.close(keep_memory=True)
    parts = ("root", "memory")
    files = [p for part in parts for p in Path(folder, part).rglob("*") if p.is_file()]
    assert len(files) >= 4
    for number, path in enumerate(files):
        copy = Path(folder) / f"copy-{number}"
        shutil.copytree(Path(folder) / "root", copy / "root")
        if path.is_relative_to(Path(folder, "memory")):
            shutil.copytree(Path(folder) / "memory", copy / "memory")
        (copy / path.relative_to(folder)).write_bytes(bomb)
        live = {"w": torch.zeros(6), "rng": torch.zeros(2), "progress": {"epoch": 0}}
        broken = open_store(str(copy), name="job")
        decisive = path.suffix == ".safetensors" or path.name == "manifest.json"
        if decisive and "root" in path.relative_to(folder).parts:
            found = refusal(lambda live=live, broken=broken: broken.restore(live), live)  # type: ignore[misc]
            assert_refused([found], path.name)
        else:  # the other tier's copy is whole
            broken.restore(live)
            assert bits(live) == bits(_STATE)
        broken.close()
    assert not marker.exists()


def test_the_package_unpickles_nothing_and_refuses_what_would_need_it(folder: str) -> None:
    """C116."""
    package = Path(__file__).parents[2] / "shardstore"
    for source in package.rglob("*.py"):
        text = source.read_text()
        for banned in ("import pickle", "pickle.load", "torch.load(", "torch.save(", "marshal"):
            assert banned not in text, f"{banned} in {source.name}"

    class Thing:
        pass

    with open_store(folder) as store:
        found = refusal(lambda: store.save({"deep": {"thing": Thing()}}, step=1))
        assert_refused([found], "deep.thing", "Thing", kind="UnsupportedStateError")
        assert store.snapshots() == []


def _manifest(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_bytes(forge_manifest(path.read_bytes(), edit))

    return act


def _header(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        path = folder / "rank-00000.safetensors"
        path.write_bytes(forge(path.read_bytes(), lambda _, record: edit(record)))

    return act


def _huge_table(manifest: dict[str, Any]) -> None:
    """Tables are stored under their digests: give the forged one its own."""
    (old,) = manifest["tables"]
    rows = manifest["tables"].pop(old)
    rows[0]["shape"] = [10**12]
    probe = {**manifest, "tables": {"0" * 32: rows}}
    digest = _digest_of_rows(probe)
    manifest["tables"][digest] = rows
    manifest["shards"][0]["table"] = digest


def _digest_of_rows(manifest: dict[str, Any]) -> str:
    import msgspec

    from shardstore.format.records import TensorRow

    (rows,) = manifest["tables"].values()
    return table_digest(tuple(msgspec.convert(row, TensorRow) for row in rows))


def _link_out(folder: Path) -> None:
    shard = folder / "rank-00000.safetensors"
    outside = folder.parent.parent / "outside.safetensors"
    shard.rename(outside)
    shard.symlink_to(outside)


HOSTILE: dict[str, Callable[[Path], None]] = {
    "an absolute path": _manifest(lambda m: m["shards"][0].update(file="/etc/passwd")),
    "a path to another folder": _manifest(lambda m: m["shards"][0].update(file="../other/rank0")),
    "a link out of the folder": _link_out,
    "an entry twice": _manifest(lambda m: m["shards"].append(m["shards"][0])),
    "a huge shape in the manifest": _manifest(_huge_table),
    "a huge shape in the header": _header(lambda h: h["table"][0].update(shape=[10**12])),
    "negative offsets": _header(lambda h: h["pieces"][0].__setitem__(1, [-3])),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_a_forged_index_points_at_is_refused(folder: str, kind: str) -> None:
    """C117."""
    store = open_store(folder, memory=0)
    store.save(_STATE, step=1).wait()
    store.close()
    snapshot = next(Path(folder, "root").glob("step-*"))
    manifest = (snapshot / "manifest.json").read_bytes()
    assert decode_manifest(manifest, source="", expect=None).world_size == 1
    HOSTILE[kind](snapshot)
    live = {"w": torch.full((6,), -1.0), "rng": torch.full((2,), -1.0), "progress": {"epoch": 0}}
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    store = SnapshotStore(Path(folder, "root"), memory=0, timeout_s=10)
    found = refusal(lambda: store.restore(live), live)
    store.close()
    assert_refused([found])
    assert live["progress"] == {"epoch": 0}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 << 10
