"""Horizontal bars: blocked, until durable and load of each system, beside the bare machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks.table import Row, Table, figure

_PANELS = (
    ("save blocks", r"save blocks(, per tensor)?$", "bare: warm copy"),
    ("save until durable", r"save until durable(, per tensor)?$", "bare: write + fsync"),
    ("load or restore, cold disk", r"(load, cold(, per tensor)?|restore from disk, cold, fresh process)$", "bare: cold read"),
)  # fmt: skip
_COLOURS = {"ours": "#2a6fbb", "bare": "#555555", "peer": "#c8ccd1"}
_BAR_INCHES = 0.27


def bars(table: Table, pattern: str, bare: str) -> list[tuple[str, Row]]:
    """System and row, quickest last; the bare machine's first."""
    found = []
    for name, row in table.rows.items():
        system, _, what = name.partition(": ")
        if system != "bare" and re.match(pattern, what):
            fresh = "fresh process" in what and f"{system}: load, cold" in table.rows
            found.append((f"{system}, fresh process" if fresh else system, row))
    found.sort(key=lambda item: -item[1].median)
    limit = table.rows.get(bare) or table.rows.get(f"{bare}, per tensor")
    return [*found, *([(bare, limit)] if limit is not None else [])]


def draw(tables: list[Table], path: Path) -> None:
    """One row of three panels per table, as PNG. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    contents = [[bars(table, pattern, bare) for _, pattern, bare in _PANELS] for table in tables]
    heights = [0.9 + _BAR_INCHES * max(1, *map(len, panels)) for panels in contents]
    canvas, grid = pyplot.subplots(
        len(tables), 3, figsize=(17, sum(heights)), squeeze=False, height_ratios=heights
    )
    for table, axes, panels in zip(tables, grid, contents, strict=True):
        for axis, (title, _, _), panel in zip(axes, _PANELS, panels, strict=True):
            _draw_panel(axis, panel)
            axis.set_title(title, fontsize=10, loc="left")
        axes[0].set_title(f"{table.state}\n{_PANELS[0][0]}", fontsize=10, loc="left")
    canvas.tight_layout()
    canvas.savefig(path, dpi=110)
    pyplot.close(canvas)


def _draw_panel(axis: Any, panel: list[tuple[str, Row]]) -> None:
    for place, (name, row) in enumerate(panel):
        is_ours = name.split(",")[0] == "shardstore"
        kind = "bare" if name.startswith("bare") else "ours" if is_ours else "peer"
        axis.barh(place, row.median, color=_COLOURS[kind], height=0.7)
        axis.text(row.median, place, f" {figure(row.median)}", va="center", fontsize=8)
    axis.set_yticks(range(len(panel)), [name for name, _ in panel], fontsize=8)
    axis.set_xlabel(_unit(panel), fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.margins(x=0.14)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _unit(panel: list[tuple[str, Row]]) -> str:
    units = {row.unit for _, row in panel}
    return {"s": "seconds", "us": "microseconds per tensor"}.get("".join(units), "")
