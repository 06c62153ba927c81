"""Where hosts share no root: whether every rank finds its file where it runs now, and if not, who has it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from shardstore.engine.attempts import list_ranks
from shardstore.engine.catalog import Catalog
from shardstore.engine.jointroot import JointTier
from shardstore.engine.liveness import RootClass
from shardstore.format.records import Manifest, SnapshotId

_REMEDY = (
    "Start every rank on the host that has its file, copy the snapshot's folders to where the ranks are "
    "now, or use a root that all hosts share"
)


def lacking_ranks(catalog: Catalog, snapshot_id: SnapshotId) -> set[int]:
    """Ranks that see another root than those that have a file of this snapshot on it; empty where all see one.

    Raises:
        TierError: A root cannot be listed.
    """
    tier = catalog.tier
    if not isinstance(tier, JointTier):
        return set()
    places = tier.places(snapshot_id)
    return {r for c in tier.classes for r in c.ranks if r not in places.get(c.first, ())}


def misplaced(
    catalog: Catalog,
    snapshot_id: SnapshotId,
    *,
    world_size: int,
    near: Collection[int],
    manifest: Manifest | None = None,
) -> str:
    """Why the ranks, where they run now, cannot read a snapshot; empty if each of them can.

    Args:
        catalog: Of rank 0.
        snapshot_id: Which.
        world_size: Of the ranks that saved it.
        near: Ranks that have it in memory or on their disk.
        manifest: Its manifest, which says where ranks ran.

    Raises:
        TierError: A root cannot be listed.
    """
    tier = catalog.tier
    if not isinstance(tier, JointTier) or world_size != sum(len(c.ranks) for c in tier.classes):
        return ""
    places = tier.places(snapshot_id)
    lacking = {
        c.first: [r for r in c.ranks if r not in near and r not in places.get(c.first, ())]
        for c in tier.classes
    }
    texts = [
        f"{_name(c)} does not hold the {_files(lacking[c.first])}"
        for c in tier.classes
        if lacking[c.first]
    ]
    if not texts:
        return ""
    wanted = {rank for ranks in lacking.values() for rank in ranks}
    for c in tier.classes:
        held = wanted & {*places.get(c.first, ())} - {*lacking[c.first]}
        wanted -= held
        if held:
            texts.append(f"{_name(c)} has the {_files(held)}")
    if wanted:
        saved = ""
        if manifest is not None:
            hosts = sorted({manifest.shards[rank].host for rank in wanted})
            saved = f", saved on host {', '.join(hosts)}"
        texts.append(f"no root has the {_files(wanted)}{saved}")
    return f"{'; '.join(texts)}. {_REMEDY}"


def _files(ranks: Iterable[int]) -> str:
    found = sorted(ranks)
    return f"file{'s' if found[1:] else ''} of {list_ranks(found)}"


def _name(root: RootClass) -> str:
    """A root, by who sees it."""
    return f"the root of {list_ranks(root.ranks)} (host {root.host})"
