"""What each rank posts when it has sealed, and how rank 0 puts it together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

from shardstore.cluster.coordination import Coordinator, Stopped
from shardstore.engine.rootfile import Replicas
from shardstore.engine.sealed import SealedShard, problems_between
from shardstore.engine.session import Failure, PendingSave, Session
from shardstore.format.records import NearCopy, ShardHeader, Sharing, TensorRow
from shardstore.format.shardfile import header_digest
from shardstore.format.sharing import GroupDigest, content_digest, find_diverged, group_digests

_MAX_LISTED: Final = 8


class InCommon(msgspec.Struct, frozen=True):
    """What a rank says of its replicas, where they store in turn what they have in common."""

    groups: tuple[GroupDigest, ...]
    content: str
    """`content_digest` of the header."""
    near: NearCopy
    """The rank's whole file."""
    nbytes: int = 0
    """Size of the file that leaves pieces to replicas; 0 if it leaves none, or cannot."""
    digest: str = ""
    """Of the header of that file."""
    has_bytes: bool = True
    """Whether there are bytes of tensors in it."""


class _Entry(msgspec.Struct, frozen=True):
    header: ShardHeader
    """Without table, pieces and leaves."""
    nbytes: int
    digest: str
    in_memory: bool = True
    common: InCommon | None = None


@dataclass(frozen=True, slots=True)
class Entries:
    """What all ranks have sealed, or why it is no snapshot."""

    failure: Failure | None = None
    shards: dict[int, SealedShard] = field(default_factory=dict)
    in_memory: bool = True
    """Of every rank."""
    diverged: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Groups that are no replicas: their ranks, those together that say the same."""


def in_common(
    save: PendingSave, replicas: Replicas | None, nbytes: int, digest: str
) -> InCommon | None:
    """What to post of a save that was sealed: its whole file has this size and header digest."""
    if replicas is None:
        return None
    header, form, data = save.header, save.form, save.shared_header
    assert header is not None
    found = InCommon(
        group_digests(replicas.groups, header.pieces),
        content_digest(header),
        NearCopy(nbytes, digest),
    )
    if form is None or data is None:
        return found
    return msgspec.structs.replace(
        found,
        nbytes=form.layout.nbytes,
        digest=header_digest(data),
        has_bytes=form.layout.nbytes > form.layout.data_start,
    )


def entry_key(name: str, rank: int) -> str:
    """Where a rank posts its part of the joint work `name`."""
    return f"entry/{name}/{rank}"


def post_entry(
    coordinator: Coordinator,
    name: str,
    header: ShardHeader,
    nbytes: int,
    digest: str,
    *,
    in_memory: bool,
    common: InCommon | None = None,
) -> None:
    """Tell rank 0 that this rank's shard is sealed. A table that is new to the job is posted once.

    Args:
        coordinator: Of this rank.
        name: Of the joint work; used once, equal on all ranks.
        header: Of the sealed file.
        nbytes: Its size.
        digest: Of its header.
        in_memory: It is in this rank's memory.
        common: What replicas store in turn.
    """
    if coordinator.claim(f"table-claim/{header.table_digest}"):
        coordinator.post(f"table/{header.table_digest}", msgspec.json.encode(header.table))
    slim = msgspec.structs.replace(
        header,
        table=(),
        pieces=(),
        leaves=None,
        metadata=header.metadata if coordinator.rank == 0 else None,
    )
    entry = _Entry(slim, nbytes, digest, in_memory, common)
    coordinator.post(entry_key(name, coordinator.rank), msgspec.json.encode(entry))


def collect_entries(session: Session, name: str, *, what: str, stop: str) -> Entries:
    """Wait for all entries and check that they are one snapshot; rank 0 only.

    Args:
        session: Of rank 0.
        name: As the ranks posted them.
        what: What the ranks are doing, for messages.
        stop: Key that ends the wait with a failure; a disagreement is told there as well.

    Raises:
        CoordinationError: A rank is missing or the store is gone.
    """
    coordinator = session.coordinator
    ranks = list(range(session.world_size))
    values = coordinator.wait(
        [entry_key(name, rank) for rank in ranks],
        phase=f"{what}: waiting for all ranks to seal",
        ranks=ranks,
        stop=stop,
    )
    if isinstance(values, Stopped):
        return Entries(msgspec.json.decode(values.value, type=Failure))
    entries = [msgspec.json.decode(value, type=_Entry) for value in values]
    shards = {}
    for rank, entry in enumerate(entries):
        table = _table(session, what, entry.header.table_digest, rank)
        header = msgspec.structs.replace(entry.header, table=table)
        shards[rank] = _sealed(header, entry)
    problems = problems_between(shards)
    if not problems:
        said = {rank: e.common.groups for rank, e in enumerate(entries) if e.common is not None}
        return Entries(
            shards=shards,
            in_memory=all(entry.in_memory for entry in entries),
            diverged=tuple(
                tuple(tuple(ranks) for ranks in groups) for groups in find_diverged(said).values()
            ),
        )
    shown = problems[:_MAX_LISTED]
    if problems[_MAX_LISTED:]:
        shown.append(f"and {len(problems) - _MAX_LISTED} more")
    failure = Failure(
        0,
        "ranks do not agree on this save: "
        + "; ".join(shown)
        + ". Every rank must call save at the same steps, with the same kind of state.",
        failed_ranks=tuple(ranks),
    )
    stored = coordinator.propose(stop, msgspec.json.encode(failure))
    return Entries(msgspec.json.decode(stored, type=Failure))


def _sealed(header: ShardHeader, entry: _Entry) -> SealedShard:
    common = entry.common
    if common is None:
        return SealedShard(header, entry.nbytes, entry.digest)
    shared = None
    if common.nbytes:
        mine = msgspec.structs.replace(header, sharing=Sharing((), common.near))
        shared = SealedShard(
            mine, common.nbytes, common.digest, content=common.content, has_bytes=common.has_bytes
        )
    return SealedShard(header, entry.nbytes, entry.digest, content=common.content, shared=shared)


def _table(session: Session, what: str, digest: str, rank: int) -> tuple[TensorRow, ...]:
    if digest not in session.tables:
        values = session.coordinator.wait(
            [f"table/{digest}"], phase=f"{what}: waiting for a tensor table", ranks=[rank]
        )
        assert not isinstance(values, Stopped)
        session.tables[digest] = msgspec.json.decode(values[0], type=tuple[TensorRow, ...])
    return session.tables[digest]
