"""Compare the runs that `preempted_training.py` logged: tables, a plot, and the verdict.

    python examples/preempted_training_report.py DIR/logs --png losses.png

The first run is the uninterrupted one; every loss of the others must equal its loss of the same step
and rank bit for bit, and the last run must end with its parameters, optimizer moments, random states
and data position. Exits with status 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

NUM_RANKS: Final = 2
TIERS: Final = (None, None, "memory", "root")
"""What each run must have restored from."""


class RunLog:
    """What the ranks of one run have logged."""

    def __init__(self, folder: Path) -> None:
        launch = json.loads((folder / "launch.json").read_text())
        self.title: str = launch["title"]
        self.launched: float = launch["time"]
        self.events: list[list[dict[str, Any]]] = []
        for rank in range(NUM_RANKS):
            text = (folder / f"rank-{rank}.jsonl").read_text()
            lines = text[: text.rfind("\n") + 1].splitlines()
            self.events.append([json.loads(line) for line in lines])
        self.losses: dict[tuple[int, int], tuple[str, str]] = {
            (rank, entry["step"]): (entry["own"], entry["mean"])
            for rank in range(NUM_RANKS)
            for entry in self.of(rank, "loss")
        }
        """(rank, step) to the rank's own loss and the mean of all ranks, as hexadecimal floats."""
        self.steps = sorted({step for _, step in self.losses})

    def of(self, rank: int, event: str) -> list[dict[str, Any]]:
        """Entries of one kind."""
        return [entry for entry in self.events[rank] if entry["event"] == event]

    def slowest(self, event: str, fact: str) -> float | None:
        """The highest figure of all ranks in the first entry of its kind; None if there is none."""
        found = [self.of(rank, event)[:1] for rank in range(NUM_RANKS)]
        return max((entry[0][fact] for entry in found if entry), default=None)

    def tier(self) -> str | None:
        """Where rank 0 says that the ranks restored from."""
        return next((entry["tier"] for entry in self.of(0, "restored")), None)


def find_differences(runs: list[RunLog]) -> list[str]:
    """Everything in which the later runs differ from the first; empty if all is equal."""
    expected, problems = runs[0].losses, []
    for run in runs[1:]:
        problems += [
            f"{run.title}: step {step}, rank {rank}: {loss} is not {expected.get((rank, step))}"
            for (rank, step), loss in run.losses.items()
            if loss != expected.get((rank, step))
        ]
    seen = {key for run in runs[1:] for key in run.losses}
    problems += [f"step {step}, rank {rank}: no loss" for rank, step in expected.keys() - seen]
    for rank in range(NUM_RANKS):
        first, last = (run.of(rank, "end")[0] for run in (runs[0], runs[-1]))
        problems += [f"rank {rank}: final {key} differ" for key in first if first[key] != last[key]]
    for run, tier in zip(runs, TIERS, strict=True):
        if run.tier() != (tier and f"{tier} ({NUM_RANKS} ranks)"):
            problems.append(f"{run.title}: restored from {run.tier()}, not from {tier}")
    return problems


def print_phases(runs: list[RunLog]) -> None:
    """Seconds that each phase took on the slowest rank."""
    columns = ("start", "set-up", "agree", "verify", "copy", "1st step")
    header = "".join(f"{name:>9}" for name in columns)
    print(f"\n{'Seconds':14}{header}   {'steps':8}losses equal")
    for run in runs:
        imported = run.slowest("imported", "time") or 0.0
        opened = run.slowest("opened", "time") or run.slowest("ready", "time") or 0.0
        times: list[float | None] = [imported - run.launched, opened - imported]
        times += [run.slowest("restored", f"{phase}_s") for phase in ("agree", "verify", "copy")]
        times += [run.slowest("loss", "seconds")]
        cells = "".join(f"{'-':>9}" if t is None else f"{t:9.3f}" for t in times)
        equal = sum(loss == runs[0].losses.get(key) for key, loss in run.losses.items())
        verdict = "-" if run is runs[0] else f"{equal} of {len(run.losses)}"
        print(f"{run.title:14}{cells}   {f'{run.steps[0]}-{run.steps[-1]}':8}{verdict}")
    print("start: processes and imports; set-up: until the store is open; losses: of both ranks")


def print_losses(runs: list[RunLog]) -> None:
    """Losses right after each restart, and the last before the next end."""
    print(f"\n{'Mean loss':>10}  {'uninterrupted':24}{'restarted':24}{'run':14}equal")
    for run in runs[2:]:
        for step in dict.fromkeys((*run.steps[:2], run.steps[-1])):
            before, after = runs[0].losses[0, step][1], run.losses[0, step][1]
            equal = "yes" if before == after else "NO"
            print(f"{f'step {step}':>10}  {before:24}{after:24}{run.title:14}{equal}")


def plot(runs: list[RunLog], path: Path) -> None:
    """Draw the curve of the uninterrupted run, and the pieces of the killed ones over it."""
    try:
        import matplotlib as mpl
    except ImportError:
        print(
            "\nNo plot: matplotlib is missing (pip install matplotlib). The comparison needs none."
        )
        return
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for run in runs:
        losses = [float.fromhex(run.losses[0, step][1]) for step in run.steps]
        if run is runs[0]:
            axes.plot(run.steps, losses, label=run.title, linewidth=7, color="lightgray")
        else:
            axes.plot(run.steps, losses, label=run.title, linewidth=1.5)
        if run in runs[1:-1]:
            axes.axvline(run.steps[-1], color="black", linewidth=0.8, linestyle=":")
            axes.annotate(" SIGKILL", (run.steps[-1], 0.9), xycoords=("data", "axes fraction"))
    axes.set(xlabel="step", ylabel="mean loss (nats per byte)", title="Every rank killed twice")
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=120)
    print(f"\nLoss curves: {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the runs of preempted_training.py.")
    parser.add_argument("logs", type=Path)
    parser.add_argument("--png", type=Path, default=Path("preempted_training.png"))
    args = parser.parse_args()
    runs = [RunLog(folder) for folder in sorted(args.logs.iterdir())]
    print_phases(runs)
    print_losses(runs)
    plot(runs, args.png)
    problems = find_differences(runs)
    for problem in problems[:20]:
        print(f"DIFFERS: {problem}")
    if not problems:
        print("All losses, parameters, moments, random states and data positions are equal.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
