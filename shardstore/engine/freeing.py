"""Memory is free for other saves once a snapshot is on the disks of all ranks, however slow the root is."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from shardstore.engine.session import PendingSave, Session


def on_disk_key(save: PendingSave, rank: int | None = None) -> str:
    """Where a rank says that it has its file on its disk; without `rank`: that all ranks have."""
    return f"ondisk/{save.count}" if rank is None else f"ondisk/{save.count}/{rank}"


def free_memory_once_on_disks(session: Session, save: PendingSave) -> list[Future[Any]]:
    """Say that this rank's file is on its disk, and mark the memory copy as safe once all ranks say so.

    Returns:
        What is looked out for from now on, to be cancelled when the outcome is known.
    """
    coordinator, snapshot_id = session.coordinator, save.id
    assert snapshot_id is not None
    watches: list[Future[Any]] = []

    def tell(heard: Future[Any]) -> None:
        if _has_come(heard):
            coordinator.propose_later(on_disk_key(save), b"1")

    def free(heard: Future[Any]) -> None:
        if _has_come(heard):
            session.memory.mark_safe(snapshot_id)

    coordinator.post(on_disk_key(save, session.rank), b"1")
    if session.rank == 0:
        ranks = range(session.world_size)
        watches.append(coordinator.watch([on_disk_key(save, rank) for rank in ranks]))
        watches[-1].add_done_callback(tell)
    watches.append(coordinator.watch([on_disk_key(save)]))
    watches[-1].add_done_callback(free)
    return watches


def _has_come(heard: Future[Any]) -> bool:
    return not heard.cancelled() and heard.exception() is None
