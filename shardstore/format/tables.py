"""Do the tensor tables of different ranks describe one and the same tensors?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from shardstore.format.records import Mesh, ShardHeader, TensorRow

RankTable: TypeAlias = "tuple[int, str, Sequence[TensorRow], tuple[Mesh, ...]]"
"""Rank, table digest, table, and the meshes that its rows refer to."""


def check_tables(headers: Iterable[ShardHeader]) -> list[str]:
    """List what ranks say differently about one DTensor: shape, dtype or placements.

    The same path on an equal mesh is one tensor. Ranks may have different tables (pipeline stages),
    and DTensors of one path on different meshes are different tensors. Linear in ranks and in distinct
    tables: equal tables are compared once. `pieces` and `leaves` are not looked at.

    Returns:
        One message per difference with path, ranks and both values; empty if the ranks agree.
    """
    return find_disagreements((h.rank, h.table_digest, h.table, h.meshes) for h in headers)


def find_disagreements(ranks: Iterable[RankTable]) -> list[str]:
    """Do the work of `check_tables` on its bare facts. Rows must refer to meshes that exist."""
    distinct: dict[tuple[str, tuple[Mesh, ...]], tuple[Sequence[TensorRow], list[int]]] = {}
    for rank, digest, table, meshes in ranks:
        distinct.setdefault((digest, meshes), (table, []))[1].append(rank)
    if len(distinct) < 2:
        return []
    first_seen: dict[tuple[tuple[str, ...], Mesh], tuple[TensorRow, list[int]]] = {}
    problems: list[str] = []
    for (_, meshes), (table, members) in distinct.items():
        for row in table:
            if row.mesh is None:
                continue
            other, others = first_seen.setdefault((row.path, meshes[row.mesh]), (row, members))
            if row is other:
                continue
            for name in ("shape", "dtype", "placements"):
                mine, theirs = getattr(row, name), getattr(other, name)
                if mine != theirs:
                    problems.append(
                        f"{'.'.join(row.path)}: {name} is {_show(theirs)} on {_show_ranks(others)}"
                        f" but {_show(mine)} on {_show_ranks(members)}, on the same mesh"
                    )
    return problems


def _show(value: object) -> str:
    if isinstance(value, tuple) and value and not isinstance(value[0], int):
        return f"({', '.join(_show_placement(item) for item in value)})"
    return str(value)


def _show_placement(placement: object) -> str:
    facts = (getattr(placement, "dim", None), getattr(placement, "split_factor", None))
    inner = ", ".join(str(fact) for fact in facts if fact is not None)
    return f"{getattr(placement, 'type', placement)}({inner})"


def _show_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:4])
    rest = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{rest}"
