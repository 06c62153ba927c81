"""Measured rows, the targets they are held to, and both as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Row:
    """Values of one figure, one per run."""

    unit: str = "s"
    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """What counts."""
        return statistics.median(self.values)


@dataclass(frozen=True)
class Target:
    """A bound on a row, or on the ratio of the medians of two rows of one run."""

    what: str
    of: str
    limit: str
    """For example "<= 1.15"."""
    by: str | None = None
    is_speed: bool = False
    """The ratio is of speeds: seconds of `by` over seconds of `of`."""

    def value(self, table: Table) -> float | None:
        """The figure; None where a row of it was not measured."""
        rows = [table.rows.get(name) for name in (self.of, self.by) if name is not None]
        medians = [row.median for row in rows if row is not None and row.values]
        if len(medians) < len(rows):
            return None
        if len(medians) == 1:
            return medians[0]
        return medians[1] / medians[0] if self.is_speed else medians[0] / medians[1]

    def is_met(self, value: float) -> bool:
        """Whether a figure keeps the bound."""
        relation, bound = self.limit.split()
        return value <= float(bound) if relation == "<=" else value >= float(bound)


def figure(value: float) -> str:
    """Three digits that matter, without exponents where they can be avoided."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


class Table:
    """All rows of one state."""

    def __init__(self, state: str, nbytes: int, runs: int) -> None:
        """`state`: what was saved, in words; its bytes turn seconds into GB/s."""
        self.state = state
        self.nbytes = nbytes
        self.runs = runs
        self.rows: dict[str, Row] = {}
        self.not_measured: dict[str, str] = {}
        self.targets: list[Target] = []

    def add(self, row: str, value: float, unit: str = "s") -> None:
        """Note one measurement."""
        self.rows.setdefault(row, Row(unit)).values.append(value)

    def skip(self, what: str, why: str) -> None:
        """Say that a system, or a figure, was not measured."""
        self.not_measured[what] = why

    def speed(self, row: str) -> float:
        """GB/s of a row of seconds."""
        return self.nbytes / self.rows[row].median / 1e9

    def verdicts(self) -> Iterable[tuple[Target, float | None, str]]:
        """Each target with its figure and "met", "NOT MET" or "not measured"."""
        for target in self.targets:
            value = target.value(self)
            if value is None:
                yield target, None, "not measured"
            else:
                yield target, value, "met" if target.is_met(value) else "NOT MET"

    def print(self) -> None:
        """Print all of it."""
        print(f"\n{self.state}, {self.runs} runs\n")
        print(f"{'':66} {'median':>9} {'best':>9} {'worst':>9}  unit  {'GB/s':>7}")
        for name, row in self.rows.items():
            best, worst = min(row.values), max(row.values)
            speed = f"{self.speed(name):7.2f}" if row.unit == "s" and row.median > 0 else ""
            shown = " ".join(f"{figure(value):>9}" for value in (row.median, best, worst))
            print(f"{name:66} {shown}  {row.unit:5} {speed}")
        for what, why in self.not_measured.items():
            print(f"{what}: not measured: {why}")
        print()
        for target, value, verdict in self.verdicts():
            shown = "-" if value is None else f"{value:.2f}"
            print(f"{target.what:78} {shown:>7}  {target.limit:8} {verdict}")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "state": self.state,
            "nbytes": self.nbytes,
            "runs": self.runs,
            "rows": {name: asdict(row) for name, row in self.rows.items()},
            "not_measured": self.not_measured,
            "targets": [asdict(target) for target in self.targets],
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Table:
        """The inverse of `to_json`."""
        table = cls(found["state"], found["nbytes"], found["runs"])
        table.rows = {name: Row(**row) for name, row in found["rows"].items()}
        table.not_measured = dict(found["not_measured"])
        table.targets = [Target(**target) for target in found["targets"]]
        return table
