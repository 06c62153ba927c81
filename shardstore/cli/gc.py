"""`shardstore gc`: remove what dead runs left and no restart will use."""

from __future__ import annotations

import os

import click

from shardstore.cli.output import Column, note, plural, say, say_table, size, write_json
from shardstore.cli.parameters import (
    json_option,
    memory_dir_option,
    root_argument,
    writer,
    yes_option,
)
from shardstore.cli.places import find_root
from shardstore.engine.orphans import Orphan, find_orphans, remove_orphan


@click.command("gc")
@root_argument
@yes_option
@click.option(
    "--unknown",
    is_flag=True,
    help="Also what nobody can say of whether its run still lives: you know that none does.",
)
@memory_dir_option
@json_option
def gc_(root: str, yes: bool, unknown: bool, memory_dir: str, as_json: bool) -> None:
    """Remove what dead runs left half written in ROOT. Says what would go; --yes does it.

    Never touches snapshots, attempts of runs that live, what a restart would still commit, or files that
    are not shardstore's.
    """
    place = find_root(root)
    catalog = place.catalog
    found = find_orphans(
        catalog, memory_dirs=[os.path.abspath(memory_dir)], including_unknown=unknown
    )
    going = [orphan for orphan in found if orphan.may_go]
    problems = {o.path: remove_orphan(catalog, o, writer=writer()) for o in going} if yes else {}
    failed = {path: problem for path, problem in problems.items() if problem}
    unreadable = [orphan for orphan in found if orphan.kind == "unreadable"]
    if as_json:
        orphans = [
            {
                "kind": o.kind,
                "path": o.path,
                "id": None if o.id is None else o.id.name,
                "nbytes": o.nbytes,
                "run": o.run,
                "run_state": o.liveness,
                "may_go": o.may_go,
                "removed": yes and o.may_go and not problems[o.path],
                "why": o.why,
                "problem": problems.get(o.path, ""),
            }
            for o in found
        ]
        write_json({"command": "gc", "root": place.root, "done": yes, "orphans": orphans})
    else:
        _say(found, going, failed, done=yes)
    for path, problem in failed.items():
        note(f"{path} is not gone yet: {problem}")
    if failed or unreadable:
        click.get_current_context().exit(1)


def _say(found: list[Orphan], going: list[Orphan], failed: dict[str, str], *, done: bool) -> None:
    if not found:
        say("nothing is left over")
        return
    columns = [
        Column("GOES"),
        Column("KIND"),
        Column("PATH"),
        Column("SIZE", is_number=True),
        Column("RUN"),
        Column("WHY"),
    ]
    rows = [
        [
            "yes" if o.may_go else "no",
            o.kind,
            o.path,
            size(o.nbytes),
            o.liveness if o.run is None else f"{o.run}, {o.liveness}",
            o.why,
        ]
        for o in found
    ]
    say_table(columns, rows)
    gone = [orphan for orphan in going if orphan.path not in failed]
    total = f"{plural(len(gone), 'leftover')}, {size(sum(orphan.nbytes for orphan in gone))}"
    if not going:
        say("nothing may go")
    else:
        say(f"{total} removed" if done else f"{total} would be removed: add --yes")
    if any(o.liveness == "unknown" and not o.may_go and o.kind != "unreadable" for o in found):
        note(
            "of some nobody can say here whether their run lives. If you know that none does: --unknown"
        )
