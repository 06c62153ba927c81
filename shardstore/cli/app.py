"""The group of all commands, and how errors end: one message, one exit code, no traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import click

from shardstore.cli.diff import diff
from shardstore.cli.doctor import doctor
from shardstore.cli.gc import gc_
from shardstore.cli.listing import list_
from shardstore.cli.memory import memory
from shardstore.cli.output import note, write_json
from shardstore.cli.pins import pin, unpin
from shardstore.cli.prune import prune_
from shardstore.cli.show import show
from shardstore.cli.verify import verify
from shardstore.errors import CorruptSnapshotError, FormatError, ShardStoreError, TierError

INTERRUPTED: Final = 130
_BROKEN_PIPE: Final = 141


class _Commands(click.Group):
    """A group that keeps its commands in the order they were added, and turns errors into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self.commands)

    def main(self, args: Sequence[str] | None = None, **extra: Any) -> Any:  # type: ignore[override]
        words = list(sys.argv[1:] if args is None else args)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # names in a snapshot may not fit the terminal
                stream.reconfigure(errors="backslashreplace")
        extra["standalone_mode"] = False
        try:
            code = super().main(words, **extra)
            sys.stdout.flush()
        except BrokenPipeError:
            _leave_pipe()
        except (KeyboardInterrupt, click.Abort):
            note("interrupted")
            sys.exit(INTERRUPTED)
        except click.ClickException as error:
            _fail(error, error.exit_code, as_json="--json" in words)
        except ShardStoreError as error:
            _fail(error, _exit_code(error), as_json="--json" in words)
        except OSError as error:
            _fail(error, 1, as_json="--json" in words)
        except RecursionError:
            text = "metadata or leaves in this snapshot are nested too deeply to be shown"
            _fail(click.ClickException(text), 1, as_json="--json" in words)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            found = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _leave_pipe()
        return found


def _leave_pipe() -> NoReturn:
    """The reader (`head`, `less`) has gone: end quietly, as a process that SIGPIPE ended."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass
    sys.exit(_BROKEN_PIPE)


def _exit_code(error: ShardStoreError) -> int:
    return 1 if isinstance(error, CorruptSnapshotError | FormatError | TierError) else 2


def _fail(error: Exception, code: int, *, as_json: bool) -> NoReturn:
    message = error.format_message() if isinstance(error, click.ClickException) else str(error)
    if as_json:
        write_json({"error": message, "exit_code": code})
        sys.stdout.flush()
    if isinstance(error, click.UsageError) and error.ctx is not None:
        note(error.ctx.get_usage())
    note(f"error: {message}")
    sys.exit(code)


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 all is well (diff: equal); 1 a problem was found (diff: they differ); "
    "2 the command cannot be done as given, as on a wrong path; 130 interrupted. "
    "Every command has --json: one JSON document on stdout, messages on stderr.",
)
@click.version_option(package_name="shardstore", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Look at snapshots, check them, and clean up after runs."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for _command in (list_, show, verify, diff, pin, unpin, prune_, gc_, memory, doctor):
    cli.add_command(_command)
