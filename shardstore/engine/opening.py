"""Open a session: connect the ranks, adopt what a dead run left in memory, agree on what to protect."""

from __future__ import annotations

import logging
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from shardstore.cluster.connect import connect
from shardstore.cluster.coordination import Coordinator
from shardstore.engine.catalog import Catalog
from shardstore.engine.choose import Candidate, Chooser, Holding, Inventory
from shardstore.engine.listing import SnapshotInfo
from shardstore.engine.retention import plan_deletions
from shardstore.engine.session import Session, writer_versions
from shardstore.engine.verdicts import Note, merge_notes, note_of, raise_note
from shardstore.errors import TierError, TierFullError
from shardstore.format.records import SnapshotId
from shardstore.tiers.adoption import Adopted, adopt_files, make_memory_folder
from shardstore.tiers.disk import DiskTier
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.limits import Room, measured_budget, tightest_room
from shardstore.tiers.memory import MemoryTier
from shardstore.tiers.places import check_memory_dir, check_root, doubts_about_root

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # noqa: TID251 - a type only

_LOG: Final = logging.getLogger("shardstore")


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """Checked arguments of `SnapshotStore`."""

    root: str | None
    memory_bytes: int | None
    """None: measured."""
    memory_dir: str
    name: str | None
    keep: int | None
    timeout_s: float
    on_error: str
    on_full: str

    @property
    def shared_arguments(self) -> tuple[object, ...]:
        """What must be equal on all ranks."""
        return (
            self.root, self.name, self.keep, self.memory_bytes == 0, self.on_error, self.on_full,
        )  # fmt: skip


class _Report(msgspec.Struct, frozen=True):
    arguments: tuple[object, ...]
    inventory: Inventory
    problem: Note | None


class _Agreement(msgspec.Struct, frozen=True):
    problem: Note | None = None
    newest: SnapshotId | None = None
    everywhere: tuple[SnapshotId, ...] = ()
    """Readable in memory on all ranks."""


def open_session(options: OpenOptions, process_group: ProcessGroup | None, ops: FileOps) -> Session:
    """Connect and agree; every rank calls it.

    Raises:
        CoordinationError: Ranks differ in their arguments, or one failed.
        TierError: The memory folder cannot be used.
    """
    coordinator = connect(process_group, timeout_s=options.timeout_s)
    try:
        return _open(options, coordinator, ops)
    except BaseException:
        coordinator.abandon()
        raise


def _open(options: OpenOptions, coordinator: Coordinator, ops: FileOps) -> Session:
    problem, error = None, None
    adopted, memory = Adopted(), None
    catalog = None
    if options.root is not None:
        catalog = Catalog(DiskTier(options.root, name="root", ops=ops))
    try:
        if options.root is not None:
            check_root(options.root)
        memory, adopted = _open_memory(options, coordinator, ops)
        _warn_of_root(options, memory, coordinator.rank, ops)
    except Exception as raised:  # noqa: BLE001 - every rank must hear of it
        problem, error = note_of(raised, coordinator.rank), raised
    report = _Report(options.shared_arguments, _inventory(adopted), problem)

    def decide(values: list[bytes]) -> bytes:
        reports = [msgspec.json.decode(value, type=_Report) for value in values]
        return msgspec.json.encode(_agree(reports, catalog))

    decided = coordinator.gather_decide(
        "open", msgspec.json.encode(report), decide, phase="opening the store"
    )
    agreement = msgspec.json.decode(decided, type=_Agreement)
    if agreement.problem is not None or memory is None:
        if memory is not None:
            memory.adopt(adopted.slots)
            memory.close(keep=True)
        if error is not None:
            raise error
        assert agreement.problem is not None
        raise_note(agreement.problem, step=None)
    session = Session(
        coordinator=coordinator,
        memory=memory,
        catalog=catalog,
        keep=options.keep,
        timeout_s=options.timeout_s,
        writer=writer_versions(),
        nonce=coordinator.nonce,
        host=platform.node(),
        boot_id=coordinator.boot_id,
        highest_adopted_run=adopted.highest_run,
        local_ranks=tuple(coordinator.local_ranks),
    )
    _protect(session, adopted, agreement)
    return session


