"""`shardstore memory list|clear`: shows what runs keep, frees only what nobody holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from shardstore import SnapshotStore
from tests.cli.conftest import Roots, run, run_json

Copy = Callable[[Path], Path]

_HOLDER = """
import sys
from shardstore.tiers import ownership
for path in sys.argv[1:]:
    assert ownership.acquire(path) is None
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(*locks: Path) -> Iterator[int]:
    """Another process holds these lock files; its pid."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, *map(str, locks)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    with process:
        assert process.stdout.readline() == "held\n"
        yield process.pid
        process.stdin.close()


@pytest.fixture
def memory(roots: Roots, folder: str) -> Path:
    """A copy of the memory that the two ranks left."""
    return Path(shutil.copytree(roots.memory, Path(folder) / "memory"))


def namespace(memory: Path) -> Path:
    (found,) = (memory / f"shardstore-{os.getuid()}").iterdir()
    return found


def shards(memory: Path) -> list[Path]:
    return sorted(memory.rglob("rank-*.safetensors"))


def test_list_says_whose_it_is_and_that_nobody_holds_it(memory: Path) -> None:
    document = run_json("memory", "list", "--memory-dir", memory)
    assert set(document) == {"command", "memory_dir", "namespaces", "other_users"}
    (found,) = document["namespaces"]
    assert set(found) == {
        "name", "root", "path", "alive", "nbytes", "ranks", "snapshots", "owners",
    }  # fmt: skip
    assert found["name"] == namespace(memory).name
    assert found["alive"] is False
    assert found["ranks"] == [0, 1]
    assert [(s["step"], s["ranks"]) for s in found["snapshots"]] == [(10, [0, 1]), (20, [0, 1])]
    assert found["nbytes"] == sum(file.stat().st_blocks * 512 for file in shards(memory))
    assert all(not owner["alive"] and owner["pid"] is None for owner in found["owners"])
    result = run("memory", "list", "--memory-dir", memory)
    assert "ended" in result.stdout
    assert "10, 20" in result.stdout
    assert f"shardstore memory clear --memory-dir {memory}" in result.stderr


def test_list_names_the_process_that_holds_it_and_takes_no_lock(memory: Path) -> None:
    (lock,) = namespace(memory).glob("owner-*-00001.lock")
    before = lock.read_bytes()
    with held(lock) as pid:
        (found,) = run_json("memory", "list", "--memory-dir", memory)["namespaces"]
        assert found["alive"] is True
        assert {(o["rank"], o["alive"], o["pid"]) for o in found["owners"]} == {
            (0, False, None),
            (1, True, pid),
        }
        assert f"pid {pid}" in run("memory", "list", "--memory-dir", memory).stdout
        assert lock.read_bytes() == str(pid).encode()
    lock.write_bytes(before)


def test_list_of_a_store_in_this_process_does_not_drop_its_lock(folder: str) -> None:
    root = Path(folder) / "root"
    with SnapshotStore(root, memory="16MiB", memory_dir=folder) as store:
        store.save({"x": torch.ones(3)}, step=1).wait(20)
        for _ in range(2):
            (found,) = run_json("memory", "list", "--memory-dir", folder)["namespaces"]
            assert found["owners"][0]["pid"] == os.getpid()
        probe = "import sys; from shardstore.tiers import ownership; print(ownership.acquire(sys.argv[1]))"
        (lock,) = namespace(Path(folder)).glob("*.lock")
        done = subprocess.run(
            [sys.executable, "-c", probe, str(lock)], capture_output=True, text=True, check=True
        )
        assert done.stdout == f"Holder(pid={os.getpid()})\n"


def test_list_of_one_root_finds_its_namespace(roots: Roots) -> None:
    options = ("--memory-dir", roots.memory)
    (found,) = run_json("memory", "list", *options, "--root", roots.two)["namespaces"]
    assert found["root"] == str(roots.two)
    assert run_json("memory", "list", *options, "--root", roots.one)["namespaces"] == []
    assert run_json("memory", "list", *options, "--name", found["name"])["namespaces"]


def test_clear_says_what_it_would_free_and_frees_it_with_yes(memory: Path) -> None:
    nbytes = sum(file.stat().st_blocks * 512 for file in shards(memory))
    document = run_json("memory", "clear", "--memory-dir", memory)
    assert document["done"] is False
    assert document["namespaces"][0]["nbytes"] == nbytes
    assert len(shards(memory)) == 4
    assert "add --yes" in run("memory", "clear", "--memory-dir", memory).stdout
    document = run_json("memory", "clear", "--memory-dir", memory, "--yes")
    assert document["namespaces"][0]["num_files"] == 4
    assert not list((memory / f"shardstore-{os.getuid()}").iterdir())
    assert "there is nothing to free" in run("memory", "clear", "--memory-dir", memory).stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_clear_leaves_a_run_whole_while_any_of_its_ranks_is_held(memory: Path, rank: int) -> None:
    (lock,) = namespace(memory).glob(f"owner-*-0000{rank}.lock")
    with held(lock) as pid:
        result = run("memory", "clear", "--memory-dir", memory, "--yes")
        assert f"process {pid} holds it" in result.stdout
        assert len(shards(memory)) == 4
        assert len(list(namespace(memory).glob("*.lock"))) == 2


def test_clear_frees_slots_and_marks_and_keeps_what_is_not_ours(memory: Path) -> None:
    inner = next(namespace(memory).glob("step-*"))
    nonce = inner.name.rpartition("-")[2]
    (namespace(memory) / f"slot-{nonce}-00000-0001-abcdef").write_bytes(bytes(8192))
    (inner / "rank-00000.complete").touch()
    (inner / "rank-00001.pinned").touch()
    foreign = inner / "notes.txt"
    foreign.touch()
    (namespace(memory) / "step-link").symlink_to(inner)
    assert run_json("memory", "list", "--memory-dir", memory)["namespaces"][0]["ranks"] == [0, 1]
    run("memory", "clear", "--memory-dir", memory, "--yes")
    assert [path for path in namespace(memory).rglob("*") if path.is_file()] == [foreign]


def test_wrong_folders_are_explained(memory: Path) -> None:
    result = run("memory", "list", "--memory-dir", memory / "none", code=2)
    assert "is no folder" in result.stderr
    result = run("memory", "clear", "--memory-dir", memory, "--name", "none", code=2)
    assert "no memory of that store" in result.stderr
    result = run("memory", "list", "--memory-dir", memory / f"shardstore-{os.getuid()}")
    assert "no store of this user" in result.stderr
