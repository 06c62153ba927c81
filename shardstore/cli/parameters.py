"""Arguments that several commands have."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

MEMORY_DIR: Final = "/dev/shm"  # noqa: S108 - where every Linux has its tmpfs

root_argument = click.argument("root", metavar="ROOT")

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")

yes_option = click.option(
    "--yes", is_flag=True, help="Do it; without this, say what would be done."
)

memory_dir_option = click.option(
    "--memory-dir",
    default=MEMORY_DIR,
    show_default=True,
    metavar="DIR",
    help="The tmpfs that the store was given.",
)


def writer() -> dict[str, str]:
    """Versions to record in registers that the command line writes."""
    return {"shardstore": importlib.metadata.version("shardstore")}


def near_options(command: F) -> F:
    """Where to look for copies on this host, as the store was told."""
    for option in (
        memory_dir_option,
        click.option("--name", metavar="NAME", help="The name= that the store was given, if any."),
        click.option("--disk", metavar="DIR", help="The disk= that the store was given, if any."),
    ):
        command = option(command)
    return command


def which_options(default: str) -> Callable[[F], F]:
    """`--step` and `--id`; `default` says what is taken without them."""

    def add(command: F) -> F:
        step = click.option(
            "--step", metavar="N", help=f'A step, or "newest", or "all"; without it: {default}.'
        )
        which = click.option("--id", "id_", metavar="ID", help="One snapshot, by its id.")
        return step(which(command))

    return add