def _open_memory(
    options: OpenOptions, coordinator: Coordinator, ops: FileOps
) -> tuple[MemoryTier, Adopted]:
    folder, adopted = None, Adopted()
    memory_dir = None
    if options.name is not None and options.memory_bytes != 0:
        try:
            folder, adopted = _open_folder(options, options.name, coordinator, ops)
            memory_dir = options.memory_dir
        except TierError as error:
            if options.root is None or not _is_unusable(error):
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
        has_root=options.root is not None,
        ops=ops,
        budget_from=budget_from,
    )
    return memory, adopted


def _warn_of_root(options: OpenOptions, memory: MemoryTier, rank: int, ops: FileOps) -> None:
    if options.root is None or rank != 0:
        return
    memory_dir = None if memory.folder is None else options.memory_dir
    doubt = doubts_about_root(options.root, memory_dir, ops)
    if doubt is not None:
        _LOG.warning("rank %d: %s", rank, doubt)


def _open_folder(
    options: OpenOptions, name: str, coordinator: Coordinator, ops: FileOps
) -> tuple[str, Adopted]:
    check_memory_dir(options.memory_dir, ops)
    folder = make_memory_folder(options.memory_dir, name)
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


def _inventory(adopted: Adopted) -> Inventory:
    return Inventory(
        tuple(
            Holding(snapshot_id, header.world_size, is_complete=snapshot_id in adopted.marked)
            for snapshot_id, (header, _) in adopted.headers.items()
        ),
        tuple(adopted.marked),
    )


def _agree(reports: list[_Report], catalog: Catalog | None) -> _Agreement:
    """On rank 0: refuse differing arguments, else choose what every rank protects."""
    problems = [(rank, r.problem) for rank, r in enumerate(reports) if r.problem is not None]
    if problems:
        return _Agreement(merge_notes(problems))
    for rank, report in enumerate(reports):
        if report.arguments != reports[0].arguments:
            labels = ("root", "name", "keep", "memory=0", "on_error", "on_full")
            differing = "; ".join(
                f"{label} is {mine!r} on rank 0 and {theirs!r} on rank {rank}"
                for label, mine, theirs in zip(
                    labels, reports[0].arguments, report.arguments, strict=True
                )
                if mine != theirs
            )
            return _Agreement(
                Note(
                    "coordination",
                    f"ranks opened the store with different arguments: {differing}. All ranks must see "
                    "one root; a folder per rank is not one.",
                    failed_ranks=(rank,),
                )
            )
    inventories = [report.inventory for report in reports]
    found = Chooser(inventories, catalog, step=None).next()
    holders = [{h.id for h in i.holdings if h.world_size == len(reports)} for i in inventories]
    everywhere = set.intersection(*holders)
    return _Agreement(
        newest=found.id if isinstance(found, Candidate) else None,
        everywhere=tuple(sorted(everywhere, key=lambda i: i.order)),
    )


def _protect(session: Session, adopted: Adopted, agreement: _Agreement) -> None:
    """Take the adopted slots under P3's rule: the agreed newest is protected before any slot is reused."""
    memory, catalog = session.memory, session.catalog
    everywhere = set(agreement.everywhere)
    memory.set_newest_complete(agreement.newest)
    memory.adopt(adopted.slots)
    session.marked |= set(adopted.marked)
    for slot in adopted.slots:
        if slot.id is None or slot.id not in adopted.headers:
            continue
        header = adopted.headers[slot.id][0]
        session.adopted_world_sizes[slot.id] = header.world_size
        is_newest = slot.id == agreement.newest
        on_root = catalog.state(slot.id) if catalog is not None else "torn"
        committed = on_root == "committed"
        if on_root == "aborted":
            # Retired now: once the register is gone, a later start would take the copy for whole.
            memory.mark_failed(slot.id)
            continue
        if slot.id in everywhere:
            session.complete[slot.id] = SnapshotInfo(
                step=header.step,
                id=slot.id.name,
                tiers=("memory",),
                nbytes=slot.nbytes,
                created=header.created,
                pinned=False,
                metadata=header.metadata,
            )
            superseded = catalog is not None and header.persist and not is_newest
            if committed or superseded:
                slot.is_safe = True
        elif header.world_size != session.world_size or committed or slot.id in session.marked:
            # On the root, or of use for telling what is missing: goes when room is needed.
            slot.is_safe = True
        elif not is_newest:
            slot.is_failed = True
    if catalog is None:  # a crash may have come between "complete" and what it releases
        counted = [i for i in session.complete if not memory.is_kept(i)]
        for old in plan_deletions(counted, session.keep):
            session.forget(old)
