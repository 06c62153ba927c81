"""`shardstore pin` and `unpin`: exempt snapshots from retention."""

from __future__ import annotations

import click

from shardstore.cli.choosing import choose_listed
from shardstore.cli.output import note, say, write_json
from shardstore.cli.parameters import json_option, root_argument
from shardstore.cli.places import find_root
from shardstore.engine.attempts import examine

_step_argument = click.argument("step", metavar="STEP")


@click.command()
@root_argument
@_step_argument
@json_option
def pin(root: str, step: str, as_json: bool) -> None:
    """Exempt the snapshots at STEP from retention.

    STEP may be an id, for one of several at a step, or "newest". Exit code 1 if it is pinned, and damaged.
    """
    _set(root, step, on=True, as_json=as_json)


@click.command()
@root_argument
@_step_argument
@json_option
def unpin(root: str, step: str, as_json: bool) -> None:
    """Leave the snapshots at STEP to retention again.

    STEP may be an id, for one of several at a step, or "newest".
    """
    _set(root, step, on=False, as_json=as_json)


def _set(root: str, step: str, *, on: bool, as_json: bool) -> None:
    place = find_root(root)
    catalog = place.catalog
    ids = choose_listed(place, step)
    verb = "pinned" if on else "unpinned"
    changed = {i: catalog.is_pinned(i) != on for i in ids}
    for snapshot_id in ids:
        (catalog.pin if on else catalog.unpin)(snapshot_id)
    problems = {i: list(examine(catalog, i).problems) if on else [] for i in ids}
    if as_json:
        snapshots = [
            {
                "step": i.step,
                "id": i.name,
                "pinned": on,
                "changed": changed[i],
                "problems": problems[i],
            }
            for i in ids
        ]
        command = "pin" if on else "unpin"
        write_json({"command": command, "root": place.root, "snapshots": snapshots})
    else:
        for snapshot_id in ids:
            say(f"{verb}  step {snapshot_id.step}  {snapshot_id.name}")
            if not changed[snapshot_id]:
                note(f"it was {verb} before" if on else "it was not pinned before")
            if not on and catalog.is_part(snapshot_id):
                note(
                    "other hosts have the rest of it: it stays pinned as long as one of them has a pin"
                )
    for snapshot_id in ids:
        for problem in problems[snapshot_id]:
            note(f"{snapshot_id.name} is damaged: {problem}")
    if any(problems.values()):
        click.get_current_context().exit(1)
