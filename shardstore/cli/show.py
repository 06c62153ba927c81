"""`shardstore show`: all that is known of one snapshot without reading its tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import click

from shardstore.cli.choosing import choose_one
from shardstore.cli.describing import DescribedTensor, describe_tensors, meshes_of
from shardstore.cli.near import look_near
from shardstore.cli.output import (
    Column,
    moment,
    note,
    plural,
    say,
    say_status,
    say_table,
    size,
    write_json,
)
from shardstore.cli.parameters import json_option, near_options, root_argument, which_options
from shardstore.cli.places import find_root
from shardstore.engine.attempts import Examination, RankFile, examine, list_ranks, part_here
from shardstore.engine.catalog import Catalog
from shardstore.engine.difference import describe_mesh
from shardstore.engine.liveness import judge
from shardstore.errors import TierError
from shardstore.format.records import SnapshotId

_MAX_RANKS: Final = 16
_MAX_TENSORS: Final = 40
_LIVES: Final = {"alive": "running", "dead": "ended", "unknown": "cannot be seen from here"}


@click.command()
@root_argument
@which_options("the newest committed")
@click.option("--full", is_flag=True, help="Every rank and tensor, however many.")
@near_options
@json_option
def show(
    root: str,
    step: str | None,
    id_: str | None,
    full: bool,
    as_json: bool,
    memory_dir: str,
    name: str | None,
    disk: str | None,
) -> None:
    """Show one snapshot: topology, ranks, tensors, tiers, health.

    Health is judged by the manifest and by the names and sizes of files; "verify" reads the bytes. Exit
    code 1 if it is not a whole, committed snapshot. ROOT may be the folder of a snapshot as well.
    """
    place = find_root(root)
    snapshot_id = choose_one(place, step=step, id_=id_)
    found = examine(place.catalog, snapshot_id)
    near = look_near(place.root, memory_dir=memory_dir, name=name, disk=disk)
    ranks_near = near.ranks(snapshot_id)
    tensors = describe_tensors(found)
    saved_by = _saved_by(place.catalog, snapshot_id)
    if as_json:
        write_json({**_as_json(place.root, found, tensors, ranks_near), "saved_by": saved_by})
    else:
        _say_facts(found, tensors, ranks_near, saved_by)
        _say_ranks(found.files, full=full)
        _say_tensors(tensors, full=full)
    if found.problems or found.state != "committed":
        click.get_current_context().exit(1)


def _saved_by(catalog: Catalog, snapshot_id: SnapshotId) -> str:
    """Which process, and whether it lives, as far as the record of its run tells."""
    try:
        record = catalog.run_record(snapshot_id.run)
    except TierError as error:
        return f"unknown: {error}"
    if record is None or record.nonce != snapshot_id.nonce:
        return ""
    return f"{record.who} ({_LIVES[judge(record, catalog.tier.location).liveness]})"


def _facts(found: Examination) -> dict[str, Any]:
    """What manifest or headers say of the whole."""
    if found.manifest is not None and found.manifest.world_size:
        m = found.manifest
        persist = m.persist is not False
        return {
            "created": m.created,
            "metadata": m.metadata,
            "writer": m.writer,
            "persist": persist,
        }
    if found.shards:
        first = found.shards[min(found.shards)].header
        return {
            "created": first.created,
            "metadata": first.metadata,
            "writer": first.writer,
            "persist": first.persist,
        }
    m_or_none = found.manifest
    created = None if m_or_none is None else m_or_none.created
    writer = {} if m_or_none is None else m_or_none.writer
    return {"created": created, "metadata": None, "writer": writer, "persist": True}


def _say_facts(
    found: Examination,
    tensors: Sequence[DescribedTensor],
    near: dict[str, tuple[int, ...]],
    saved_by: str,
) -> None:
    facts = _facts(found)
    stored = sum(file.nbytes or 0 for file in found.files)
    hosts = sorted({file.host for file in found.files if file.host})
    num_files = sum(file.nbytes is not None for file in found.files)
    tiers = [_tier(tier, ranks, found.world_size) for tier, ranks in near.items()]
    if num_files:
        on_root = tuple(file.rank for file in found.files if file.nbytes is not None)
        tiers.append(_tier("root", on_root, found.world_size))
    lines = [
        ("snapshot", found.id.name),
        ("state", found.state),
        ("step", str(found.id.step)),
        ("run, save", f"{found.id.run}, {found.id.count}"),
        ("saved by", saved_by),
        ("created", "" if facts["created"] is None else moment(facts["created"])),
        ("world size", "unknown" if found.world_size is None else str(found.world_size)),
        ("hosts", ", ".join(hosts)),
        ("meshes", ", ".join(describe_mesh(mesh) for mesh in meshes_of(found))),
        ("size", f"{size(stored)} in {plural(num_files, 'file')}"),
        (
            "tensors",
            f"{len({t.name for t in tensors}):,}, {size(sum(t.nbytes for t in tensors))} by their shapes",
        ),
        ("tiers", ", ".join(tiers) or "none"),
        ("pinned", "yes: retention never deletes it" if "pinned" in found.marks else ""),
        ("metadata", "" if facts["metadata"] is None else json.dumps(facts["metadata"])),
        ("written by", ", ".join(f"{k} {v}" for k, v in facts["writer"].items())),
        ("reason", found.manifest.reason if found.manifest is not None else ""),
        ("persist", "" if facts["persist"] else "False: not counted by retention"),
    ]
    for label, text in lines:
        if text:
            say(f"{label:<11} {text}")
    say()
    if not found.problems and found.state == "committed":
        here = [file.rank for file in found.files if file.nbytes is not None]
        part = "" if found.manifest is None else part_here(found.manifest, here)
        text = part or "every rank's file is there with its size"
        say_status("ok", f"{text} (for the bytes: shardstore verify)")
    for problem in found.problems:
        say_status("fail", problem)
    if found.state == "aborted":
        say_status("warn", "aborted: this save failed, its bytes are removed by gc or the next run")
    if found.others:
        say_status("warn", f"also in the folder: {', '.join(found.others)}")


def _tier(tier: str, ranks: tuple[int, ...], world_size: int | None) -> str:
    if len(ranks) == world_size:
        return tier
    return f"{tier} ({list_ranks(ranks)} of {world_size or '?'})"


def _say_ranks(files: Sequence[RankFile], *, full: bool) -> None:
    say()
    bad = [file for file in files if file.problem]
    shown = (
        files if full else [*bad[:_MAX_RANKS], *(f for f in files if not f.problem)][:_MAX_RANKS]
    )
    rows = [
        [
            str(file.rank),
            file.host,
            "" if file.nbytes is None else size(file.nbytes),
            file.problem.split("\n")[0] or ("ok" if file.nbytes is not None else "on its host"),
        ]
        for file in sorted(shown, key=lambda file: file.rank)
    ]
    columns = [
        Column("RANK", is_number=True), Column("HOST"), Column("SIZE", is_number=True), Column("FILE"),
    ]  # fmt: skip
    say_table(columns, rows)
    if len(files) > len(shown):
        note(f"{plural(len(files) - len(shown), 'rank')} more: add --full")


def _say_tensors(tensors: Sequence[DescribedTensor], *, full: bool) -> None:
    if not tensors:
        return
    say()
    shown = tensors if full else tensors[:_MAX_TENSORS]
    rows = [
        [
            t.name,
            t.row.dtype,
            _shape(t.row.shape),
            size(t.nbytes),
            t.placements,
            list_ranks(t.ranks),
        ]
        for t in shown
    ]
    columns = [
        Column("TENSOR"), Column("DTYPE"), Column("SHAPE"), Column("SIZE", is_number=True),
        Column("HELD"), Column("BY"),
    ]  # fmt: skip
    say_table(columns, rows)
    if len(tensors) > len(shown):
        note(f"{plural(len(tensors) - len(shown), 'tensor')} more: add --full")


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _as_json(
    root: str,
    found: Examination,
    tensors: Sequence[DescribedTensor],
    near: dict[str, tuple[int, ...]],
) -> dict[str, Any]:
    on_root = [file.rank for file in found.files if file.nbytes is not None]
    tiers: dict[str, list[int]] = {tier: list(ranks) for tier, ranks in near.items()}
    return {
        "command": "show",
        "root": root,
        "id": found.id.name,
        "step": found.id.step,
        "run": found.id.run,
        "count": found.id.count,
        "state": found.state,
        "ok": not found.problems and found.state == "committed",
        "problems": list(found.problems),
        "reason": found.manifest.reason if found.manifest is not None else "",
        **_facts(found),
        "pinned": "pinned" in found.marks,
        "marked_damaged": "damaged" in found.marks,
        "world_size": found.world_size,
        "nbytes": sum(file.nbytes or 0 for file in found.files),
        "tiers": {**tiers, **({"root": on_root} if on_root else {})},
        "meshes": [
            {
                "shape": list(mesh.shape),
                "axis_names": None if mesh.axis_names is None else list(mesh.axis_names),
                "device_type": mesh.device_type,
                "ranks": list(mesh.ranks),
            }
            for mesh in meshes_of(found)
        ],
        "ranks": [
            {
                "rank": file.rank,
                "host": file.host,
                "nbytes": file.nbytes,
                "expected_nbytes": file.expected_bytes,
                "problem": file.problem,
            }
            for file in found.files
        ],
        "tensors": [_tensor_json(tensor) for tensor in tensors],
    }


def _tensor_json(tensor: DescribedTensor) -> dict[str, Any]:
    row = tensor.row
    return {
        "name": tensor.name,
        "path": list(row.path),
        "dtype": row.dtype,
        "shape": list(row.shape),
        "nbytes": tensor.nbytes,
        "placements": None
        if row.placements is None
        else [
            {"type": p.type, "dim": p.dim, "split_factor": p.split_factor} for p in row.placements
        ],
        "mesh": None if tensor.mesh is None else describe_mesh(tensor.mesh),
        "private": row.private,
        "alias_of": tensor.alias_of,
        "ranks": tensor.ranks,
    }
