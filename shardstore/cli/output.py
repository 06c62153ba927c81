"""What commands print: plain aligned text, or one JSON document; both safe for any terminal."""

from __future__ import annotations

import json
import os
import shutil
import sys
import unicodedata
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, Final, NamedTuple

import click

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COLOURS: Final = {"ok": "green", "warn": "yellow", "fail": "red"}
_GAP: Final = "  "


class Column(NamedTuple):
    """One column of a table."""

    title: str
    is_number: bool = False
    """Aligned right."""


def printable(text: str) -> str:
    """Text from storage, with whatever a terminal would obey or hide written as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(text: str = "") -> None:
    """Print a line of the answer, to stdout."""
    click.echo("\n".join(printable(line) for line in text.split("\n")))


def note(text: str) -> None:
    """Print a message about the answer, to stderr."""
    click.echo("\n".join(printable(line) for line in text.split("\n")), err=True)


def write_json(document: dict[str, Any]) -> None:
    """Print the one JSON document of a command, to stdout. ASCII, whatever names are in it."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False))


def status_word(status: str, text: str | None = None) -> str:
    """`ok`, `warn` or `fail` in its colour, where somebody sees it."""
    word = status if text is None else text
    return click.style(word, fg=_COLOURS[status]) if _is_coloured() else word


def _is_coloured() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def say_status(status: str, text: str) -> None:
    """Print a text whose first line begins with `ok`, `warn` or `fail`; further lines are indented."""
    first, *rest = (printable(line) for line in text.split("\n"))
    click.echo(f"{status_word(status)}{' ' * (4 - len(status))}{_GAP}{first}")
    for line in rest:
        click.echo(f"{' ' * 6}{line}")


def size(nbytes: int) -> str:
    """Bytes for people: `1.50 GiB`."""
    value = float(nbytes)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{nbytes} B" if unit == "B" else f"{value:.2f} {unit}"


def moment(seconds: float) -> str:
    """Seconds since the epoch as UTC; the bare number where no calendar has it."""
    try:
        found = datetime.fromtimestamp(seconds, tz=timezone.utc)
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g}"
    return found.strftime("%Y-%m-%d %H:%M:%S UTC")


def plural(number: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def say_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print rows below titles. Nothing is ever cut: where a terminal is too narrow, each row is a block."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [
        max([len(column.title), *(_width(row[index]) for row in cells)])
        for index, column in enumerate(columns)
    ]
    if sys.stdout.isatty():
        total = sum(widths) + len(_GAP) * (len(widths) - 1)
        if total > shutil.get_terminal_size().columns:
            _say_blocks(columns, cells)
            return
    titles = _line(columns, [column.title for column in columns], widths)
    click.echo(click.style(titles, bold=True) if _is_coloured() else titles)
    if cells:
        click.echo("\n".join(_line(columns, row, widths) for row in cells))


def _say_blocks(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> None:
    label = max(len(column.title) for column in columns)
    for number, row in enumerate(cells):
        if number:
            click.echo()
        for column, cell in zip(columns, row, strict=True):
            if cell:
                click.echo(f"{column.title:<{label}}{_GAP}{cell}")


def _line(columns: Sequence[Column], row: Sequence[str], widths: Sequence[int]) -> str:
    parts = []
    for column, cell, width in zip(columns, row, widths, strict=True):
        blank = " " * (width - _width(cell))
        parts.append(blank + cell if column.is_number else cell + blank)
    return _GAP.join(parts).rstrip()


def _width(text: str) -> int:
    """Cells that a terminal gives to a text."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )
