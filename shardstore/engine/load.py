"""One rank's part of a candidate: from the nearest tier whose copy is whole, verified in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from shardstore.engine.holders import as_twin, read_listed
from shardstore.engine.passing import PassingShard, merged_spans, truncated
from shardstore.engine.progress import Work
from shardstore.engine.ranks import header_in_job
from shardstore.engine.sealed import SealedShard
from shardstore.engine.shared import SharedShard, whole_layout
from shardstore.engine.verify import Verifier
from shardstore.engine.waiting import VISIBLE_WAIT_S, wait_until
from shardstore.errors import (
    CorruptSnapshotError,
    FormatError,
    FormatVersionError,
    ShardStoreError,
    TierError,
    TierFullError,
    TopologyMismatchError,
)
from shardstore.format.records import Manifest, ShardHeader
from shardstore.state.restore import RestorePlan, match_state
from shardstore.state.staging import views
from shardstore.tiers.base import RootTier, ShardReader
from shardstore.tiers.slots import Slot

if TYPE_CHECKING:
    from shardstore.engine.choose import Candidate
    from shardstore.engine.restore import RestoreOptions
    from shardstore.engine.session import Session


_LOST_S: Final = 10.0
"""After so long, a file that is not to be seen is taken for lost, and an older snapshot is tried."""


@dataclass(eq=False, slots=True)
class Loaded:
    """A verified shard and the plan that fills live state from it."""

    header: ShardHeader
    plan: RestorePlan
    tier: str
    resources: contextlib.ExitStack
    work: Work
    """Complete once live state is filled."""
    nbytes: int
    """Of the tensors that are needed."""
    passing: PassingShard | SharedShard | None = None
    """The file or files, where there is no memory to hold them."""

    def apply(self) -> None:
        """Fill live state."""
        if self.passing is None:
            self.plan.apply()
        else:
            targets, passing = self.plan.targets(), self.passing
            self.plan.apply_streamed(lambda: passing.fill(targets))
        self.work.complete()

    def close(self) -> None:
        """Give buffers and readers back; nothing live refers to them."""
        self.resources.close()


def load_shard(
    session: Session,
    state: Mapping[str, object],
    candidate: Candidate,
    options: RestoreOptions,
    problems: list[ShardStoreError],
) -> Loaded:
    """Compare, read, verify and allocate everything for one candidate. Live state is not touched.

    Args:
        session: Of this rank.
        state: What is to be filled.
        candidate: What to fill it from.
        options: Of the restore.
        problems: Gets what was wrong with each copy that cannot be used.

    Raises:
        StateMismatchError: It does not fit the live state or topology.
        CorruptSnapshotError, FormatError, TierError: No tier has a whole copy of this rank's shard.
    """
    manifest = _read_manifest(session, candidate)
    if candidate.world_size != session.world_size:
        raise TopologyMismatchError(
            f"snapshot {candidate.id} was saved by {candidate.world_size} ranks, this job has "
            f"{session.world_size}: a restore needs the topology of the save. To load it into another "
            "one, point torch.distributed.checkpoint's HuggingFaceStorageReader at its folder.",
            saved=f"{candidate.world_size} ranks",
            current=f"{session.world_size} ranks",
        )
    for reader, rank in _sources(session, candidate, manifest, problems):
        stack = contextlib.ExitStack()
        try:
            stack.enter_context(reader)
            return _load_from(session, reader, rank, state, candidate, manifest, options, stack)
        except TierFullError:
            stack.close()
            raise
        except (CorruptSnapshotError, FormatError, TierError) as error:
            stack.close()
            problems.append(error)
            session.warn("%s", error)
        except BaseException:
            stack.close()
            raise
    if len(problems) == 1:
        raise problems[0]
    where = "".join(f"\n  - {problem}" for problem in problems)
    raise CorruptSnapshotError(
        f"no readable copy of rank {session.rank} of {candidate.id}:{where}",
        tier=getattr(problems[-1], "tier", None) if problems else None,
        file=getattr(problems[-1], "file", None) if problems else None,
        tensor=getattr(problems[-1], "tensor", None) if problems else None,
    )


def proves_damage(problems: Sequence[ShardStoreError], candidate: Candidate) -> bool:
    """Whether every copy of this rank was read and is not what was saved: no fault that passes.

    A copy that is not there says nothing, unless the register says that it should be.
    """
    wrong = [
        isinstance(problem, CorruptSnapshotError | FormatError)
        and not isinstance(problem, FormatVersionError)
        for problem in problems
    ]
    absent = [
        isinstance(problem.__cause__, FileNotFoundError) and not candidate.is_committed
        for problem in problems
    ]
    return any(wrong) and all(w or a for w, a in zip(wrong, absent, strict=True))


def _read_manifest(session: Session, candidate: Candidate) -> Manifest | None:
    if not candidate.is_committed or session.catalog is None:
        return None
    catalog = session.catalog
    entry = catalog.entry(candidate.id)
    if session.classes and entry.state == "torn":
        return None  # committed on another host's root; the header says what this file is
    if entry.state == "torn":  # rank 0 has seen it: here it may take a moment
        patience_s = min(VISIBLE_WAIT_S, session.timeout_s / 4)
        wait_until(lambda: catalog.state(candidate.id) != "torn", patience_s)
        entry = catalog.entry(candidate.id)
    if entry.manifest is None or entry.state != "committed":
        raise CorruptSnapshotError(
            f"{candidate.id}: the manifest that rank 0 read is {entry.state} here. {entry.problem}",
            tier="root", file="manifest.json",
        )  # fmt: skip
    return entry.manifest


def _sources(
    session: Session,
    candidate: Candidate,
    manifest: Manifest | None,
    problems: list[ShardStoreError],
) -> Iterator[tuple[ShardReader, int]]:
    """Readers of this rank's shard, near to far, and whose file they read."""
    rank = session.rank
    memory = session.memory.open_shard(candidate.id)
    if memory is not None:
        yield memory, rank
    if session.on_disk is not None:
        try:
            on_disk = session.on_disk.disk.open_shard(candidate.id)
        except TierError as error:
            problems.append(error)
        else:
            if on_disk is not None:
                yield on_disk, rank
    if session.catalog is None:
        return
    twin = manifest.shards[rank].twin if manifest is not None else msgspec.UNSET
    for from_rank in (rank, *([] if twin is msgspec.UNSET else [twin])):
        try:
            reader = _open_on_root(session.catalog.tier, candidate, from_rank, session.timeout_s)
        except TierError as error:
            problems.append(error)
            continue
        if from_rank != rank:
            session.warn(
                "its own file of %s is lost, and held nothing of its own: rank %d says the same",
                candidate.id, from_rank,
            )  # fmt: skip
        yield reader, from_rank


