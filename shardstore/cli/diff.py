"""`shardstore diff`: what changed between two snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import click

from shardstore.cli.choosing import choose_by_text
from shardstore.cli.output import Column, note, plural, say, say_table, write_json
from shardstore.cli.parameters import json_option, root_argument
from shardstore.cli.places import Place, find_root
from shardstore.cli.progress import byte_bar
from shardstore.engine.attempts import list_ranks
from shardstore.engine.difference import Difference, TensorDifference, compare_snapshots
from shardstore.engine.treediff import ValueDifference
from shardstore.format.records import SnapshotId

_MAX_SHOWN: Final = 40


@click.command()
@root_argument
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--other", metavar="ROOT2", help="Take B from this root.")
@click.option("--full", is_flag=True, help="Every difference, however many.")
@json_option
def diff(root: str, a: str, b: str, other: str | None, full: bool, as_json: bool) -> None:
    """Compare snapshots A and B: tensors, leaves, metadata.

    A and B are steps or ids, or "newest". Tensors with equal digests are not read. Bytes are counted as
    they are stored, each rank's copy by itself; for other topologies once per element. Exit code 1 if
    they differ.
    """
    left = find_root(root)
    right = left if other is None else find_root(other)
    ids = choose_by_text(left, a), choose_by_text(right, b)
    with byte_bar("comparing") as bar:
        found = compare_snapshots(
            (left.catalog, ids[0]), (right.catalog, ids[1]), begin=bar.begin, progress=bar.advance
        )
    if as_json:
        write_json(_as_json(left, right, ids, found))
    else:
        _say(left, right, ids, found, full=full)
    if not found.is_none:
        click.get_current_context().exit(1)


def _say(
    left: Place,
    right: Place,
    ids: tuple[SnapshotId, SnapshotId],
    found: Difference,
    *,
    full: bool,
) -> None:
    for letter, snapshot_id, place in (("A", ids[0], left), ("B", ids[1], right)):
        where = f"  in {place.root}" if left.root != right.root else ""
        say(f"{letter}  step {snapshot_id.step}  {snapshot_id.name}{where}")
    for text in found.topology:
        say(f"topology: {text}")
    if found.tensors:
        say()
        shown = found.tensors if full else found.tensors[:_MAX_SHOWN]
        say_table(
            [Column("TENSOR"), Column("DIFFERENCE"), Column("RANKS")],
            [[t.name, _what(t), list_ranks(t.ranks)] for t in shown],
        )
        _say_more(len(found.tensors) - len(shown), "tensor")
    for title, values in (("leaf", found.leaves), ("metadata", found.metadata)):
        _say_values(title, values, full=full)
    say()
    counted = sum(t.differing_bytes for t in found.tensors)
    if found.is_none:
        say(f"equal: {plural(found.num_equal, 'tensor')}, leaves, metadata and topology")
    else:
        say(
            f"{plural(len(found.tensors), 'tensor')} differ{'s' if len(found.tensors) == 1 else ''}, "
            f"by {counted:,} bytes where they can be compared; {found.num_equal:,} equal; "
            f"{plural(len(found.leaves), 'leaf value')} and "
            f"{plural(len(found.metadata), 'metadata value')} differ"
        )


def _what(tensor: TensorDifference) -> str:
    if tensor.kind == "bytes":
        share = 100 * tensor.differing_bytes / max(1, tensor.total_bytes)
        return f"{tensor.differing_bytes:,} of {tensor.total_bytes:,} bytes ({share:.3g} %)"
    if tensor.kind in ("only_a", "only_b"):
        text = tensor.a or tensor.b
        return f"only in {'A' if tensor.kind == 'only_a' else 'B'}: {text}"
    return f"{tensor.kind}: {tensor.a} in A, {tensor.b} in B"


def _say_values(title: str, values: Sequence[ValueDifference], *, full: bool) -> None:
    if not values:
        return
    say()
    shown = values if full else values[:_MAX_SHOWN]
    columns = [Column(title.upper()), Column("A"), Column("B")]
    rows = [[v.path, v.a or "(absent)", v.b or "(absent)"] for v in shown]
    if any(value.ranks for value in shown):
        columns.append(Column("RANKS"))
        rows = [[*row, list_ranks(v.ranks)] for row, v in zip(rows, shown, strict=True)]
    say_table(columns, rows)
    _say_more(len(values) - len(shown), "value")


def _say_more(number: int, noun: str) -> None:
    if number > 0:
        note(f"{plural(number, noun)} more: add --full")


def _as_json(
    left: Place, right: Place, ids: tuple[SnapshotId, SnapshotId], found: Difference
) -> dict[str, Any]:
    sides = [
        {"root": place.root, "step": snapshot_id.step, "id": snapshot_id.name}
        for place, snapshot_id in ((left, ids[0]), (right, ids[1]))
    ]
    return {
        "command": "diff",
        "a": sides[0],
        "b": sides[1],
        "equal": found.is_none,
        "num_equal_tensors": found.num_equal,
        "topology": found.topology,
        "tensors": [
            {
                "name": t.name,
                "kind": t.kind,
                "a": t.a,
                "b": t.b,
                "differing_bytes": t.differing_bytes,
                "total_bytes": t.total_bytes,
                "ranks": list(t.ranks),
            }
            for t in found.tensors
        ],
        "leaves": [_value_json(value) for value in found.leaves],
        "metadata": [_value_json(value) for value in found.metadata],
    }


def _value_json(value: ValueDifference) -> dict[str, Any]:
    return {"path": value.path, "a": value.a, "b": value.b, "ranks": list(value.ranks)}
