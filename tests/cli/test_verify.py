"""`shardstore verify`: whatever byte is wrong, the exit code is 1 and the place is named."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from shardstore.engine.audit import audit_snapshot
from shardstore.engine.catalog import Catalog
from shardstore.format.records import SnapshotId
from shardstore.format.shardfile import encode_header
from shardstore.tiers.disk import DiskTier
from shardstore.tiers.fileops import FileOps
from tests.cli.conftest import Roots, flip_byte, run, run_json, snapshot

Copy = Callable[[Path], Path]


def test_whole_root_is_verified_and_counted(roots: Roots) -> None:
    document = run_json("verify", roots.two)
    assert set(document) == {"command", "root", "ok", "snapshots", "not_committed", "seconds"}
    assert document["ok"] is True
    first, _ = document["snapshots"]
    assert set(first) == {
        "step", "id", "ok", "deleted_meanwhile", "num_files", "num_tensors", "nbytes", "findings",
    }  # fmt: skip
    assert first["num_files"] == 3
    assert first["nbytes"] == sum(
        file.stat().st_size for file in snapshot(roots.two, 10).glob("rank-*")
    )
    text = run("verify", roots.two).stdout
    assert text.count("ok    step") == 2
    assert "all as they were written" in text


def test_damaged_tensor_is_named_with_rank_and_file(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.two)
    flip_byte(snapshot(root, 20) / "rank-00001.safetensors", -10)
    document = run_json("verify", root, code=1)
    assert document["ok"] is False
    good, bad = document["snapshots"]
    assert good["ok"] is True
    (finding,) = bad["findings"]
    assert finding["rank"] == 1
    assert finding["file"] == "rank-00001.safetensors"
    assert finding["tensor"] == "rng.torch"
    text = run("verify", root, code=1).stdout
    assert "rank 1, rank-00001.safetensors, tensor rng.torch: its bytes have digest" in text
    assert "1 of them damaged" in text


def test_every_damaged_tensor_is_listed(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.one)
    file = snapshot(root, 300) / "rank-00000.safetensors"
    flip_byte(file, -1)
    flip_byte(file, -5057)
    findings = run_json("verify", root, code=1)["snapshots"][2]["findings"]
    assert [f["tensor"] for f in findings] == ["rng.numpy.1", "rng.torch"]


@pytest.mark.parametrize("seed", range(3))
def test_any_flipped_byte_of_any_file_is_found(roots: Roots, copy_of: Copy, seed: int) -> None:
    root = copy_of(roots.two)
    rng = random.Random(seed)
    files = sorted(snapshot(root, 20).iterdir())
    for file in files:
        for _ in range(6):
            position = rng.randrange(file.stat().st_size)
            flip_byte(file, position)
            document = run_json("verify", root, "--step", "20", code=1)
            (bad,) = document["snapshots"]
            assert bad["findings"][0]["file"] == file.name, position
            flip_byte(file, position)
    run("verify", root)


@pytest.mark.parametrize("change", ["cut", "long", "gone", "other rank", "other step"])
def test_file_that_is_not_the_listed_one_is_found(roots: Roots, copy_of: Copy, change: str) -> None:
    root = copy_of(roots.two)
    file = snapshot(root, 20) / "rank-00001.safetensors"
    if change == "cut":
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size - 1)
    elif change == "long":
        with file.open("ab") as opened:
            opened.write(b"x")
    elif change == "gone":
        file.unlink()
    elif change == "other rank":
        shutil.copy(file.parent / "rank-00000.safetensors", file)
    else:
        shutil.copy(snapshot(root, 10) / file.name, file)
    (bad,) = run_json("verify", root, "--step", "20", code=1)["snapshots"]
    (finding,) = bad["findings"]
    assert (finding["rank"], finding["file"]) == (1, file.name)
    if change == "gone":
        assert finding["problem"] == "the file is missing"


def test_sound_file_of_the_same_name_that_the_manifest_does_not_list_is_found(
    roots: Roots, copy_of: Copy
) -> None:
    root = copy_of(roots.two)
    file = snapshot(root, 20) / "rank-00001.safetensors"
    snapshot_id = SnapshotId.parse(file.parent.name)
    assert snapshot_id is not None
    sealed = Catalog(DiskTier(str(root), name="root", ops=FileOps())).read_header(snapshot_id, 1)
    assert sealed.layout is not None
    header = msgspec.structs.replace(sealed.header, metadata={"forged": True})
    data = file.read_bytes()
    file.write_bytes(encode_header(header, sealed.layout) + data[sealed.layout.data_start :])
    (bad,) = run_json("verify", root, "--step", "20", code=1)["snapshots"]
    (finding,) = bad["findings"]
    assert "is not the file that the manifest lists: header digest" in finding["problem"]


def test_damaged_manifest_is_a_finding(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.one)
    (snapshot(root, 200) / "manifest.json").write_bytes(b"")
    findings = run_json("verify", root, code=1)["snapshots"][1]["findings"]
    assert findings[0]["file"] == "manifest.json"
    assert findings[0]["rank"] is None


def test_torn_attempt_is_passed_over_unless_it_was_asked_for(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.two)
    (snapshot(root, 20) / "manifest.json").unlink()
    result = run("verify", root)
    assert "1 attempt was never committed" in result.stderr
    result = run("verify", root, "--step", "20", code=1)
    assert "is torn, not a snapshot" in result.stderr


def test_newest_or_one_by_id_or_path_is_verified_alone(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.one)
    flip_byte(snapshot(root, 100) / "rank-00000.safetensors", -1)
    assert [s["step"] for s in run_json("verify", root, "--step", "newest")["snapshots"]] == [300]
    name = snapshot(root, 200).name
    assert [s["id"] for s in run_json("verify", root, "--id", name)["snapshots"]] == [name]
    assert not run_json("verify", snapshot(root, 100), code=1)["ok"]


def test_mark_is_left_on_request_and_only_beside_what_is_damaged(
    roots: Roots, copy_of: Copy
) -> None:
    root = copy_of(roots.one)
    flip_byte(snapshot(root, 200) / "rank-00000.safetensors", -1)
    before = sorted(path.relative_to(root) for path in root.rglob("*"))
    run("verify", root, code=1)
    assert sorted(path.relative_to(root) for path in root.rglob("*")) == before
    run("verify", root, "--mark", code=1)
    assert [path.parent for path in root.rglob("damaged")] == [snapshot(root, 200)]


def test_missing_file_leaves_no_mark_since_it_may_come_back(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.one)
    (snapshot(root, 200) / "rank-00000.safetensors").unlink()
    run("verify", root, "--mark", code=1)
    assert not list(root.rglob("damaged"))


def test_snapshot_that_is_deleted_while_it_is_read_is_no_damage(
    roots: Roots, copy_of: Copy
) -> None:
    root = copy_of(roots.two)
    snapshot_id = SnapshotId.parse(snapshot(root, 20).name)
    assert snapshot_id is not None

    class Deleting(FileOps):
        """Another process deletes it as soon as its first file is opened."""

        def open_existing(self, path: str, *, writable: bool = False) -> int:
            if path.endswith("rank-00000.safetensors"):
                shutil.rmtree(snapshot(root, 20), ignore_errors=True)
            return super().open_existing(path, writable=writable)

    catalog = Catalog(DiskTier(str(root), name="root", ops=Deleting()))
    audit = audit_snapshot(catalog, snapshot_id, progress=lambda _: None)
    assert audit.findings
    assert audit.is_gone


def test_progress_counts_every_byte_once_whatever_is_wrong(roots: Roots, copy_of: Copy) -> None:
    root = copy_of(roots.two)
    flip_byte(snapshot(root, 20) / "rank-00001.safetensors", 20)  # the header
    snapshot_id = SnapshotId.parse(snapshot(root, 20).name)
    assert snapshot_id is not None
    seen: list[int] = []
    catalog = Catalog(DiskTier(str(root), name="root", ops=FileOps()))
    audit = audit_snapshot(catalog, snapshot_id, progress=seen.append)
    assert len(audit.findings) == 1
    assert sum(seen) == sum(f.stat().st_size for f in snapshot(root, 20).glob("rank-*"))
