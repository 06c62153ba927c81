"""Open a session: connect the ranks, adopt what a dead run left near them, agree on what to protect."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import msgspec

from shardstore.cluster.connect import connect
from shardstore.cluster.coordination import Coordinator
from shardstore.engine.catalog import Catalog
from shardstore.engine.choose import Candidate, Chooser, Holding, Inventory
from shardstore.engine.joining import RootCard, card_of, group, join, part, was_private
from shardstore.engine.liveness import RootClass
from shardstore.engine.ondisk import OnDisk
from shardstore.engine.openmemory import open_memory, warn_of_root
from shardstore.engine.options import OpenOptions
from shardstore.engine.protecting import Near, protect
from shardstore.engine.session import Session, writer_versions
from shardstore.engine.verdicts import Note, merge_notes, note_of, raise_note
from shardstore.format.gist import Gist
from shardstore.format.records import SnapshotId
from shardstore.tiers.addresses import is_url
from shardstore.tiers.adoption import Adopted
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.localdisk import LocalDisk
from shardstore.tiers.places import check_disk, check_remote, check_root
from shardstore.tiers.roots import open_root

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # noqa: TID251 - a type only

    from shardstore.cluster.threads import ThreadRank


class _Report(msgspec.Struct, frozen=True):
    arguments: tuple[object, ...]
    inventory: Inventory
    on_disk: tuple[SnapshotId, ...]
    problem: Note | None
    pinned: tuple[SnapshotId, ...] = ()
    damaged: tuple[SnapshotId, ...] = ()
    unread: tuple[SnapshotId, ...] = ()
    root: RootCard = RootCard()


class _Agreement(msgspec.Struct, frozen=True):
    problem: Note | None = None
    near: Near = Near()
    roots: tuple[RootClass, ...] = ()
    """Which ranks see one folder, where these are several."""
    must_look: bool = False
    """They may be roots that hosts do not share: `near` is not known yet."""


def open_session(
    options: OpenOptions, process_group: ProcessGroup | ThreadRank | None, ops: FileOps
) -> Session:
    """Connect and agree; every rank calls it.

    Raises:
        CoordinationError: Ranks differ in their arguments, or one failed.
        TierError, ValueError: The memory folder or the disk cannot be used.
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
    catalog, on_disk = None, None
    gists: dict[SnapshotId, Gist] = {}
    marked: set[SnapshotId] = set()
    try:
        if options.root is not None:
            catalog = _open_catalog(options, options.root, coordinator, ops)
        on_disk = _open_disk(options, coordinator, ops)
        if on_disk is not None:
            gists, marked = on_disk.gists(), set(on_disk.disk.marked())
        memory, adopted = open_memory(options, coordinator, ops)
        warn_of_root(options, memory, coordinator.rank, ops)
    except Exception as raised:  # noqa: BLE001 - every rank must hear of it
        problem, error = note_of(raised, coordinator.rank), raised
    marked |= set(adopted.marked)
    inventory = _inventory(adopted, gists, marked)
    pinned, damaged = tuple(adopted.pinned), tuple(adopted.damaged)
    unread: tuple[SnapshotId, ...] = ()
    if on_disk is not None and problem is None:
        pinned += tuple(on_disk.disk.with_mark("pinned"))
        damaged += tuple(on_disk.disk.with_mark("damaged"))
        unread = tuple(on_disk.unread())
    root = RootCard()
    if catalog is not None and problem is None and _may_be_private(options, catalog, coordinator):
        root = card_of(
            catalog,
            host=platform.node(),
            boot_id=coordinator.boot_id,
            look=_looks_first(coordinator),
        )
    report = _Report(
        options.shared_arguments, inventory, tuple(gists), problem, pinned, damaged, unread, root
    )
    reports: list[_Report] = []

    def decide(values: list[bytes]) -> bytes:
        reports[:] = [msgspec.json.decode(value, type=_Report) for value in values]
        return msgspec.json.encode(_agree(reports, catalog))

    ops.point("adopted")
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
        on_disk=on_disk,
        keep=options.keep,
        timeout_s=options.timeout_s,
        writer=writer_versions(),
        nonce=coordinator.nonce,
        ops=ops,
        host=platform.node(),
        boot_id=coordinator.boot_id,
        highest_adopted_run=max([adopted.highest_run, *(i.run for i in gists)]),
        local_ranks=tuple(coordinator.local_ranks),
        shares_replicas=options.replicas == "once",
        shared=options.shared,
        is_one_folder=not agreement.roots and root.folder != (-1, -1),
    )
    session.marked |= marked
    near = agreement.near
    if agreement.must_look:
        try:
            near = _look_at_roots(session, agreement.roots, reports)
        except BaseException:
            part(session)
            memory.adopt(adopted.slots)
            memory.close(keep=True)
            raise
    ops.point("protect")
    protect(session, adopted, gists, near)
    return session


