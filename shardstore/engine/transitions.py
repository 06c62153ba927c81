"""One line in the log for each transition of a snapshot, with the facts as fields for machines.

Logger `shardstore`: INFO on rank 0, DEBUG on the others, and WARNING on a rank where something failed.
A formatter that knows nothing of the fields prints a readable text. One for machines finds them on the
LogRecord: all of `FIELDS` are on every such line, None where a fact does not apply.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from shardstore.format.records import SnapshotId

if TYPE_CHECKING:
    from shardstore.engine.session import Failure, PendingSave, Session

_LOG: Final = logging.getLogger("shardstore")

Event: TypeAlias = Literal[
    "staged",
    "sealed",
    "written",
    "committed",
    "skipped",
    "failed",
    "evicted",
    "released",
    "restored",
    "adopted",
    "progress",
]
"""staged: live state was copied and may change. sealed: this rank's file in memory is whole. written:
durable on `tier` on this rank. committed: safe on all ranks. skipped, failed: it will never be a
snapshot. evicted: memory gave its room to a later one. released: deleted, by `keep` or by the user.
restored: live state is this one. adopted: found in the memory that a dead run left. progress: long work
goes on."""

FIELDS: Final = ("event", "rank", "step", "id", "tier", "nbytes", "seconds")
"""id: name of the snapshot, None before it has one. nbytes: of this rank's file; of all ranks' files
where committed to the root. seconds: since `save` was called; of the call itself where restored."""


def tell(
    rank: int,
    event: Event,
    text: str,
    *values: object,
    step: int | None = None,
    snapshot_id: SnapshotId | str | None = None,
    tier: str | None = None,
    nbytes: int | None = None,
    seconds: float | None = None,
    is_warning: bool = False,
) -> None:
    """Write one line. Costs next to nothing where its level is off.

    Args:
        rank: This rank.
        event: What happened.
        text: For people, with `%` placeholders for `values`.
        *values: For `text`.
        step: Of the snapshot.
        snapshot_id: Of the snapshot.
        tier: Where it happened.
        nbytes: See FIELDS.
        seconds: See FIELDS.
        is_warning: It happened on this rank and somebody should look at it.
    """
    level = logging.WARNING if is_warning else logging.DEBUG if rank else logging.INFO
    if not _LOG.isEnabledFor(level):
        return
    name = snapshot_id.name if isinstance(snapshot_id, SnapshotId) else snapshot_id
    facts = (event, rank, step, name, tier, nbytes, seconds)
    if is_warning:
        text = f"rank {rank}: {text}"
    _LOG.log(level, text, *values, extra=dict(zip(FIELDS, facts, strict=True)))


def passed(
    session: Session,
    save: PendingSave,
    event: Literal["staged", "sealed", "written", "committed"],
    *,
    tier: str,
    nbytes: int | None = None,
) -> None:
    """A save has come to its next transition on this rank: note when, and say so."""
    save.seconds[event] = seconds = time.monotonic() - save.started
    nbytes = save.nbytes if nbytes is None else nbytes
    tell(
        session.rank, event, "%s is %s (%s): %.1f MB, %.3f s after save was called",
        save.id or save.label, event, tier, nbytes / 1e6, seconds,
        step=save.step, snapshot_id=save.id, tier=tier, nbytes=nbytes, seconds=seconds,
    )  # fmt: skip


def staged(session: Session, save: PendingSave) -> None:
    """Live state was copied and may change, unless this save is skipped or broken already."""
    if save.broken is None:
        passed(
            session,
            save,
            "staged",
            tier="memory" if save.streamed is None else session.outermost.tier,
        )


def report_staged(session: Session, save: PendingSave) -> None:
    """Tell the callback of a copy into memory, once the save is on its way: it may raise an interrupt."""
    if save.broken is None and save.streamed is None:
        session.progress.begin(
            "save", step=save.step, total_bytes=save.nbytes, tier="memory", started=save.started
        ).complete()


def lost(
    session: Session,
    save: PendingSave,
    event: Literal["skipped", "failed"],
    failure: Failure,
    *,
    is_warning: bool = False,
) -> None:
    """A save will never be a snapshot."""
    tell(
        session.rank, event, "%s %s: %s",
        save.label, "is skipped" if event == "skipped" else event, failure.describe(),
        step=save.step, snapshot_id=save.id, nbytes=save.nbytes,
        seconds=time.monotonic() - save.started, is_warning=is_warning,
    )  # fmt: skip


def of_memory(
    session: Session,
    event: Literal["evicted", "released", "adopted"],
    snapshot_id: SnapshotId,
    nbytes: int | None = None,
) -> None:
    """Something became of this rank's copy of a snapshot in memory."""
    why = {
        "evicted": "a later one needs its room",
        "released": "it was deleted",
        "adopted": "an earlier run left it",
    }
    tell(
        session.rank, event, "%s is %s: %s", snapshot_id, event, why[event],
        step=snapshot_id.step, snapshot_id=snapshot_id, tier="memory", nbytes=nbytes,
    )  # fmt: skip
