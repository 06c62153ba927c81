"""What each rank posts when it has sealed, and how rank 0 puts it together."""

from __future__ import annotations

from typing import Final

import msgspec

from shardstore.cluster.coordination import Coordinator, Stopped
from shardstore.engine.catalog import SealedShard, problems_between
from shardstore.engine.session import Completion, Failure, PendingSave, Session
from shardstore.format.records import ShardHeader, TensorRow
from shardstore.format.shardfile import header_digest

_MAX_LISTED: Final = 8


class _Entry(msgspec.Struct, frozen=True):
    header: ShardHeader
    """Without table, pieces and leaves."""
    nbytes: int
    digest: str
    in_memory: bool = True


def post_entry(
    coordinator: Coordinator,
    count: int,
    header: ShardHeader,
    nbytes: int,
    data: bytes,
    *,
    in_memory: bool,
) -> None:
    """Tell rank 0 that this rank's shard is sealed. A table that is new to the job is posted once."""
    if coordinator.claim(f"table-claim/{header.table_digest}"):
        coordinator.post(f"table/{header.table_digest}", msgspec.json.encode(header.table))
    slim = msgspec.structs.replace(
        header,
        table=(),
        pieces=(),
        leaves=None,
        metadata=header.metadata if coordinator.rank == 0 else None,
    )
    entry = _Entry(slim, nbytes, header_digest(data), in_memory)
    coordinator.post(f"entry/{count}/{coordinator.rank}", msgspec.json.encode(entry))


def collect_entries(session: Session, save: PendingSave, *, stop: str) -> Completion:
    """Wait for all entries and check that they are one snapshot; rank 0 only. Fills `save.shards`.

    Raises:
        CoordinationError: A rank is missing or the store is gone.
    """
    coordinator = session.coordinator
    ranks = list(range(session.world_size))
    values = coordinator.wait(
        [f"entry/{save.count}/{rank}" for rank in ranks],
        phase=f"{save.label}: waiting for all ranks to seal",
        ranks=ranks,
        stop=stop,
    )
    if isinstance(values, Stopped):
        return Completion(msgspec.json.decode(values.value, type=Failure))
    entries = [msgspec.json.decode(value, type=_Entry) for value in values]
    shards = {}
    for rank, entry in enumerate(entries):
        table = _table(session, save, entry.header.table_digest, rank)
        header = msgspec.structs.replace(entry.header, table=table)
        shards[rank] = SealedShard(header, entry.nbytes, entry.digest)
    problems = problems_between(shards)
    if not problems:
        save.shards = shards
        return Completion(in_memory=all(entry.in_memory for entry in entries))
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
    return Completion(msgspec.json.decode(stored, type=Failure))


def _table(session: Session, save: PendingSave, digest: str, rank: int) -> tuple[TensorRow, ...]:
    if digest not in session.tables:
        values = session.coordinator.wait(
            [f"table/{digest}"], phase=f"{save.label}: waiting for a tensor table", ranks=[rank]
        )
        assert not isinstance(values, Stopped)
        session.tables[digest] = msgspec.json.decode(values[0], type=tuple[TensorRow, ...])
    return session.tables[digest]
