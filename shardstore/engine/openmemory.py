"""Open the memory tier: is its folder a tmpfs, what did a dead run leave there, how much may be taken."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from shardstore.cluster.coordination import Coordinator
from shardstore.errors import TierError, TierFullError
from shardstore.tiers.addresses import is_url
from shardstore.tiers.adoption import Adopted, adopt_files, make_memory_folder
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.limits import Room, measured_budget, tightest_room
from shardstore.tiers.memory import MemoryTier
from shardstore.tiers.places import check_memory_dir, doubts_about_root

if TYPE_CHECKING:
    from shardstore.engine.options import OpenOptions

_LOG: Final = logging.getLogger("shardstore")


def open_memory(
    options: OpenOptions, coordinator: Coordinator, ops: FileOps
) -> tuple[MemoryTier, Adopted]:
    """The memory tier of this rank and what it adopts, within what the host's limits leave.

    Raises:
        TierError: The folder is somebody else's; or there is nowhere else to save to and it is unusable.
    """
    has_outer = options.root is not None or options.disk is not None
    folder, adopted = None, Adopted()
    memory_dir = None
    if options.name is not None and options.memory_bytes != 0:
        try:
            folder, adopted = _open_folder(options, options.name, coordinator, ops)
            memory_dir = options.memory_dir
        except TierError as error:
            if not has_outer or not _is_unusable(error):
                raise
            _LOG.warning(
                "rank %d: %s Until then saves go to the root through memory of this process, which a "
                "restart cannot use.", coordinator.rank, error,
            )  # fmt: skip
    num_local_ranks = len(coordinator.local_ranks)
    own = sum(slot.nbytes for slot in adopted.slots)
    budget, budget_from = options.memory_bytes, ""
    if budget is None:
        room = tightest_room(memory_dir, ops)
        budget = measured_budget(room, num_local_ranks=num_local_ranks) + own
        budget_from = (
            f' memory="auto" gave half of the {room.nbytes:,} bytes that were free under {room.where}, '
            f"for {num_local_ranks} rank(s) of this host. {room.remedy}"
        )
    elif coordinator.rank == min(coordinator.local_ranks):
        _warn_beyond(budget, own, num_local_ranks, tightest_room(memory_dir, ops, with_swap=True))
    memory = MemoryTier(
        folder,
        rank=coordinator.rank,
        owner=coordinator.nonce,
        budget_bytes=budget,
        has_outer=has_outer,
        ops=ops,
        num_local_ranks=num_local_ranks,
        budget_from=budget_from,
    )
    return memory, adopted


def warn_of_root(options: OpenOptions, memory: MemoryTier, rank: int, ops: FileOps) -> None:
    """Say once, on rank 0, that a root on a tmpfs is not durable."""
    if options.root is None or rank != 0 or is_url(options.root):
        return
    memory_dir = None if memory.folder is None else options.memory_dir
    doubt = doubts_about_root(options.root, memory_dir, ops)
    if doubt is not None:
        _LOG.warning("rank %d: %s", rank, doubt)


def _open_folder(
    options: OpenOptions, name: str, coordinator: Coordinator, ops: FileOps
) -> tuple[str, Adopted]:
    check_memory_dir(options.memory_dir, ops)
    folder = make_memory_folder(options.memory_dir, name, ops)
    return folder, adopt_files(folder, rank=coordinator.rank, owner=coordinator.nonce, ops=ops)


def _is_unusable(error: TierError) -> bool:
    """Whether the job can do without: the tmpfs is missing, read-only or full; not somebody else's folder."""
    return error.operation == "open" or isinstance(error, TierFullError)


def _warn_beyond(budget: int, own: int, num_local_ranks: int, room: Room) -> None:
    """Say at once that a budget is more than there is; what does not fit is refused when it comes."""
    wanted = max(0, budget - own) * num_local_ranks
    if wanted > room.nbytes and room.remedy:
        _LOG.warning(
            "memory=%s bytes for each of %d rank(s) of this host is more than the %s bytes left under "
            "%s: what does not fit there goes straight to the root, or is refused without one. %s",
            f"{budget:,}", num_local_ranks, f"{room.nbytes:,}", room.where, room.remedy,
        )  # fmt: skip
