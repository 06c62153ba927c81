"""Say which tensors differ on ranks that should be replicas of each other."""

from __future__ import annotations

from typing import Final

from shardstore.engine.session import PendingSave, Session
from shardstore.errors import ShardStoreError
from shardstore.format.records import SnapshotId

_MAX_NAMED: Final = 3


def warn_of_divergence(session: Session, save: PendingSave) -> None:
    """Warn once, on rank 0, that replicas have drifted apart. Nothing is lost: each has stored its own.

    What differs is read from the headers on the root, and only then.
    """
    if not save.diverged or save.id is None or "diverged" in session.told:
        return
    groups = save.diverged[0]
    ranks = sorted(rank for same in groups for rank in same)
    told = "; ".join(f"rank{'s' if same[1:] else ''} {_shown(same)}" for same in groups[:4])
    session.warn_once(
        "diverged",
        "%s: ranks %s should hold equal replicas of %s, and do not (%s say the same). Every rank's own bytes "
        "are stored, in files of full size, and a restore gives them back. Training may have drifted "
        "apart: compare the ranks, or restore from before",
        save.label, _shown(ranks), _names(session, save.id, groups), told,
    )  # fmt: skip


def _shown(ranks: tuple[int, ...] | list[int]) -> str:
    rest = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(map(str, ranks[:8])) + rest


def _names(session: Session, snapshot_id: SnapshotId, groups: tuple[tuple[int, ...], ...]) -> str:
    """Tensors that differ between two ranks, as their files tell."""
    if len(groups) < 2 or session.catalog is None:
        return "some tensors"
    try:
        a, b = (session.catalog.read_header(snapshot_id, same[0]).header for same in groups[:2])
    except (ShardStoreError, OSError):
        return "some tensors"
    theirs = {
        row.path: piece.digest
        for row, piece in zip(b.table, b.pieces, strict=True)
        if row.mesh is not None
    }
    names = [
        ".".join(row.path)
        for row, piece in zip(a.table, a.pieces, strict=True)
        if row.mesh is not None and theirs.get(row.path) != piece.digest
    ]
    if not names:
        return "some tensors"
    rest = f" and {len(names) - _MAX_NAMED} more" if names[_MAX_NAMED:] else ""
    return ", ".join(names[:_MAX_NAMED]) + rest