def _open_catalog(
    options: OpenOptions, root: str, coordinator: Coordinator, ops: FileOps
) -> Catalog:
    """The root, if it can be used at all; that it does not answer now is told, and may pass."""
    if not is_url(root):
        check_root(root)
        return Catalog(open_root(root, ops))
    tier = open_root(
        root, ops, storage_options=options.storage_options, timeout_s=options.timeout_s
    )
    tier.on_wait(lambda: coordinator.progress(1))
    check_remote(tier, coordinator.rank)
    return Catalog(tier)


def _may_be_private(options: OpenOptions, catalog: Catalog, coordinator: Coordinator) -> bool:
    """Whether ranks might see different roots under one path."""
    is_shared = options.shared is True or catalog.tier.is_shared is True
    return coordinator.world_size > 1 and not is_shared


def _looks_first(coordinator: Coordinator) -> bool:
    """Whether this rank looks at the root before it is known who sees which: one of each of several hosts."""
    is_one_host = len(coordinator.local_ranks) == coordinator.world_size
    return not is_one_host and coordinator.rank == min(coordinator.local_ranks)


def _look_at_roots(
    session: Session, classes: tuple[RootClass, ...], reports: list[_Report]
) -> Near:
    """Look at every root, and choose what every rank protects from what all of them have.

    Raises:
        CoordinationError: A rank is missing.
    """
    catalog = session.catalog
    assert catalog is not None
    join(session, classes, "open/roots")
    is_first = any(c.first == session.rank for c in classes)
    mine = is_first and was_private(catalog)

    def decide(values: list[bytes]) -> bytes:
        are_private = any(msgspec.json.decode(value, type=bool) for value in values)
        # Folders that differ, and that no run kept apart: hosts see one root each in its own way.
        found = session.catalog if are_private else catalog
        return msgspec.json.encode((are_private, _near(reports, found)))

    decided = session.coordinator.gather_decide(
        "open/private", msgspec.json.encode(mine), decide, phase="opening the store: its roots"
    )
    are_private, near = msgspec.json.decode(decided, type=tuple[bool, Near])
    if not are_private:
        part(session)
    return near


def _open_disk(options: OpenOptions, coordinator: Coordinator, ops: FileOps) -> OnDisk | None:
    if options.disk is None:
        return None
    assert options.name is not None
    check_disk(options.disk, memory_dir=options.memory_dir, root=options.root, ops=ops)
    location = os.path.join(options.disk, f"shardstore-{os.getuid()}", options.name)
    disk = LocalDisk(location, rank=coordinator.rank, ops=ops)
    return OnDisk(disk, local_ranks=tuple(coordinator.local_ranks))


def _inventory(
    adopted: Adopted, gists: Mapping[SnapshotId, Gist], marked: Collection[SnapshotId]
) -> Inventory:
    """What this rank can read near it."""
    world_sizes = {i: gist.world_size for i, gist in gists.items()}
    world_sizes |= {i: header.world_size for i, (header, _) in adopted.headers.items()}
    return Inventory(
        tuple(
            Holding(snapshot_id, world_size, is_complete=snapshot_id in marked)
            for snapshot_id, world_size in world_sizes.items()
        ),
        tuple(marked),
    )


def _agree(reports: list[_Report], catalog: Catalog | None) -> _Agreement:
    """On rank 0: refuse differing arguments, else choose what every rank protects."""
    problems = [(rank, r.problem) for rank, r in enumerate(reports) if r.problem is not None]
    if problems:
        return _Agreement(merge_notes(problems))
    for rank, report in enumerate(reports):
        if report.arguments != reports[0].arguments:
            labels = (
                "root", "name", "keep", "memory=0", "on_error", "on_full", "disk given", "replicas", "shared",
            )  # fmt: skip
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
                    "one root; a folder per rank is not one, unless shared=False says that each host has "
                    "its own.",
                    failed_ranks=(rank,),
                )
            )
    classes = group([report.root for report in reports])
    if len(classes) == 1:
        return _Agreement(near=_near(reports, catalog))
    looked = {rank for rank, report in enumerate(reports) if report.root.has_looked}
    are_seen = all(looked & {*c.ranks} for c in classes)
    if any(report.root.is_private for report in reports) or not are_seen:
        return _Agreement(roots=classes, must_look=True)
    return _Agreement(near=_near(reports, catalog), roots=classes)


def _near(reports: list[_Report], catalog: Catalog | None) -> Near:
    """On rank 0: what every rank protects."""
    inventories = [report.inventory for report in reports]
    found = Chooser(inventories, catalog, step=None).next()
    holders = [{h.id for h in i.holdings if h.world_size == len(reports)} for i in inventories]
    return Near(
        newest=found.id if isinstance(found, Candidate) else None,
        whole=tuple(set.intersection(*holders)),
        on_disks=tuple(set.intersection(*({*report.on_disk} for report in reports))),
        pinned=tuple({i for report in reports for i in report.pinned}),
        damaged=tuple({i for report in reports for i in report.damaged}),
        unread=tuple({i for report in reports for i in report.unread}),
    )
