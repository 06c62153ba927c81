"""The benchmarks work: a short mode of every state and of the report, whose figures mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.packages import why_not
from benchmarks.table import Table

REPOSITORY = Path(__file__).resolve().parents[2]
STATES = ("large", "gpt", "tiny")
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for busy cores take minutes


def run_module(module: str, *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *arguments],
        cwd=REPOSITORY, env=ONE_THREAD, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert not list(Path("/dev/shm").glob("benchmark-*"))
    return run.stdout


class Runs:
    """Results by state, each measured when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, state: str) -> Path:
        file = self.folder / f"{state}.json"
        if not file.exists():
            disk = self.folder / "disk"
            disk.mkdir(exist_ok=True)
            run_module(
                "compare", "--state", state, "--mib", "1", "--runs", "1",
                "--folder", str(disk), "--json", str(file),
            )  # fmt: skip
            assert list(disk.iterdir()) == []
        return file

    def table(self, state: str) -> Table:
        (found,) = json.loads(self.file(state).read_text())["tables"]
        return Table.from_json(found)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("benchmarks"))


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_every_target_of_a_state_has_a_figure(runs: Runs, state: str) -> None:
    verdicts = list(runs.table(state).verdicts())
    assert verdicts
    assert [target.what for target, value, _ in verdicts if value is None] == []


@pytest.mark.slow
@pytest.mark.parametrize("state", ["large", "tiny"])
def test_every_peer_has_rows_or_a_reason(runs: Runs, state: str) -> None:
    table = runs.table(state)
    for package in ("torchsnapshot", "torch_checkpointing", "fastsafetensors"):
        rows = [name for name in table.rows if name.startswith(package)]
        reasons = [why for what, why in table.not_measured.items() if what.startswith(package)]
        assert rows or reasons, package
        if why_not(package) is not None:
            assert not rows
            assert reasons[0] == why_not(package)
    for system in ("shardstore", "torch.save + fsync", "DCP save", "DCP save as safetensors"):
        assert any(name.startswith(f"{system}: load, cold") for name in table.rows), system


@pytest.mark.slow
def test_the_sharded_state_has_times_and_memory_of_each_system(runs: Runs) -> None:
    rows = runs.table("gpt").rows
    for system in ("DCP save", "DCP async_save", "shardstore"):
        assert f"{system}: save blocks" in rows
        assert f"{system}: save until durable" in rows
        assert f"{system}: peak memory beyond the state, all ranks" in rows


@pytest.mark.slow
def test_the_report_shows_machine_targets_rows_and_reasons(runs: Runs, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = [str(runs.file(state)) for state in STATES]
    run_module("report", *files, "--into", str(tmp_path))
    page = (tmp_path / "benchmarks.md").read_text()
    for words in ("- kernel: Linux", "- file system: ", "torch 2", "--state gpt --mib 1 --runs 1"):
        assert words in page
    for table in map(runs.table, STATES):
        for target in table.targets:
            assert f"| {target.what} |" in page
        for name in table.rows:
            assert f"| {name} |" in page
        for what, why in table.not_measured.items():
            assert f"- {what}: {why}" in page
    assert str(runs.folder) not in page
    assert (tmp_path / "benchmarks.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_short_run_prints_the_ways_to_write_and_read() -> None:
    printed = run_module("disk_paths", "--mib", "32", "--runs", "1")
    assert "write: O_DIRECT, 64 MiB a call" in printed
    assert "read: map and copy" in printed


@pytest.mark.slow
def test_a_short_run_compares_small_pages_with_huge_ones() -> None:
    printed = run_module("huge_pages", "--mib", "32", "--runs", "1")
    for row in ("get memory", "copy into it", "digest", "write directly", "pure Python slowed"):
        assert row in printed
