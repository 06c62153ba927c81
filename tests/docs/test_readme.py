"""What the README shows must run, and its commands must be those that CI runs."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
EXAMPLES = REPOSITORY / "examples"


def blocks(language: str) -> list[str]:
    """Fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def run(
    *arguments: str | Path, cwd: Path, timeout_s: float = 100.0
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def torchrun(script: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return run(*launcher, script, cwd=cwd)


def test_every_python_block_parses_and_only_two_are_programs() -> None:
    for block in blocks("python"):
        ast.parse(block)
    assert len(blocks("python")) == 2, "a new block needs a test that runs it"


def test_pasteable_script_stands_in_the_first_screen() -> None:
    assert README.index("```python") < README.index("\n## ")
    first_screen = README.splitlines()[:35]
    assert first_screen.count("```") == 1


def test_pasteable_script_is_killed_and_then_restores(tmp_path: Path) -> None:
    demo = tmp_path / "demo.py"
    demo.write_text(blocks("python")[0], encoding="utf-8")
    first = run(demo, cwd=tmp_path)
    assert first.returncode == -signal.SIGKILL, first.stderr
    assert first.stdout == "a fresh start\n"
    second = run(demo, cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert re.fullmatch(r"step 5 from memory \(1 rank\) in \d\.\d s\n", second.stdout)
    third = run(demo, cwd=tmp_path)
    assert third.returncode == 0, third.stderr
    assert third.stdout.startswith("step 9 from root (1 rank)")


def test_fsdp2_script_runs_under_torchrun_and_restores(tmp_path: Path) -> None:
    train = tmp_path / "train.py"
    train.write_text(blocks("python")[1], encoding="utf-8")
    for _ in range(2):
        done = torchrun(train, tmp_path)
        assert done.returncode == 0, done.stderr
    listing = "import shardstore; print([i.step for i in shardstore.list_snapshots('run-17')])"
    assert run("-c", listing, cwd=tmp_path).stdout == "[99, 199]\n"


def test_ci_calls_exactly_the_test_command_of_the_readme() -> None:
    example, tests = (block.strip() for block in blocks("bash"))
    assert tests in (REPOSITORY / ".ci/run").read_text().splitlines()
    assert example.startswith("python3 -m venv .venv && ")
    assert example.endswith("/python examples/preempted_training.py")
    script = tests.split()[-1]
    assert (REPOSITORY / script).is_file()


def test_constraints_are_exact_public_versions() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    marker = r'(; python_version (<|>=) "3\.\d+")?'
    for pin in pins:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9.]*(post[0-9]+)?" + marker, pin), pin
    assert "torch==2.13.0" in pins


def write_logs(folder: Path, *, last_loss: str, last_moments: str) -> None:
    """Four runs as the example logs them, two steps each, with one that may differ."""
    titles = ("uninterrupted", "killed", "from memory", "from disk")
    tiers = (None, None, "memory (2 ranks)", "root (2 ranks)")
    for number, (title, tier) in enumerate(zip(titles, tiers, strict=True)):
        run_folder = folder / f"{number}-{title}"
        run_folder.mkdir(parents=True)
        (run_folder / "launch.json").write_text(json.dumps({"title": title, "time": 0.0}))
        is_last = number == 3
        for rank in range(2):
            lines: list[dict[str, object]] = [{"event": "imported", "time": 1.0}]
            if tier:
                seconds = {"agree_s": 0.1, "verify_s": 0.1, "copy_s": 0.1}
                lines += [{"event": "opened", "time": 2.0}]
                lines += [{"event": "restored", "tier": tier, **seconds}]
            lines += [{"event": "ready", "time": 3.0}]
            for step in range(2):
                loss = last_loss if is_last and step == 1 else (1.5).hex()
                entry = {"event": "loss", "step": step, "own": loss, "mean": loss, "seconds": 0.1}
                lines.append(entry)
            lines.append({"event": "end", "moments": last_moments if is_last else "aa"})
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (run_folder / f"rank-{rank}.jsonl").write_text(text + '{"event": "lo')


@pytest.mark.parametrize(
    ("last_loss", "last_moments", "problems"),
    [
        ((1.5).hex(), "aa", 0),
        ("0x1.8000000000001p+0", "aa", 2),
        ((1.5).hex(), "ab", 2),
    ],
)
def test_report_of_the_example_fails_on_any_difference(
    tmp_path: Path, last_loss: str, last_moments: str, problems: int
) -> None:
    write_logs(tmp_path / "logs", last_loss=last_loss, last_moments=last_moments)
    script = EXAMPLES / "preempted_training_report.py"
    done = run(script, tmp_path / "logs", "--png", tmp_path / "curves.png", cwd=tmp_path)
    assert done.returncode == (1 if problems else 0), done.stdout + done.stderr
    assert done.stdout.count("DIFFERS: ") == problems, done.stdout


@pytest.mark.slow
def test_example_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    kept = tmp_path / f"kept-{uuid.uuid4().hex[:8]}"
    script = EXAMPLES / "preempted_training.py"
    options = ("--steps=30", "--save-every=2", f"--keep={kept}", f"--png={tmp_path / 'curves.png'}")
    done = run(script, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SIGKILL to all in the save of step") == 2
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (kept / "snapshots").is_dir()
    memory = Path(f"/dev/shm/shardstore-{os.getuid()}")
    assert not list(memory.glob("preempted-training-*"))
