"""Roots of odd names: files land exactly there, or the root is refused; neighbours are left alone (C41)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardstore import SnapshotStore, list_snapshots
from tests.remote.job import s3_keys, s3_options
from tests.servers.openssh import SftpServer
from tests.servers.s3 import MotoServer

NAMES = (
    "with space", "a#b", "c?d", "per%20cent", "100%", "p+lus", "ü", "e\u0301", "[glob]*", "{a,b}", "~home", "a&b=c",
    "semi;colon", "quote'\"", "back\\slash", "exp::1", "exp::2", "run", "run2", "run/x", "run-0000002a.json", "名",
)  # fmt: skip
FEW = ("a b#c?d%20+ü[g]*", "exp::1", "exp::2", "run", "run2", "run/x")
"""The same characters, in fewer roots: each takes a client of its own."""
EITHER = pytest.mark.parametrize(
    "names", [FEW, pytest.param(NAMES, marks=pytest.mark.nightly)], ids=["few", "all"]
)
REFUSED = ("a//b", "a/../b", "./a", "a/.", "new\nline")


def _save(root: str, folder: str, step: int, options: dict[str, Any] | None, **more: Any) -> None:
    with SnapshotStore(
        root, memory="1MiB", memory_dir=folder, storage_options=options, timeout_s=20, **more
    ) as store:
        store.save({"w": torch.full((5,), float(step))}, step=step).wait(20)


def _value(root: str, folder: str, options: dict[str, Any] | None) -> float:
    live = {"w": torch.full((5,), -1.0)}
    with SnapshotStore(
        root, memory=0, memory_dir=folder, storage_options=options, timeout_s=20
    ) as store:
        store.restore(live)
    return float(live["w"][0])


def _below(names: set[str], root: str, others: tuple[str, ...] = NAMES) -> set[str]:
    """What is in a root and in no other one inside it."""
    inner = [other for other in others if other.startswith(f"{root}/")]
    mine = {name for name in names if name.startswith(f"{root}/")}
    return {name for name in mine if not any(name.startswith(f"{other}/") for other in inner)}


def _check_each(
    base: str, names: tuple[str, ...], folder: str, options: dict[str, Any] | None, found: Any
) -> None:
    """Save to each, look past the store, then with keep=1 again, and restore each."""
    for step, name in enumerate(names):
        _save(f"{base}/{name}{'/' * (step % 2)}", folder, step, options)
    before = found()
    for step, name in enumerate(names):
        steps = {key.split("/step-")[1][:12] for key in _below(before, name) if "/step-" in key}
        assert steps == {f"{step:012d}"}, (name, _below(before, name))
    assert before == {key for name in names for key in _below(before, name)}, (
        "something is elsewhere"
    )
    _save(f"{base}/{names[-3]}", folder, 900, options, keep=1)
    changed = before ^ found()
    assert changed
    assert changed <= _below(changed, names[-3]), "a neighbour changed"
    for step, name in enumerate(names):
        root = f"{base}/{name}"
        expected = 900 if name == names[-3] else step
        assert [i.step for i in list_snapshots(root, storage_options=options)] == [expected]
    for step, name in list(enumerate(names))[::4]:
        if name != names[-3]:
            assert _value(f"{base}/{name}", folder, options) == step


@EITHER
def test_on_s3(s3_server: MotoServer, folder: str, names: tuple[str, ...]) -> None:
    bucket = s3_server.fresh_bucket()
    _check_each(
        f"s3://{bucket}",
        names,
        folder,
        s3_options(s3_server),
        lambda: {*s3_keys(s3_server, bucket)},
    )


def test_a_whole_bucket_is_a_root(s3_server: MotoServer, folder: str) -> None:
    bucket, options = s3_server.fresh_bucket(), s3_options(s3_server)
    _save(f"s3://{bucket}/", folder, 1, options)
    assert {key.partition("/")[0].partition("-")[0] for key in s3_keys(s3_server, bucket)} == {"run", "step", "index"}  # fmt: skip
    assert _value(f"s3://{bucket}", folder, options) == 1


@EITHER
def test_on_sftp(sftp_server: SftpServer, folder: str, names: tuple[str, ...]) -> None:
    base = Path(sftp_server.files, f"odd {len(names)}")

    def found() -> set[str]:
        return {str(path.relative_to(base)) for path in base.rglob("*") if path.is_file()}

    _check_each(f"{sftp_server.url}/{base.name}", names, folder, sftp_server.storage_options, found)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_on_a_local_folder(folder: str, scheme: str) -> None:
    base = Path(folder, "roots")

    def found() -> set[str]:
        return {str(path.relative_to(base)) for path in base.rglob("*") if path.is_file()}

    memory = Path(folder, "memory")
    memory.mkdir()
    names = tuple(name for name in NAMES if name != "run-0000002a.json")
    _check_each(f"{scheme}{base}", names, str(memory), None, found)


def test_on_memory(folder: str) -> None:
    import fsspec

    store = fsspec.filesystem("memory").store
    base = "/odd-roots/"
    _check_each(
        "memory://odd-roots",
        NAMES,
        folder,
        None,
        lambda: {path.removeprefix(base) for path in store if path.startswith(base)},
    )


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("scheme", ["s3", "sftp", "memory"])
def test_what_could_mean_another_place_is_refused(folder: str, scheme: str, name: str) -> None:
    for call in (
        lambda root: SnapshotStore(root, memory="1MiB", memory_dir=folder),
        lambda root: list_snapshots(root),
    ):
        with pytest.raises(ValueError, match="no URL that can be used"):
            call(f"{scheme}://bucket/{name}/run")
    assert list(Path(folder).iterdir()) == []


@pytest.mark.parametrize(
    "root",
    [
        "simplecache::s3://bucket/run",
        "filecache::memory://run",
        "zip://a.zip::s3://bucket/b",
        "dir::file:///tmp/x",
    ],
)
def test_chained_urls_are_refused(root: str, folder: str) -> None:
    with pytest.raises(ValueError, match="chained"):
        SnapshotStore(root, memory="1MiB", memory_dir=folder)
    with pytest.raises(ValueError, match="chained"):
        list_snapshots(root)


@pytest.mark.parametrize("root", ["s3://", "sftp://", "s3:///run", "memory://"])
def test_a_url_without_a_place_is_refused(root: str, folder: str) -> None:
    with pytest.raises(ValueError, match="no URL that can be used"):
        SnapshotStore(root, memory="1MiB", memory_dir=folder)
