"""`shardstore doctor`: is this host, and this root, fit for a store?"""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from shardstore.cli.checks.check import Check
from shardstore.cli.output import note, say, say_status, write_json
from shardstore.cli.parameters import json_option, memory_dir_option
from shardstore.cli.places import PlaceError, open_catalog
from shardstore.engine.listing import resolve_root
from shardstore.tiers.addresses import is_url
from shardstore.tiers.fileops import current_ops
from shardstore.tiers.places import nearest


@click.command()
@click.argument("root", metavar="ROOT", required=False)
@click.option("--no-speed", is_flag=True, help="Do not measure speeds (a second or two).")
@memory_dir_option
@json_option
def doctor(root: str | None, no_speed: bool, memory_dir: str, as_json: bool) -> None:
    """Check this host, and ROOT: memory, limits, rights, speeds.

    Also that ROOT honours exclusive create and fsync.     Nothing is left behind in ROOT. Run it as the user and in the container of the job. Exit code 1 if a
    check fails; warnings alone are 0.
    """
    checks = _run(root, memory_dir=os.path.abspath(memory_dir), with_speed=not no_speed)
    failed = [check for check in checks if check.status == "fail"]
    if as_json:
        document = {
            "command": "doctor",
            "root": None if root is None else resolve_root(root),
            "ok": not failed,
            "checks": [
                {
                    "name": check.name,
                    "status": check.status,
                    "found": check.found,
                    "remedy": check.remedy,
                    "facts": check.facts,
                }
                for check in checks
            ],
        }
        write_json(document)
    else:
        _say(checks)
        if root is None:
            note("no root was given: shardstore doctor ROOT looks at that, too")
    if failed:
        click.get_current_context().exit(1)


def _run(root: str | None, *, memory_dir: str, with_speed: bool) -> list[Check]:
    from shardstore.cli.checks.folder import check_room, check_writing
    from shardstore.cli.checks.host import check_host
    from shardstore.cli.checks.jobs import check_jobs
    from shardstore.cli.checks.remote import check_remote
    from shardstore.cli.checks.speed import check_disk_speed, check_memory_speed

    try:
        path = resolve_root(root)
    except ValueError as error:
        raise PlaceError(str(error)) from None
    ops = current_ops()
    checks = check_host(memory_dir, ops, has_root=path is not None)
    if path is not None and is_url(path):
        catalog = open_catalog(path)
        remote = check_remote(catalog.tier, with_speed=with_speed)
        checks += remote
        if remote[0].status == "ok":
            checks += check_jobs(catalog)
    elif path is not None:
        found = nearest(path)
        if not os.path.isdir(found):
            text = f"{path} cannot be a folder: {found} is no folder"
            checks.append(Check("root", "fail", text, "Give another root."))
        else:
            if found != path:
                text = f"{path} does not exist yet: its parent {found} is looked at"
                checks.append(Check("root", "ok", text))
            checks += check_room(path, found, ops)
            checks += check_jobs(open_catalog(path))
            writing = check_writing(found, ops)
            checks += writing
            if with_speed and all(check.status != "fail" for check in writing):
                checks += check_disk_speed(found, ops)
    if with_speed:
        checks.append(check_memory_speed())
    return checks


def _say(checks: Sequence[Check]) -> None:
    label = max(len(check.name) for check in checks)
    for check in checks:
        say_status(check.status, f"{check.name:<{label}}  {check.found}")
        if check.remedy:
            say(f"      {check.remedy}")
    say()
    counts = {status: sum(c.status == status for c in checks) for status in ("ok", "warn", "fail")}
    say(", ".join(f"{number} {status}" for status, number in counts.items() if number))
