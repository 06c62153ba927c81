"""Real roots, made once by real stores, and copied for tests that break them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from shardstore import RNGState, SnapshotStore
from shardstore.cli.app import cli
from tests.faults.scenario import Job
from tests.ranks import run_ranks

ODD_NAME = "größe [red]\x1b[31m名"


@dataclass(frozen=True)
class Roots:
    """Folders made by real stores; read-only for tests."""

    one: Path
    """Steps 100, 200, 300 of one process."""
    two: Path
    """Steps 10 and 20 of two ranks."""
    memory: Path
    """Memory folder that has both steps of `two`."""


def _save_two(rank: int, folder: str) -> None:
    store = SnapshotStore(
        Path(folder) / "two", memory="64MiB", memory_dir=Path(folder) / "memory", timeout_s=20
    )
    job = Job(rank)
    for step in (10, 20):
        job.fill(step)
        store.save(job.state, step=step, metadata={"loss": 1 / step}).wait(20)
    store.close(keep_memory=True)


@pytest.fixture(scope="session")
def roots() -> Iterator[Roots]:
    folder = Path(tempfile.mkdtemp(prefix="shardstore-cli-", dir="/dev/shm"))
    memory = folder / "memory"
    memory.mkdir()
    run_ranks(2, _save_two, str(folder))
    with SnapshotStore(folder / "one", memory="64MiB", memory_dir=memory) as store:
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(8)).sum().backward()
        optimizer.step()
        progress: dict[str, Any] = {"step": 0, "lr": float("inf")}
        state = {
            "model": model,
            "optimizer": optimizer,
            ODD_NAME: torch.arange(5.0),
            "progress": progress,
            "rng": RNGState(),
        }
        for step in (100, 200, 300):
            progress["step"] = step
            with torch.no_grad():
                model.weight[0, 0] += 1
            store.save(state, step=step, metadata={"step": step}).wait(20)
    yield Roots(folder / "one", folder / "two", memory)
    shutil.rmtree(folder)


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """Copy a root, for a test that changes it."""

    def copy(root: Path) -> Path:
        return Path(shutil.copytree(root, tmp_path / f"{root.name}-copy"))

    return copy


def run(*arguments: object, code: int = 0) -> Result:
    """Run a command in this process and check its exit code."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def run_json(*arguments: object, code: int = 0) -> Any:
    """Run a command with --json: the whole of stdout is one document."""
    return json.loads(run(*arguments, "--json", code=code).stdout)


def snapshot(root: Path, step: int) -> Path:
    """The folder of a step."""
    (found,) = root.glob(f"step-{step:012d}.*")
    return found


def flip_byte(path: Path, position: int) -> None:
    """Damage one byte."""
    with path.open("r+b") as file:
        file.seek(position, os.SEEK_END if position < 0 else os.SEEK_SET)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))
