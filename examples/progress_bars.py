"""Progress bars for a terminal, fed by what shardstore tells of its work.

with bars_on(sys.stderr) as bars:  # None where that is no terminal, or rich is not installed
    store = SnapshotStore(root, progress=bars and bars.show)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from shardstore import Progress


class Bars:
    """One bar for the training, and one for each kind of work on snapshots. Any thread."""

    def __init__(self, display: RichProgress) -> None:
        self._display = display
        self._tasks: dict[str, TaskID] = {}

    def show(self, progress: Progress) -> None:
        """Take one record; this is the callback of `SnapshotStore`."""
        text = f"{progress.what} step {progress.step} ({progress.tier})"
        figures = f"{progress.total_bytes / 1e6:,.1f} MB, {progress.gb_per_s:.2f} GB/s"
        if progress.status == "failed":
            figures = "given up"
        self._draw(progress.what, text, progress.done_bytes, progress.total_bytes, figures)

    def train(self, title: str, step: int, num_steps: int, loss: float) -> None:
        """A step of the training is done."""
        self._draw("train", title, step + 1, num_steps, f"step {step}, loss {loss:.4f}")

    def _draw(self, key: str, text: str, done: int, total: int, figures: str) -> None:
        if key not in self._tasks:
            self._tasks[key] = self._display.add_task(text, figures=figures)
        self._display.update(
            self._tasks[key], description=text, completed=done, total=total, figures=figures
        )


@contextmanager
def bars_on(stream: TextIO) -> Iterator[Bars | None]:
    """Draw on `stream` until left; None, and plain lines are up to the caller, if it is no terminal."""
    if not stream.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Display
    except ImportError:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Display(*columns, console=Console(file=stream)) as display:
        yield Bars(display)
