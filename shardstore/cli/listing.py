"""`shardstore list`: what a root holds, and which tiers of this host have it, too."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import click
from msgspec import UNSET

from shardstore.cli.near import Near, look_near
from shardstore.cli.output import Column, moment, note, say_table, size, write_json
from shardstore.cli.parameters import json_option, near_options, root_argument
from shardstore.cli.places import find_root
from shardstore.engine.attempts import Attempt, find_attempts, missing_files
from shardstore.format.records import SnapshotId

_MAX_MISSING: Final = 1000


@dataclass(frozen=True, slots=True)
class _Line:
    id: SnapshotId
    state: str
    nbytes: int | None
    created: float | None
    world_size: int | None
    tiers: dict[str, tuple[int, ...] | None]
    """Ranks by tier, near to far; None: all of them."""
    is_pinned: bool
    metadata: object
    why: str

    def as_json(self) -> dict[str, Any]:
        near = {f"{tier}_ranks": list(r) for tier, r in self.tiers.items() if r is not None}
        return {
            "step": self.id.step,
            "id": self.id.name,
            "state": self.state,
            "nbytes": self.nbytes,
            "created": self.created,
            "pinned": self.is_pinned,
            "tiers": list(self.tiers),
            **near,
            "world_size": self.world_size,
            "metadata": self.metadata,
            "why": self.why,
        }


@click.command("list")
@root_argument
@click.option(
    "--all", "show_all", is_flag=True, help="Also attempts that are no snapshots, and why."
)
@near_options
@json_option
def list_(
    root: str, show_all: bool, as_json: bool, memory_dir: str, name: str | None, disk: str | None
) -> None:
    """List the snapshots in ROOT, oldest first.

    "restorable" is not committed on ROOT, but every rank's file is on this host or ROOT: a restart uses
    it. Looks at registers and names only; "verify" reads the bytes.
    """
    place = find_root(root, may_be_empty=True)
    near = look_near(place.root, memory_dir=memory_dir, name=name, disk=disk)
    lines = _lines(find_attempts(place.catalog), place.catalog.tier.list_ranks, near)
    if place.snapshot is not None:
        lines = [line for line in lines if line.id == place.snapshot]
        show_all = True
    good = [line for line in lines if line.state in ("committed", "restorable")]
    shown = lines if show_all else good
    if as_json:
        document = {
            "command": "list",
            "root": place.root,
            "snapshots": [line.as_json() for line in shown],
            "num_not_listed": len(lines) - len(shown),
        }
        write_json(document)
    elif shown:
        _say(
            shown,
            with_state=show_all or any(line.state != "committed" or line.why for line in shown),
        )
    elif not place.is_empty:
        note(f"there is no snapshot in {place.root}")
    if len(lines) > len(shown):
        states = [line.state for line in lines if line not in good]
        counts = ", ".join(f"{states.count(s)} {s}" for s in sorted(set(states)))
        note(f"not listed: {counts}. Add --all to see them and why")


def _lines(attempts: list[Attempt], ranks_on_root: Any, near: Near) -> list[_Line]:
    by_id: dict[SnapshotId, Attempt | None] = {attempt.id: attempt for attempt in attempts}
    by_id |= {snapshot_id: None for snapshot_id in near.ids() if snapshot_id not in by_id}
    lines = []
    for snapshot_id in sorted(by_id, key=lambda i: i.order):
        attempt = by_id[snapshot_id]
        ranks = near.ranks(snapshot_id)
        if attempt is not None and attempt.register is not None:
            lines.append(_committed(attempt, ranks))
        elif attempt is None or attempt.state == "torn":
            on_root = ranks_on_root(snapshot_id) if attempt is not None else []
            lines.append(_uncommitted(snapshot_id, attempt, on_root, ranks, near))
        else:
            tiers: dict[str, tuple[int, ...] | None] = {**ranks}
            if attempt.state == "damaged":
                tiers["root"] = None
            is_pinned = "pinned" in attempt.marks
            lines.append(
                _Line(
                    snapshot_id,
                    attempt.state,
                    None,
                    None,
                    None,
                    tiers,
                    is_pinned,
                    None,
                    attempt.why,
                )
            )
    return lines


def _committed(attempt: Attempt, ranks: dict[str, tuple[int, ...]]) -> _Line:
    register = attempt.register
    assert register is not None
    return _Line(
        attempt.id,
        attempt.state,
        register.nbytes,
        register.created,
        register.world_size,
        {**ranks, "root": None if register.here is UNSET else register.here},
        "pinned" in attempt.marks,
        register.metadata,
        attempt.why,
    )


def _uncommitted(
    snapshot_id: SnapshotId,
    attempt: Attempt | None,
    on_root: list[int],
    ranks: dict[str, tuple[int, ...]],
    near: Near,
) -> _Line:
    gist = near.gist(snapshot_id)
    tiers: dict[str, tuple[int, ...] | None] = {**ranks}
    if on_root:
        tiers["root"] = tuple(on_root)
    present = {rank for found in tiers.values() if found is not None for rank in found}
    world_size = gist.world_size if gist is not None else None
    is_whole = world_size is not None and all(rank in present for rank in range(world_size))
    why = "no manifest" if attempt is not None else "not on the root"
    if is_whole and gist is not None and not gist.persist:
        why = "saved with persist=False"
    elif not is_whole and world_size is not None:
        missing = (rank for rank in range(world_size) if rank not in present)
        why += f"; {missing_files(islice(missing, _MAX_MISSING))}"
    elif not present:
        why += "; no files of any rank"
    return _Line(
        snapshot_id,
        "restorable" if is_whole else "torn",
        None,
        gist.created if gist is not None else None,
        world_size,
        tiers,
        False,
        gist.metadata if gist is not None else None,
        why,
    )


def _say(lines: list[_Line], *, with_state: bool) -> None:
    columns = [
        Column("STEP", is_number=True),
        Column("ID"),
        *([Column("STATE")] if with_state else []),
        Column("SIZE", is_number=True),
        Column("CREATED"),
        Column("RANKS", is_number=True),
        Column("PINNED"),
        Column("TIERS"),
        *([Column("WHY")] if with_state else []),
    ]
    rows = [
        [
            str(line.id.step),
            line.id.name,
            *([line.state] if with_state else []),
            "" if line.nbytes is None else size(line.nbytes),
            "" if line.created is None else moment(line.created),
            "" if line.world_size is None else str(line.world_size),
            "yes" if line.is_pinned else "",
            ", ".join(_tier(tier, r, line.world_size) for tier, r in line.tiers.items()),
            *([line.why.split("\n")[0]] if with_state else []),
        ]
        for line in lines
    ]
    say_table(columns, rows)


def _tier(tier: str, ranks: tuple[int, ...] | None, world_size: int | None) -> str:
    if ranks is None or len(ranks) == world_size:
        return tier
    return f"{tier} ({len(ranks)} of {world_size or '?'})"
