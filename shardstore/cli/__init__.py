"""The command line `shardstore`: one command per file. No torch, so that it starts at once."""

from __future__ import annotations


def main() -> None:
    """Run the command line and end the process with its exit code."""
    from shardstore.cli.app import cli

    cli(prog_name="shardstore")
