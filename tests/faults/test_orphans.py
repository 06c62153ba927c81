"""What dead runs leave on a root: found, judged, and removed; nothing else is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shardstore import list_snapshots
from shardstore.engine.orphans import Orphan, find_orphans, remove_orphan
from shardstore.format.records import SnapshotId
from tests.faults.breaking_ops import WatchedOps, raise_at
from tests.faults.orphans import (
    WRITER,
    CrashError,
    catalog_of,
    crashing,
    edit_record,
    save_steps,
    state,
    tear,
)
from tests.faults.scenario import open_store


def _find(folder: str, *, including_unknown: bool = False) -> list[Orphan]:
    return find_orphans(
        catalog_of(folder),
        memory_dirs=[str(Path(folder, "memory"))],
        including_unknown=including_unknown,
    )


def _clear(folder: str) -> list[str]:
    """What `gc` does; returns the problems."""
    catalog = catalog_of(folder)
    return [
        problem
        for orphan in _find(folder)
        if orphan.may_go and (problem := remove_orphan(catalog, orphan, writer=WRITER))
    ]


def _listed(folder: str) -> list[int]:
    return [info.step for info in list_snapshots(Path(folder, "root"))]


def test_a_torn_attempt_of_a_dead_run_goes_and_everything_else_stays(folder: str) -> None:
    _, second, _ = save_steps(folder, 1, 2, 3)
    path = tear(folder, second, whole=False)
    foreign = Path(folder, "root", "step_abc")
    foreign.mkdir()
    (foreign / "rank-00000.safetensors.tmp").write_text("the user's own")
    (Path(folder, "root") / ".notes.tmp").write_text("the user's own")
    os.symlink(foreign, Path(folder, "root", SnapshotId(9, 1, 9, "00000001").name))
    before = {p for p in Path(folder, "root").rglob("*") if not p.is_relative_to(path)}
    (orphan,) = _find(folder)
    assert (orphan.kind, orphan.id, orphan.run, orphan.path) == ("torn", second, 1, second.name)
    assert orphan.nbytes == (path / "rank-00000.safetensors.tmp").stat().st_size
    assert (orphan.liveness, orphan.may_go) == ("dead", True)
    assert _clear(folder) == []
    assert not path.exists()
    assert {*Path(folder, "root").rglob("*")} == before
    assert _listed(folder) == [1, 3]
    assert _find(folder) == []


def test_what_the_next_start_would_commit_stays_until_something_newer_is(folder: str) -> None:
    _, second = save_steps(folder, 1, 2)
    tear(folder, second, whole=True)
    (orphan,) = _find(folder, including_unknown=True)
    assert not orphan.may_go
    assert "next start commits it" in orphan.why
    with pytest.raises(ValueError, match="must stay"):
        remove_orphan(catalog_of(folder), orphan, writer=WRITER)
    save_steps(folder, 3)
    assert _listed(folder) == [1, 2, 3]
    tear(folder, second, whole=True)
    assert [o.may_go for o in _find(folder)] == [True], "it is older than the newest committed now"
    assert _clear(folder) == []
    assert _listed(folder) == [1, 3]


def test_a_damaged_attempt_is_not_what_the_next_start_would_commit(folder: str) -> None:
    _, second = save_steps(folder, 1, 2)
    path = tear(folder, second, whole=True)
    os.truncate(path / "rank-00000.safetensors", 100)
    assert [o.may_go for o in _find(folder)] == [True]


def test_nothing_of_a_live_run_goes(folder: str) -> None:
    first, second = save_steps(folder, 1, 2)
    with open_store(folder, memory=0) as store:
        store.save(state(3), step=3).wait()
        live = catalog_of(folder).ids()[-1]
        torn = SnapshotId(4, live.run, 2, live.nonce)
        path = Path(folder, "root", torn.name)
        path.mkdir()
        (path / "rank-00000.safetensors.tmp").write_bytes(b"x" * 10)
        (Path(folder, "root", live.name) / ".manifest.json.01234567.tmp").write_bytes(b"x")
        # A deleter of any run may be at work on an older snapshot, too.
        (Path(folder, "root", first.name) / ".manifest.json.01234567.tmp").write_bytes(b"x")
        tear(folder, second, whole=False)
        found = {(o.kind, o.id): o for o in _find(folder, including_unknown=True)}
        assert {key: o.may_go for key, o in found.items()} == {
            ("torn", torn): False,
            ("temp", live): False,
            ("temp", first): False,
            ("torn", second): True,
        }
        assert str(os.getpid()) in found["torn", torn].why
    assert {key for key in found if key[0] == "torn"} == {("torn", torn), ("torn", second)}
    assert all(o.may_go for o in _find(folder)), "now that it has ended"
    assert _clear(folder) == []
    assert _listed(folder) == [1, 3]
    assert _find(folder) == []


@pytest.mark.parametrize(
    "changes", [{"boot_id": "another"}, {"pid_namespace": "pid:[1]"}, {"pid": 0}], ids=str
)
def test_runs_of_which_nothing_is_proven_go_only_when_the_caller_answers_for_them(
    folder: str, changes: dict[str, object]
) -> None:
    _, second, _ = save_steps(folder, 1, 2, 3)
    tear(folder, second, whole=False)
    edit_record(folder, 1, **changes)
    (orphan,) = _find(folder)
    assert (orphan.liveness, orphan.may_go) == ("unknown", False)
    (orphan,) = _find(folder, including_unknown=True)
    assert orphan.may_go
    assert remove_orphan(catalog_of(folder), orphan, writer=WRITER) == ""


def test_a_run_without_its_record_or_with_ranks_elsewhere_is_unknown(folder: str) -> None:
    _, second, _ = save_steps(folder, 1, 2, 3)
    tear(folder, second, whole=False)
    edit_record(folder, 1, num_other_hosts_ranks=6)
    (orphan,) = _find(folder)
    assert orphan.liveness == "unknown"
    assert "other hosts" in orphan.why
    Path(folder, "root", "run-00000001.json").write_bytes(b'{"cut')
    assert [o.liveness for o in _find(folder)] == ["unknown"]
    Path(folder, "root", "run-00000001.json").unlink()
    assert [o.liveness for o in _find(folder)] == ["unknown"]


def test_a_later_run_of_which_nothing_is_known_may_hold_an_attempt_in_memory(folder: str) -> None:
    _, second, _ = save_steps(folder, 1, 2, 3)
    tear(folder, second, whole=False)
    save_steps(folder, 4)
    edit_record(folder, 2, boot_id="another")
    (orphan,) = _find(folder)
    assert (orphan.liveness, orphan.may_go) == ("unknown", False)


@pytest.mark.parametrize("known", ["by the folder", "by the record"])
def test_an_attempt_that_memory_has_a_part_of_stays(folder: str, known: str) -> None:
    with open_store(folder) as store:
        for step in (1, 2):
            store.save(state(step), step=step).wait()
        store.drain()
        store.close(keep_memory=True)
    second = catalog_of(folder).ids()[-1]
    tear(folder, second, whole=False)
    memory_dirs = [str(Path(folder, "memory"))] if known == "by the folder" else []
    (orphan,) = find_orphans(catalog_of(folder), memory_dirs=memory_dirs, including_unknown=True)
    assert not orphan.may_go
    assert "a restart may use" in orphan.why
    with open_store(folder) as store:
        live = state(-1)
        assert store.restore(live).step == 2
        assert live["w"].tolist() == [2] * 4


def test_an_attempt_that_was_committed_meanwhile_stays(folder: str) -> None:
    _, second, _ = save_steps(folder, 1, 2, 3)
    manifest = (Path(folder, "root", second.name) / "manifest.json").read_bytes()
    path = tear(folder, second, whole=True)
    (orphan,) = _find(folder)
    assert orphan.may_go
    (path / "manifest.json").write_bytes(manifest)
    assert "committed" in remove_orphan(catalog_of(folder), orphan, writer=WRITER)
    assert _listed(folder) == [1, 2, 3]


def test_a_foreign_file_in_an_attempt_stays_and_so_does_its_folder(folder: str) -> None:
    _, second, _ = save_steps(folder, 1, 2, 3)
    path = tear(folder, second, whole=False)
    (path / "mine.txt").write_text("the user's own")
    assert _clear(folder) == []
    (left,) = Path(folder, "root").glob("deleted-*")
    assert [p.name for p in left.iterdir()] == ["mine.txt"]
    (orphan,) = _find(folder)
    assert (orphan.kind, orphan.may_go) == ("deleted", False)
    assert "mine.txt" in orphan.why
    # The same attempt again, as a late abort would make it.
    assert catalog_of(folder).abort(second, reason="late", writer=WRITER)
    assert _clear(folder) == []
    assert sorted(o.kind for o in _find(folder)) == ["deleted"]
    assert (left / "mine.txt").read_text() == "the user's own"


def test_files_that_were_being_written_go_by_themselves(folder: str) -> None:
    (first,) = save_steps(folder, 1)
    root = Path(folder, "root")
    record = (root / "run-00000001.json").read_bytes()
    (root / first.name / ".manifest.json.01234567.tmp").write_bytes(b"half")
    (root / first.name / "rank-00000.safetensors.tmp").write_bytes(b"half")
    (root / ".run-00000002.json.01234567.tmp").write_bytes(record)
    (root / ".run-00000003.json.01234567.tmp").write_bytes(record[:20])
    (root / first.name / ".manifest.json.mine.tmp").write_text("the user's own")
    found = {o.path: (o.kind, o.may_go) for o in _find(folder)}
    assert found == {
        f"{first.name}/.manifest.json.01234567.tmp": ("temp", True),
        f"{first.name}/rank-00000.safetensors.tmp": ("temp", True),
        ".run-00000002.json.01234567.tmp": ("temp", True),
        ".run-00000003.json.01234567.tmp": ("temp", False),
    }
    assert _clear(folder) == []
    names = sorted(p.name for p in root.rglob("*.tmp"))
    assert names == [".manifest.json.mine.tmp", ".run-00000003.json.01234567.tmp"]
    assert _listed(folder) == [1]


@pytest.mark.parametrize("where", ["unlink rank", "rename", "remove_folder", "link"])
def test_a_removal_that_fails_says_so_and_is_finished_by_the_next(folder: str, where: str) -> None:
    _, second, _ = save_steps(folder, 1, 2, 3)
    tear(folder, second, whole=False)
    ops = WatchedOps(raise_at(where, OSError(errno.EIO, "broken")))
    ops.arm()
    (orphan,) = _find(folder)
    assert "EIO" in remove_orphan(catalog_of(folder, ops), orphan, writer=WRITER)
    assert _listed(folder) == [1, 3]
    assert _clear(folder) == []
    assert _find(folder) == []
    assert not list(Path(folder, "root").glob("*step-000000000002*"))


def test_a_crash_anywhere_in_a_removal_lists_nothing_torn_and_the_next_one_finishes(
    folder: str,
) -> None:
    number = 0
    while True:
        number += 1
        home = str(Path(folder, str(number)))
        Path(home).mkdir()
        _, second, _ = save_steps(home, 1, 2, 3)
        tear(home, second, whole=True)
        (orphan,) = _find(home)
        catalog, ops = crashing(home, number)
        try:
            assert remove_orphan(catalog, orphan, writer=WRITER) == ""
        except CrashError:
            assert _listed(home) == [1, 3]
            assert _clear(home) == []
        assert not list(Path(home, "root").glob("*step-000000000002*"))
        assert not list(Path(home, "root").rglob("*.tmp"))
        assert _listed(home) == [1, 3]
        if len(ops.names) < number:
            break
    assert number > 8
