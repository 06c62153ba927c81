"""From `--step` and `--id` to snapshots, with what is there when that names none or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click

from shardstore.cli.output import note, plural
from shardstore.cli.places import Place, PlaceError
from shardstore.engine.catalog import Catalog
from shardstore.errors import TierError
from shardstore.format.records import SnapshotId

_MAX_LISTED: Final = 8


def choose_one(place: Place, *, step: str | None, id_: str | None) -> SnapshotId:
    """One attempt: the given one, the one at a step, or the newest committed.

    Raises:
        PlaceError: There is none, or several snapshots are at that step: their ids are named.
        click.UsageError: The options contradict each other, or are no step.
    """
    if step == "all":
        raise click.UsageError("one snapshot is shown at a time: give a step or an id")
    found = _named(place, step, id_)
    if found is None:
        return _newest(place.catalog, place.root)
    committed = [i for i in found if _state(place.catalog, i) == "committed"]
    if len(committed) == 1:
        if len(found) > 1:
            others = ", ".join(i.name for i in found if i != committed[0])
            note(f"step {committed[0].step} was tried {len(found)} times; not committed: {others}")
        return committed[0]
    if len(found) == 1:
        return found[0]
    several = committed or found
    raise PlaceError(
        f"step {several[0].step} is there {len(several)} times, from several runs or saves. Say which one "
        f"by its id, oldest first:\n" + "\n".join(f"  {i.name}" for i in several)
    )


def choose_many(place: Place, *, step: str | None, id_: str | None) -> list[SnapshotId]:
    """Attempts: the given one, all at a step, the newest committed, or all of the root, oldest first.

    Raises:
        PlaceError: There is none.
        click.UsageError: The options contradict each other, or are no step.
    """
    if step == "newest":
        return [_newest(place.catalog, place.root)]
    if step == "all" and place.snapshot is None and id_ is None:
        return place.catalog.ids()
    found = _named(place, None if step == "all" else step, id_)
    return place.catalog.ids() if found is None else found


def _named(place: Place, step: str | None, id_: str | None) -> list[SnapshotId] | None:
    """Attempts that path and options name; None if they leave it open."""
    ids = place.catalog.ids()
    given = None if place.snapshot is None else place.snapshot.name
    if id_ is not None and given is not None and id_ != given:
        raise click.UsageError(f"the path is that of {given}, --id says {id_}")
    wanted = id_ or given
    if wanted is not None:
        found = [i for i in ids if i.name == wanted] or [i for i in ids if wanted in i.name]
        if len(found) != 1:
            raise PlaceError(_no_id(place.root, wanted, found or ids, is_several=bool(found)))
        if step not in (None, "newest", str(found[0].step)):
            raise click.UsageError(f"{found[0].name} is not of step {step}")
        return found
    if step is None or step == "newest":
        return None
    number = parse_step(step)
    found = [i for i in ids if i.step == number]
    if not found:
        raise PlaceError(_no_step(place.root, number, ids))
    return found


def choose_by_text(place: Place, text: str) -> SnapshotId:
    """One attempt by a step or an id, as a positional argument gives it."""
    is_step = text.isdigit() or text == "newest"
    return choose_one(
        Place(place.root), step=text if is_step else None, id_=None if is_step else text
    )


def choose_listed(place: Place, text: str) -> list[SnapshotId]:
    """Snapshots of the root at a step, or the one of an id, that were committed and not deleted.

    Raises:
        PlaceError: There is none.
        click.UsageError: It is neither.
    """
    is_step = text.isdigit() or text == "newest"
    found = choose_many(
        Place(place.root), step=text if is_step else None, id_=None if is_step else text
    )
    listed = [i for i in found if place.catalog.is_listed(i)]
    if not listed:
        states = ", ".join(f"{i.name} is {place.catalog.state(i)}" for i in found)
        raise PlaceError(f"nothing of {text} is committed in {place.root}: {states}")
    return listed


def parse_step(text: str) -> int:
    """Read a step.

    Raises:
        click.UsageError: It is none.
    """
    if not (text.isascii() and text.isdigit()) or len(text) > 19:
        raise click.UsageError(f"{text!r} is no step: give a number from 0 on")
    return int(text)


def _state(catalog: Catalog, snapshot_id: SnapshotId) -> str:
    """Of a register; one that cannot be read must not hide the others."""
    try:
        return catalog.state(snapshot_id)
    except TierError:
        return "damaged"


def _newest(catalog: Catalog, root: str) -> SnapshotId:
    ids = catalog.ids()
    for snapshot_id in reversed(ids):
        if _state(catalog, snapshot_id) == "committed":
            return snapshot_id
    if not ids:
        raise PlaceError(f"there is no snapshot in {root}: runs began, none saved one")
    note(f"no snapshot in {root} is committed: this is the newest of {plural(len(ids), 'attempt')}")
    return ids[-1]


def _no_id(root: str, wanted: str, ids: Sequence[SnapshotId], *, is_several: bool) -> str:
    listed = "\n".join(f"  {i.name}" for i in ids[-_MAX_LISTED:])
    if is_several:
        return f"{wanted} is part of several ids:\n{listed}"
    return f"there is no {wanted} in {root}. The newest there are:\n{listed or '  none'}"


def _no_step(root: str, step: int, ids: Sequence[SnapshotId]) -> str:
    steps = sorted({i.step for i in ids})
    if not steps:
        return f"there is no step {step} in {root}: it has no snapshots"
    near = sorted(sorted(steps, key=lambda s: abs(s - step))[:_MAX_LISTED])
    kind = "nearest" if len(near) < len(steps) else "steps that"
    return f"there is no step {step} in {root}; {kind} are there: {', '.join(map(str, near))}"
