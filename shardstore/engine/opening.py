"""Open a session: connect the ranks, adopt what a dead run left in memory, agree on what to protect."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from shardstore.cluster.connect import connect
from shardstore.cluster.coordination import Coordinator
from shardstore.engine.catalog import Catalog
from shardstore.engine.choose import Candidate, Chooser, Holding, Inventory
from shardstore.engine.listing import SnapshotInfo
from shardstore.engine.retention import plan_deletions
from shardstore.engine.session import Session, writer_versions
from shardstore.engine.transitions import of_memory
from shardstore.engine.verdicts import Note, merge_notes, note_of, raise_note
from shardstore.format.records import SnapshotId
from shardstore.tiers.adoption import Adopted, adopt_files, make_memory_folder
from shardstore.tiers.disk import DiskTier
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.limits import measured_budget
from shardstore.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # noqa: TID251 - a type only


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
        memory, adopted = _open_memory(options, coordinator, ops)
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
        memory_dir = options.memory_dir
        folder = make_memory_folder(memory_dir, options.name)
        adopted = adopt_files(folder, rank=coordinator.rank, owner=coordinator.nonce, ops=ops)
    budget = options.memory_bytes
    if budget is None:
        own = sum(slot.nbytes for slot in adopted.slots)
        measured = measured_budget(memory_dir, num_local_ranks=len(coordinator.local_ranks))
        budget = measured + own
    memory = MemoryTier(
        folder,
        rank=coordinator.rank,
        owner=coordinator.nonce,
        budget_bytes=budget,
        has_root=options.root is not None,
        ops=ops,
    )
    return memory, adopted


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
        of_memory(session, "adopted", slot.id, slot.nbytes)
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
