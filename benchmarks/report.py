"""The committed page of results and its chart, from the files that `benchmarks.compare --json` wrote.

python -m benchmarks.report FILE... [--into docs]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.chart import draw
from benchmarks.table import Row, Table, figure

PAGE = "benchmarks.md"
CHART = "benchmarks.png"
_HEAD = f"""# Benchmarks

Written by `python -m benchmarks.report`; run it again instead of editing. Seconds are medians over the runs. Systems take turns,
in the opposite order each other run, on one state and one disk; the bare machine is measured among them. A cold read comes after the
pages of the file were dropped from the page cache; every system first saved and loaded once, and the values were compared. Until
durable means fsynced, also for libraries that leave it to their caller. Neighbours of a machine move absolute figures: only ratios
of one run mean something.

![Seconds of each system]({CHART})
"""
_TAIL = """
## How to repeat it

The peers beyond torch and safetensors are no dependencies of shardstore. Where they are missing, their rows say so:

    pip install torchsnapshot torch_checkpointing fastsafetensors
    python -m benchmarks.compare --state all --json results.json
    python -m benchmarks.report results.json

Peak memory beyond the state is the highest sum of RssAnon of a process with its children and of shared memory (tmpfs, memfd; each
page once), less what it was when only the state was there; page cache is not counted. `shardstore` had a budget for two snapshots
and used it; the others keep nothing in memory once a save is durable, but for reused buffers. Its loads verify a digest of every byte. Slow-down compares the speed of a loop beside a
save with its speed right before and after it. `torch_checkpointing` runs without its direct writes, which fail on ext4, and
stages before `save` returns, as its staging beside training needs a lock in the training loop. `fastsafetensors` reads
the file of `save_file`.
"""


def page(results: list[dict[str, Any]]) -> str:
    """The Markdown text."""
    lines = [_HEAD]
    told = None
    for result in results:
        if result["machine"] != told:
            told = result["machine"]
            lines += [*(f"- {name}: {value}" for name, value in told.items()), ""]
        lines += [f"Command: `{result['command']}`", ""]
        for table in map(Table.from_json, result["tables"]):
            lines += [*_section(table), ""]
    return "\n".join(lines).rstrip() + "\n" + _TAIL


def _section(table: Table) -> Iterable[str]:
    """One state: its targets, then all rows."""
    yield f"## {table.state[0].upper()}{table.state[1:]}"
    yield ""
    yield f"{table.runs} runs."
    yield ""
    yield "| Target | measured | aim | |"
    yield "|---|---:|---|---|"
    for target, value, verdict in table.verdicts():
        shown = "-" if value is None else f"{value:.2f}"
        text = "**not met**" if verdict == "NOT MET" else verdict
        yield f"| {target.what} | {shown} | {target.limit} | {text} |"
    yield ""
    yield "| | median | best | worst | unit | GB/s |"
    yield "|---|---:|---:|---:|---|---:|"
    for name, row in sorted(table.rows.items(), key=lambda item: _place(item[0])):
        speed = f"{table.speed(name):.2f}" if row.unit == "s" else ""
        yield f"| {name} | {_figures(row)} | {row.unit} | {speed} |"
    if table.not_measured:
        yield ""
        yield "Not measured:"
        yield ""
        for what, why in table.not_measured.items():
            yield f"- {what}: {why}"


def _figures(row: Row) -> str:
    return " | ".join(map(figure, (row.median, min(row.values), max(row.values))))


def _place(name: str) -> tuple[int, str]:
    """The bare machine first, then ours, then the peers by name, then bookkeeping."""
    for place, start in enumerate(("bare:", "shardstore")):
        if name.startswith(start):
            return place, ""
    return (
        (3, "") if name.startswith("bookkeeping") else (2, name.split(":", maxsplit=1)[0].lower())
    )


def main() -> None:
    """Write page and chart."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, default=Path("docs"), help="folder; default: docs")
    options = parser.parse_args()
    results = [json.loads(file.read_text()) for file in options.files]
    options.into.mkdir(parents=True, exist_ok=True)
    (options.into / PAGE).write_text(page(results))
    tables = [Table.from_json(table) for result in results for table in result["tables"]]
    draw(tables, options.into / CHART)
    print(f"wrote {options.into / PAGE} and {options.into / CHART}")


if __name__ == "__main__":
    main()