def _open_on_root(tier: RootTier, candidate: Candidate, rank: int, timeout_s: float) -> ShardReader:
    """Open a file on the root. On remote storage, one that is committed may be seen later here than by its writer."""
    found: list[ShardReader] = []

    def is_there() -> bool:
        try:
            found.append(tier.open_shard(candidate.id, rank))
        except TierError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise
        return True

    if candidate.is_committed and tier.keeps_index:
        wait_until(is_there, min(_LOST_S, timeout_s / 4))
    return found[0] if found else tier.open_shard(candidate.id, rank)


def _load_from(
    session: Session,
    reader: ShardReader,
    file_rank: int,
    state: Mapping[str, object],
    candidate: Candidate,
    manifest: Manifest | None,
    options: RestoreOptions,
    stack: contextlib.ExitStack,
) -> Loaded:
    sealed = read_listed(reader, manifest, candidate.id, file_rank)
    if manifest is not None and file_rank != session.rank:
        sealed = as_twin(sealed, manifest, session.rank, source=reader.source)
    header = sealed.header
    _note_versions(session, header)
    plan = match_state(
        state,
        header_in_job(header, session.coordinator.group_ranks),
        rank=session.rank,
        world_size=session.world_size,
        strict=options.strict,
        partial=options.partial,
    )
    is_shared = header.sharing is not msgspec.UNSET
    layout = whole_layout(header) if is_shared else sealed.layout
    assert layout is not None
    passing: PassingShard | SharedShard | None = None
    slot = None
    if not reader.is_mapped:
        slot = session.memory.try_scratch(layout.nbytes)
    if slot is not None:
        stack.callback(session.memory.abandon_slot, slot)
    is_held = slot is not None or reader.is_mapped
    nbytes = sum(stop - start for start, stop in (layout.spans[row] for row in plan.needed))
    total_bytes = nbytes if is_held else 2 * nbytes  # what passes through is read twice
    work = session.progress.begin(
        "restore", step=header.step, total_bytes=total_bytes, tier=reader.tier
    )
    stack.callback(work.close)

    def verified(nbytes: int) -> None:
        session.coordinator.progress(nbytes)
        work.advance(nbytes)

    if is_shared:
        assert session.catalog is not None
        shared = SharedShard(
            session.catalog.tier, manifest, sealed, plan.needed, verified, file_rank=file_rank
        )
        if slot is not None:
            tensors = views(slot.view, layout, header.table, header.pieces)
            shared.fill({row: (tensors[row],) for row in plan.needed})
            plan.prepare({row: tensors[row] for row in plan.needed})
        else:
            shared.verify()
            plan.prepare(shared)
            passing = shared
    elif is_held:
        data = _verified_bytes(reader, sealed, plan.needed, slot, verified)
        tensors = views(data, layout, header.table, header.pieces)
        plan.prepare({index: tensors[index] for index in plan.needed})
    else:
        passing = PassingShard(sealed, reader, plan.needed, verified)
        passing.verify()
        plan.prepare(passing)
    return Loaded(header, plan, reader.tier, stack, work, nbytes, passing)


def _note_versions(session: Session, header: ShardHeader) -> None:
    """Warn once that another torch wrote this: the bytes are the same, its kernels may not be."""
    saved, current = header.writer.get("torch"), session.writer.get("torch")
    if saved == current or session.has_noted_versions:
        return
    session.has_noted_versions = True
    if session.rank == 0:
        session.warn(
            "%s was written with torch %s, this is %s: the bytes are the same, but training may not go "
            "on bit for bit",
            header.id, saved, current,
        )  # fmt: skip


def _verified_bytes(
    reader: ShardReader,
    sealed: SealedShard,
    needed: tuple[int, ...],
    slot: Slot | None,
    progress: Callable[[int], None],
) -> memoryview:
    """The file's bytes in host memory: its own, or read into `slot`. Verified as they come."""
    layout = sealed.layout
    assert layout is not None
    if slot is None:
        data = reader.read(0, reader.nbytes)
        assert isinstance(data, memoryview)
        Verifier(sealed, needed, reader, progress).feed(data, 0)
        return data
    view = slot.view

    def replace(data: memoryview, start: int) -> None:
        view[start : start + len(data)] = data

    verifier = Verifier(sealed, needed, reader, progress, replace)

    def place(start: int, stop: int) -> memoryview:
        return view[start:stop]

    for start, stop in merged_spans(layout, needed):
        end = reader.stream(start, stop, place, verifier.feed)
        if end != stop:
            raise truncated(reader, end, layout)
    verifier.finish()
    return view
