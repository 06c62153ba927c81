"""Every command on roots that somebody prepared: no traceback, no waiting, no large allocation, no code run."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shardstore.cli.app import cli
from tests.faults.hostile import HOSTILE, MANIFEST, MARKER, SHARD, save_two

_PATIENCE_S = 20.0
_ROOM_BYTES = 512 << 20
"""Of address space beyond what the process has: `verify` alone may take 256 MiB."""

Edit = Callable[[Path], object]
"""Called with the folder of step 2, the newest."""


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Inside, large allocations fail, whether or not they are touched."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _ROOM_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_two(folder)
    return folder


def hostile_copy(saved: Path, folder: Path, edit: Edit) -> Path:
    """A copy of the root in which step 2 was edited."""
    shutil.copytree(saved, folder)
    root = folder / "root"
    edit(step(root, 2))
    return root


def step(root: Path, number: int) -> Path:
    (found,) = root.glob(f"step-{number:012d}.*")
    return found


def run(root: Path, command: str, *, code: int | None = None) -> Result:
    """Run a command on a root, `--memory-dir` given where it would else look at this host's memory."""
    name, *words = command.split()
    near = ["--memory-dir", str(root.parent / "memory")] if name in ("list", "show", "gc") else []
    started = time.monotonic()
    with little_memory():
        result = CliRunner().invoke(cli, [name, str(root), *words, *near])
    assert result.exception is None or isinstance(result.exception, SystemExit), (
        f"{command}: {result.exception!r}"
    )
    assert time.monotonic() - started < _PATIENCE_S, command
    assert len(result.output) < 300_000, command
    assert "Traceback" not in result.output, command
    if code is not None:
        assert result.exit_code == code, f"{command}: {result.output}"
    if "--json" in words:
        json.loads(result.stdout)
    return result


def names_it(result: Result, newest: Path, kind: str) -> bool:
    """Whether a person can see from the text which file it is about."""
    file = MANIFEST if kind.startswith("manifest") else SHARD
    return newest.name in result.output and (
        kind.startswith("folder") or file in result.output or "manifest" in result.output
    )


_ONLY_HEADERS_TELL = {
    "manifest: a huge shape", "shard: a huge shape", "shard: a negative offset",
    "shard: an offset that overflows", "shard: an entry beyond the file", "shard: a negative span",
    "shard: overlapping spans", "shard: another rank", "shard: twice a key", "shard: deep",
}  # fmt: skip
"""Names and sizes are right: `verify`, `diff` and a restore see it, and they mark it."""

_LISTS = ["list", "list --all", "list --all --json", "gc", "gc --json"]
"""These tell what is there by registers: whatever it is, they tell it."""


@pytest.mark.parametrize("kind", HOSTILE)
def test_commands_on_a_hostile_snapshot_fail_in_words(
    saved: Path, tmp_path: Path, kind: str
) -> None:
    root = hostile_copy(saved, tmp_path / "copy", HOSTILE[kind])
    newest = root / next(saved.glob("root/step-000000000002.*")).name
    for command in _LISTS if "100 MB" not in kind else ["list"]:  # each reads it all
        assert run(root, command).exit_code in (0, 1), command
    is_link = kind == "folder: a link out"  # which no command follows: there is no step 2
    bad = 2 if is_link else 1
    assert names_it(run(root, "verify", code=0 if is_link else 1), newest, kind)
    diff = run(root, "diff 1 2", code=bad)
    assert "error: " in diff.stderr
    assert names_it(diff, newest, kind)
    if "100 MB" not in kind:
        run(root, "verify --json", code=0 if is_link else 1)
        run(root, "diff 1 2 --json", code=bad)
        assert run(root, "show --step 2 --json").exit_code in ({2} if is_link else {0, 1})
    if kind not in _ONLY_HEADERS_TELL:
        assert names_it(run(root, "show --step 2", code=bad), newest, kind)
        assert names_it(run(root, "pin 2", code=bad), newest, kind)
        run(root, "unpin 2")
        prune = run(root, "prune --keep 1 --yes", code=0 if is_link else 1)
        assert names_it(prune, newest, kind)
        # What cannot be restored does not make the last good snapshot go.
        assert (step(root, 1) / MANIFEST).is_file()
        run(root, "verify --step 1", code=0)
    else:
        run(root, "pin 2", code=0)
        run(root, "unpin 2", code=0)
        run(root, "verify --mark", code=1)
        run(root, "prune --keep 1 --yes", code=1)
        assert (step(root, 1) / MANIFEST).is_file()
    run(root, "gc --yes --unknown")
    assert (step(root, 1) / MANIFEST).is_file()
    assert not (root.parent / MARKER).exists()


def _no_folder(make: Callable[[Path], object]) -> Edit:
    """Something else under a name that only a snapshot's folder may have."""
    return lambda newest: make(newest.parent / newest.name.replace("-000002-", "-000003-"))


_RECORD = "run-00000001.json"
_BROKEN_ROOTS: dict[str, tuple[str, Edit]] = {
    "a file with a snapshot's name": ("-000003-", _no_folder(Path.touch)),
    "a pipe with a snapshot's name": ("-000003-", _no_folder(os.mkfifo)),
    "a link with a snapshot's name": ("-000003-", _no_folder(lambda p: p.symlink_to("nowhere"))),
    "a run's record is a folder": (_RECORD, lambda f: _instead(f.parent / _RECORD, Path.mkdir)),
    "a run's record is a pipe": (_RECORD, lambda f: _instead(f.parent / _RECORD, os.mkfifo)),
    "a run's record is huge": (_RECORD, lambda f: os.truncate(f.parent / _RECORD, 1 << 40)),
    "a run's record is a link": (
        _RECORD,
        lambda f: _instead(f.parent / _RECORD, lambda p: p.symlink_to("/etc/passwd")),
    ),
    "what was being written is a pipe": (
        "rank-00000.safetensors.tmp",
        lambda f: os.mkfifo(f / "rank-00000.safetensors.tmp"),
    ),
}


def _instead(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


@pytest.mark.parametrize("kind", _BROKEN_ROOTS)
def test_one_broken_thing_on_a_root_hides_nothing_else(
    saved: Path, tmp_path: Path, kind: str
) -> None:
    name, edit = _BROKEN_ROOTS[kind]
    root = hostile_copy(saved, tmp_path / "copy", edit)
    listed = json.loads(run(root, "list --json", code=0).stdout)["snapshots"]
    assert [one["step"] for one in listed] == [1, 2]
    run(root, "verify", code=0)
    run(root, "show --step 2", code=0)
    gc = run(root, "gc")
    assert name in gc.output
    assert not gc.output.startswith("error"), gc.output
    assert gc.exit_code == (1 if name == _RECORD else 0)
    pruned = json.loads(run(root, "prune --keep 1 --yes --json", code=0).stdout)
    assert [one["step"] for one in pruned["deleted"]] == [1]
    assert json.loads(run(root, "list --json", code=0).stdout)["snapshots"][0]["step"] == 2
