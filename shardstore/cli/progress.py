"""A progress bar on stderr for whoever watches, and nothing for scripts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of bytes. Any thread may advance it."""

    advance: Callable[[int], None]
    begin: Callable[[int], None]
    """Say how many bytes there are."""


@contextmanager
def byte_bar(title: str, *, total: int = 0) -> Iterator[Bar]:
    """Show a bar while the body runs, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield Bar(lambda _: None, lambda _: None)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task(escape(title), total=total)
        yield Bar(
            lambda nbytes: progress.advance(task, nbytes),
            lambda nbytes: progress.update(task, total=nbytes),
        )
