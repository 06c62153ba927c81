"""Ours, the peers and the bare machine on one state and disk, and every target with its ratio.

    python -m benchmarks.compare                            # 1 GiB in 64 tensors, 5 runs
    python -m benchmarks.compare --state gpt                # FSDP2 and AdamW, 4 GiB over 2 ranks
    python -m benchmarks.compare --state tiny               # 10,000 tensors
    python -m benchmarks.compare --state all --json FILE    # for `python -m benchmarks.report FILE`
    python -m benchmarks.compare --mib 64 --runs 2          # a quick look

Systems take turns, in the opposite order each other run. All use one state, one disk and one process; a cold read
comes after the file's pages were dropped from the page cache. Each system first saves and loads once,
and must load the right values. Packages that are not installed, or fail, are listed as not measured.
Absolute figures swing with the neighbours of a machine; ratios of medians in one run are what counts.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import tempfile
from pathlib import Path

from benchmarks import states
from benchmarks.bookkeeping import bookkeeping
from benchmarks.facts import facts
from benchmarks.gpt import num_layers
from benchmarks.memory import peaks
from benchmarks.ranks import NUM_RANKS, gpt
from benchmarks.restarts import restarts
from benchmarks.single import compare, per_tensor
from benchmarks.slowdown import slowdowns
from benchmarks.steady import steady
from benchmarks.table import Table
from benchmarks.targets import OF_STATE

MIB = 1 << 20


def measure(state: str, mib: int, runs: int, folder: Path) -> Table:
    """All rows of one state."""
    table = Table(_words(state, mib), mib * MIB, runs)
    table.targets = list(OF_STATE[state])
    folder.mkdir()
    if state == "gpt":
        gpt(table, folder)
    elif state == "tiny":
        num_tensors = states.num_tiny(mib)
        table.nbytes = num_tensors * states.TINY_BYTES
        compare(table, folder, functools.partial(states.tiny, num_tensors), with_machine=False)
        per_tensor(table, num_tensors)
    else:
        steady(table, folder)
        compare(table, folder, functools.partial(states.large, table.nbytes), with_machine=True)
        restarts(table, folder)
        peaks(table, folder)
        slowdowns(table, folder)
        bookkeeping(table, folder)
    return table


def _words(state: str, mib: int) -> str:
    if state == "gpt":
        depth, width = num_layers(mib * MIB)
        return f"gpt: {depth} layers of 7 tensors and width {width}, with AdamW moments, {mib} MiB over {NUM_RANKS} ranks"
    if state == "tiny":
        return f"tiny: {states.num_tiny(mib):,} tensors of 1 KiB, one process"
    return f"large: {mib} MiB in {states.NUM_LARGE} tensors, one process"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--state", choices=[*OF_STATE, "all"], default="large")
    parser.add_argument("--mib", type=int, help="size of the state; default: as above")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; default: a temporary one"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    if options.runs < 1 or (options.mib is not None and options.mib < 1):
        parser.error("--runs and --mib must be at least 1")
    folder = Path(tempfile.mkdtemp(prefix="shardstore-benchmark-", dir=options.folder))
    tables: list[Table] = []
    machine = facts(folder)
    try:
        for state in OF_STATE if options.state == "all" else [options.state]:
            mib = options.mib or states.DEFAULT_MIB[state]
            table = measure(state, mib, options.runs, folder / state)
            shutil.rmtree(folder / state)
            table.print()
            tables.append(table)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json is not None:
        size = "" if options.mib is None else f" --mib {options.mib}"
        results = {
            "command": f"python -m benchmarks.compare --state {options.state}{size} --runs {options.runs}",
            "machine": machine,
            "tables": [table.to_json() for table in tables],
        }
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
