"""The command line `shardstore`: one command per file. No torch, so that it starts at once."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line and end the process with its exit code."""
    from shardstore.cli.app import INTERRUPTED, cli

    try:
        cli(prog_name="shardstore")
    except SystemExit as end:
        if end.code == INTERRUPTED:
            # A thread may be inside a read that never returns, and would be waited for.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise
