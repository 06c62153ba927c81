"""The example's progress bars: drawn on a terminal, and nothing but plain lines elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

_SCRIPT = """
import sys
import torch
from progress_bars import bars_on
from shardstore import SnapshotStore

root, memory_dir = sys.argv[1:]
state = {"w": torch.zeros(1000)}
with bars_on(sys.stdout) as bars:
    callback = bars and bars.show
    with SnapshotStore(root, memory="1MiB", memory_dir=memory_dir, progress=callback) as store:
        store.save(state, step=3).wait(30)
        store.restore(state)
        print("a plain line")
        if bars:
            bars.train("my training", 4, 10, 0.25)
"""


def _start(folder: str, stdout: int) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "examples")])
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, f"{folder}/root", folder],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**environment, "PYTHONPATH": paths, "TERM": "xterm", "COLUMNS": "100"},
    )


def test_bars_are_drawn_on_a_terminal(folder: str) -> None:
    ours, theirs = pty.openpty()
    process = _start(folder, theirs)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:
        pass  # EIO: the other end is closed
    finally:
        os.close(ours)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors.decode()
    text = shown.decode()
    for expected in (
        "a plain line",
        "save step 3 (memory)",
        "write step 3 (root)",
        "restore step 3 (memory)",
        "my training",
        "100%",
        "50%",
        "step 4, loss 0.2500",
    ):
        assert expected in text
    assert "\x1b[" in text


def test_without_a_terminal_there_are_plain_lines_only(folder: str) -> None:
    process = _start(folder, subprocess.PIPE)
    shown, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors.decode()
    assert shown == b"a plain line\n"
