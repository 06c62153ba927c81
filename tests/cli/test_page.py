"""docs/command-line.md shows what the commands print: every command on it is run and compared."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardstore import SnapshotStore
from shardstore.cli.app import cli
from tests.cli.conftest import flip_byte, snapshot
from tests.ranks import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "command-line.md"
BLOCK = re.compile(
    r"^(?:<!-- (?P<before>[a-z ]+) -->\n)?```console\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
VARYING = [
    (r"-[0-9a-f]{8}\b", "-NONCE"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "TIME"),
    (r"process \d+ on \S+", "process PID on HOST"),
    (r"torch \S+", "torch VERSION"),
    (r"digest [0-9a-f]{32}, [0-9a-f]{32}", "digest X, Y"),
    (r"[\d.]+ (KiB|MiB)", "SIZE"),
    (r"in \d+\.\d s", "in S"),
    (r"\b[0-9a-f]{16}\b", "NAME"),
    (r"/\S*/(run-17|memory)\b", r"\1"),
]


def _train(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    weight = distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)])
    progress = {"step": 0, "lr": 0.1}
    state = {"weight": weight, "scale": torch.ones(3), "progress": progress}
    with (
        mock.patch("platform.node", return_value="node-1"),
        SnapshotStore(
            Path(folder) / "run-17",
            memory="64MiB",
            memory_dir=Path(folder) / "memory",
            timeout_s=20,
        ) as store,
    ):
        for step in (100, 200, 300, 400):
            progress["step"] = step
            with torch.no_grad():
                weight.to_local().fill_(step)
            store.save(state, step=step, metadata={"loss": 100 / step}).wait(20)
        store.close(keep_memory=True)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A root that two ranks wrote, whose last attempt is torn; memory has the one before."""
    folder = Path(tempfile.mkdtemp(prefix="shardstore-page-", dir="/dev/shm"))
    (folder / "memory").mkdir()
    run_ranks(2, _train, str(folder))
    torn = snapshot(folder / "run-17", 400)
    (torn / "manifest.json").unlink()
    (torn / "rank-00001.safetensors").unlink()
    for near in folder.glob("memory/*/*/step-*"):
        if not near.name.startswith("step-000000000300."):
            shutil.rmtree(near)
    yield folder
    shutil.rmtree(folder)


def plain(text: str, command: str) -> list[str]:
    """Lines without what differs from host to host; of `doctor` the names of its checks."""
    lines = [line for line in text.splitlines() if line.strip()]
    if command.startswith("shardstore doctor"):
        found = (re.match(r"(?:ok|warn|fail) +(.+?)  ", line) for line in lines)
        names = [match[1] for match in found if match]
        return [name for name in names if not name.startswith(("speed:", "root: inodes"))]
    for pattern, stand_in in VARYING:
        lines = [re.sub(pattern, stand_in, line) for line in lines]
    return [" ".join(line.split()) for line in lines]


def test_page_shows_what_the_commands_print(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    seen: set[str] = set()
    for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        if block["before"] == "damage":
            flip_byte(snapshot(place / "run-17", 200) / "rank-00001.safetensors", -1)
        prompt, _, expected = block["body"].partition("\n")
        command = prompt.removeprefix("$ ")
        words = command.split()
        assert prompt == f"$ {command}"
        assert words[0] == "shardstore"
        seen.add(words[1])
        result = CliRunner().invoke(cli, words[1:])
        assert plain(result.output, command) == plain(expected, command), (
            f"$ {command}\n{result.output}"
        )
    assert seen == set(cli.commands)
