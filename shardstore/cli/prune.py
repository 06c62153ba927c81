"""`shardstore prune`: delete old snapshots by a policy, when somebody says so."""

from __future__ import annotations

import click

from shardstore.cli.output import Column, note, plural, say, say_table, size, write_json
from shardstore.cli.parameters import json_option, root_argument, writer, yes_option
from shardstore.cli.places import find_root
from shardstore.engine.pruning import Pruned, find_broken, prune
from shardstore.engine.retention import Keep


@click.command("prune")
@root_argument
@click.option("--keep", type=click.IntRange(1), required=True, metavar="N", help="Newest to keep.")
@click.option(
    "--every-steps", type=click.IntRange(1), metavar="M", help="Also keep steps that M divides."
)
@yes_option
@json_option
def prune_(root: str, keep: int, every_steps: int | None, yes: bool, as_json: bool) -> None:
    """Delete snapshots in ROOT beyond the newest N. Says what would go; --yes does it.

    Newest is the order of saving. Pinned snapshots and those saved with persist=False stay; damaged ones
    do not count, whether marked or seen to be by manifests, names and sizes (exit code 1); bytes are not
    read: "verify --mark" does. The newest good one never goes. Do not prune while a job restores from ROOT.
    """
    place = find_root(root)
    policy = Keep(last=keep, every_steps=every_steps)
    broken = find_broken(place.catalog)
    found = prune(place.catalog, policy, writer=writer(), dry_run=not yes, damaged=broken)
    failed = [one for one in found if one.problem]
    if as_json:
        document = {
            "command": "prune",
            "root": place.root,
            "done": yes,
            "deleted": [
                {
                    "step": one.id.step,
                    "id": one.id.name,
                    "nbytes": one.nbytes,
                    "why": one.why,
                    "problem": one.problem,
                }
                for one in found
            ],
            "not_counted": [
                {"step": i.step, "id": i.name, "why": why} for i, why in broken.items()
            ],
        }
        write_json(document)
    else:
        _say(found, done=yes)
    for one in failed:
        note(f"step {one.id.step} is not gone yet: {one.problem}")
    for snapshot_id, why in broken.items():
        note(f"{snapshot_id.name} is damaged, and not counted: {why}")
    if failed or broken:
        click.get_current_context().exit(1)


def _say(found: list[Pruned], *, done: bool) -> None:
    if not found:
        say("there is nothing to delete")
        return
    columns = [
        Column("STEP", is_number=True),
        Column("ID"),
        Column("SIZE", is_number=True),
        Column("WHY"),
    ]
    say_table(columns, [[str(p.id.step), p.id.name, size(p.nbytes), p.why] for p in found])
    gone = [one for one in found if not one.problem] if done else found
    total = f"{plural(len(gone), 'snapshot')}, {size(sum(one.nbytes for one in gone))}"
    say(f"{total} deleted" if done else f"{total} would be deleted: add --yes")
