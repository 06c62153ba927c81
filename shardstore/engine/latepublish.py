"""Commit what dead runs stored whole, but had no time to commit (P4)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from shardstore.engine.catalog import Catalog
from shardstore.engine.sealed import SealedShard, manifest_of, problems_between
from shardstore.errors import ShardStoreError
from shardstore.format.records import SnapshotId

_LOG: Final = logging.getLogger("shardstore")


def publish_late(
    catalog: Catalog, *, before_run: int, writer: Mapping[str, str]
) -> list[SnapshotId]:
    """Commit what runs before `before_run` stored whole but died before committing.

    Only what is newer than the newest committed one, judged by the headers, synced again first.
    """
    if not catalog.is_exclusive:
        return []  # the run that began it may be at it, and only its owner may commit
    overview = catalog.overview()
    states = {snapshot_id: overview.state(snapshot_id) for snapshot_id in overview.ids}
    newest = max((i.order for i, state in states.items() if state == "committed"), default=None)
    published = []
    for snapshot_id, state in states.items():
        older_run = snapshot_id.run < before_run
        newer = newest is None or snapshot_id.order > newest
        if state == "torn" and older_run and newer:
            try:
                if _publish_torn(catalog, snapshot_id, writer):
                    published.append(snapshot_id)
            except ShardStoreError as error:
                _LOG.info("%s stays uncommitted: %s", snapshot_id, error)
    return published


def _publish_torn(catalog: Catalog, snapshot_id: SnapshotId, writer: Mapping[str, str]) -> bool:
    shards = whole_shards(catalog, snapshot_id)
    if shards is None:
        return False
    catalog.tier.make_durable(snapshot_id, shards)
    return catalog.publish(manifest_of(shards, writer=writer))


def whole_shards(catalog: Catalog, snapshot_id: SnapshotId) -> dict[int, SealedShard] | None:
    """The headers of all ranks' shards of a torn attempt; None if they are not a whole snapshot.

    Raises:
        TierError, FormatError, CorruptSnapshotError: One cannot be read, or is damaged.
    """
    ranks = catalog.tier.list_ranks(snapshot_id)
    if not ranks:
        return None
    world_size = catalog.read_header(snapshot_id, ranks[0]).header.world_size
    if ranks != list(range(world_size)):
        return None
    shards = {rank: catalog.read_header(snapshot_id, rank) for rank in ranks}
    return None if problems_between(shards) else shards
