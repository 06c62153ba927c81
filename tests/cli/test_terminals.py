"""The command line as a process: no torch, pipes, terminals of any width, interrupts."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.cli.conftest import ODD_NAME, Roots, run, snapshot

REPOSITORY = Path(__file__).resolve().parents[2]
SHARDSTORE = [sys.executable, "-m", "shardstore"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}

_EVERY_COMMAND = """
import sys
from click.testing import CliRunner
from shardstore.cli.app import cli
one, two, memory = sys.argv[1:]
near = ["--memory-dir", memory]
for words in (
    ["--help"], ["--version"], ["list", one, *near], ["list", two, "--all", "--json"], ["show", two, *near],
    ["verify", one], ["prune", one, "--keep", "1"], ["gc", one, *near],
    ["memory", "list", *near], ["memory", "clear", *near], ["doctor", one, *near],
    ["diff", one, "100", "200"],
):
    result = CliRunner().invoke(cli, words)
    assert result.exit_code in (0, 1) and result.output, (words, result.output)
    assert "torch" not in sys.modules, words
    assert "Traceback" not in result.output
    if words[0] != "diff":
        assert "numpy" not in sys.modules, words
assert "rich" not in sys.modules, "only for somebody who watches"
"""


def process(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SHARDSTORE, *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=60, env=ENVIRONMENT,
    )  # fmt: skip


def on_terminal(columns: int, *arguments: object, environment: dict[str, str] | None = None) -> str:
    """What a command prints on a terminal of this width, stdout and stderr together."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with subprocess.Popen(
        [*SHARDSTORE, *map(str, arguments)],
        stdin=follower, stdout=follower, stderr=follower,
        env={**{k: v for k, v in ENVIRONMENT.items() if k != "COLUMNS"}, "TERM": "xterm", **(environment or {})},
    ):  # fmt: skip
        os.close(follower)
        data = b""
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:  # EIO: the last writer has gone
                break
            if not part:
                break
            data += part
    os.close(leader)
    return data.decode().replace("\r\n", "\n")


def test_no_command_imports_torch_and_only_diff_imports_numpy(roots: Roots) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _EVERY_COMMAND, str(roots.one), str(roots.two), str(roots.memory)],
        capture_output=True, text=True, check=False, timeout=60, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_module_and_script_are_the_same_command_line(roots: Roots) -> None:
    done = process("list", roots.one)
    assert done.returncode == 0
    assert done.stdout == run("list", roots.one).stdout
    script = "import sys; from shardstore.cli import main; main()"
    same = subprocess.run(
        [sys.executable, "-c", script, "list", str(roots.one)],
        capture_output=True, text=True, check=True, env=ENVIRONMENT,
    )  # fmt: skip
    assert same.stdout == done.stdout


def test_exit_codes_reach_the_shell(roots: Roots, tmp_path: Path) -> None:
    assert process("diff", roots.one, 100, 200).returncode == 1
    assert process("list", tmp_path / "none").returncode == 2
    assert process("--nope").returncode == 2


def test_help_names_every_command_and_the_exit_codes() -> None:
    text = run("--help").stdout
    for name in (
        "list",
        "show",
        "verify",
        "diff",
        "prune",
        "gc",
        "pin",
        "unpin",
        "memory",
        "doctor",
    ):
        assert f"\n  {name} " in text
        assert "ROOT" in run(name, "--help").output or name == "memory"
    assert "Exit codes" in text
    assert "..." not in text.partition("Commands:")[2], "the first line of each says it whole"
    assert run().stdout == text
    assert "clear" in run("memory").stdout


def test_piped_output_has_no_colours_and_nothing_is_cut(roots: Roots) -> None:
    done = process("list", roots.one)
    assert "\x1b" not in done.stdout + done.stderr
    assert snapshot(roots.one, 300).name in done.stdout
    narrow = subprocess.run(
        [*SHARDSTORE, "show", str(roots.one)],
        capture_output=True, text=True, check=True, env={**ENVIRONMENT, "COLUMNS": "20"},
    )  # fmt: skip
    assert narrow.stdout == process("show", roots.one).stdout


@pytest.mark.parametrize("columns", [200, 40])
def test_terminal_of_any_width_shows_whole_ids(roots: Roots, columns: int) -> None:
    text = on_terminal(columns, "list", roots.one)
    for step in (100, 200, 300):
        assert snapshot(roots.one, step).name in text
    assert ("\x1b[1m" in text) == (columns == 200), "titles are bold in a table"
    if columns == 40:
        assert "STEP     100\n" in text, "a block for each snapshot"


def test_terminal_colours_are_left_out_on_request(roots: Roots) -> None:
    assert "\x1b[32mok" in on_terminal(200, "verify", roots.one)
    plain = on_terminal(200, "show", roots.one, environment={"NO_COLOR": "1"})
    assert "\x1b" not in plain


def test_progress_is_shown_on_a_terminal(roots: Roots) -> None:
    text = on_terminal(120, "verify", roots.two)
    assert "step 10 (1 of 2)" in text
    assert "step 20 (2 of 2)" in text


def test_names_cannot_drive_the_terminal(roots: Roots) -> None:
    for text in (run("show", roots.one).stdout, on_terminal(200, "show", roots.one)):
        assert ODD_NAME not in text
        assert "größe [red]\\x1b[31m名" in text


def test_names_are_escaped_where_the_encoding_lacks_them(roots: Roots) -> None:
    done = subprocess.run(
        [*SHARDSTORE, "show", str(roots.one)],
        capture_output=True, check=True, env={**ENVIRONMENT, "PYTHONIOENCODING": "latin-1"},
    )  # fmt: skip
    assert "größe [red]\\x1b[31m\\u540d".encode("latin-1") in done.stdout


@pytest.mark.parametrize("command", ["list", "show"])
def test_reader_that_leaves_is_no_error(roots: Roots, command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*SHARDSTORE, command, str(roots.one)],
        stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=60, env=ENVIRONMENT,
    )  # fmt: skip
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 141


_STUCK = """
import os, signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it for what they run behind
from shardstore.cli import main
from shardstore.tiers.fileops import FileOps, use_ops

class Stuck(FileOps):
    def read_at(self, fd, into, offset):
        if threading.current_thread() is not threading.main_thread():
            os.write(1, b"reading\\n")
            threading.Event().wait()
        return super().read_at(fd, into, offset)

with use_ops(Stuck()):
    main()
"""


def test_interrupt_ends_it_even_inside_a_read_that_never_returns(roots: Roots) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _STUCK, "verify", str(roots.two)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    ) as stuck:  # fmt: skip
        try:
            assert stuck.stdout is not None
            assert stuck.stdout.readline() == "reading\n"
            err = _interrupt(stuck)
        finally:
            stuck.kill()
    assert stuck.returncode == 130
    assert err.strip().endswith("interrupted")


def _interrupt(process: subprocess.Popen[str]) -> str:
    """Ctrl-C, again if it came where Python drops an exception (a finalizer); what it said at its end."""
    for _ in range(20):
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=3)[1]
        except subprocess.TimeoutExpired:
            pass
    raise AssertionError("nothing ends it")
