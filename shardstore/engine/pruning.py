"""Delete by policy what is committed on a root: for the store after a commit, and for the command line."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from shardstore.engine.attempts import examine
from shardstore.engine.catalog import Catalog
from shardstore.engine.overview import Overview, is_cut
from shardstore.engine.retention import Keep, check_keep, plan_deletions
from shardstore.errors import ShardStoreError, TierError
from shardstore.format.records import SnapshotId
from shardstore.format.register import Register

_REASON = "retention"


@dataclass(frozen=True, slots=True)
class Pruned:
    """A snapshot that a policy lets go."""

    id: SnapshotId
    nbytes: int
    """Of all ranks' files."""
    why: str
    """Which newer ones are kept instead."""
    problem: str = ""
    """Why it is still listed, or its bytes are still there; tried again next time."""


def prune(
    catalog: Catalog,
    keep: Keep | int,
    *,
    writer: Mapping[str, str],
    dry_run: bool = True,
    damaged: Collection[SnapshotId] = (),
    spare_runs: Collection[int] = (),
) -> list[Pruned]:
    """Delete what `keep` does not keep, oldest first; needs no ranks and no torch.

    What goes is taken off the list before a byte of it is removed, and the newest good one never
    goes. Jobs may run meanwhile, but none should be restoring an older snapshot from this root.

    Args:
        catalog: Of the root.
        keep: The policy.
        damaged: Known to be, beside those that are marked; see `find_broken`.
        writer: Versions to record in the registers of what goes.
        dry_run: Only say what would go.
        spare_runs: Run numbers whose snapshots stay whatever the policy says.

    Returns:
        What goes, with what went wrong; empty if nothing does.

    Raises:
        ValueError: `keep` is no policy.
        TierError: The root cannot be read.
    """
    policy = check_keep(keep)
    if policy is None:
        raise ValueError("prune needs a policy: a count, or Keep(last=, every_steps=)")
    # Unlike after a commit, nobody knows here that the newest one is good.
    overview = catalog.overview()
    cut = {r.id for r in overview.committed() if catalog.is_cut(r, overview)}
    found = find_removable(catalog, policy, damaged={*damaged, *cut}, spare_runs=spare_runs)
    why = f"older than the newest {policy.last}"
    if policy.every_steps is not None:
        why += f", and not the newest of a step that {policy.every_steps:,} divides"
    return [
        Pruned(
            register.id,
            register.nbytes,
            why,
            kept_elsewhere(catalog, register)
            or ("" if dry_run else _delete(catalog, register.id, writer)),
        )
        for register in found
    ]


def find_broken(catalog: Catalog) -> dict[SnapshotId, str]:
    """What was committed and is not whole any more, and why, by manifests, names and sizes.

    A job calls `prune` after a commit of its own: its newest snapshot is good. From outside nothing
    is known of the newest, and one that lost its files must not make the last good one go.

    Raises:
        TierError: The root cannot be listed.
    """
    overview = catalog.overview()
    once = [i for i in overview.ids if overview.state(i) in ("committed", "damaged")]
    examined = [examine(catalog, i) for i in once if not _seems_whole(overview, i)]
    return {e.id: "\n".join(e.problems) for e in examined if e.state == "damaged"}


def _seems_whole(overview: Overview, snapshot_id: SnapshotId) -> bool:
    """Whether one look has shown all that `examine` would look at again, and nothing wrong."""
    register, sizes = overview.registers.get(snapshot_id), overview.sizes(snapshot_id)
    return (
        register is not None
        and sizes is not None
        and not is_cut(register, sizes, spans_hosts=overview.spans_hosts)
        and "damaged" not in overview.marks(snapshot_id)
    )


def find_removable(
    catalog: Catalog,
    keep: Keep,
    *,
    damaged: Collection[SnapshotId] = (),
    spare_runs: Collection[int] = (),
) -> list[Register]:
    """Committed snapshots on a root that a policy lets go, oldest first.

    Args:
        catalog: Of the root.
        keep: The policy.
        damaged: Known to be, beside those that are marked.
        spare_runs: See `prune`.
    """
    overview = catalog.overview()
    registers = {r.id: r for r in overview.committed() if r.is_counted}
    marks = {snapshot_id: overview.marks(snapshot_id) for snapshot_id in registers}
    going = plan_deletions(
        registers,
        keep,
        pinned=[i for i, found in marks.items() if "pinned" in found],
        damaged={*damaged, *(i for i, found in marks.items() if "damaged" in found)},
    )
    return [registers[i] for i in going if i.run not in spare_runs]


def take_off(catalog: Catalog, snapshot_id: SnapshotId, *, writer: Mapping[str, str]) -> bool:
    """Take one off the list unless it was pinned just now; its bytes are still there.

    Returns:
        Whether it is off the list.

    Raises:
        TierError: It is still listed.
    """
    if catalog.is_pinned(snapshot_id):
        return False
    try:
        catalog.unlist(snapshot_id, reason=_REASON, writer=writer)
    except TierError:
        # Replaced, and only the folder could not be synced? The register itself is the answer.
        if catalog.is_listed(snapshot_id):
            raise
    return True


def kept_elsewhere(catalog: Catalog, register: Register) -> str:
    """Why one root of several cannot let go of its part: the others would list what nobody can restore."""
    if catalog.spans_hosts or register.here is msgspec.UNSET:
        return ""
    return "other hosts have the files of its other ranks: a run with keep=, or its delete, removes it on all"


def _delete(catalog: Catalog, snapshot_id: SnapshotId, writer: Mapping[str, str]) -> str:
    try:
        if not take_off(catalog, snapshot_id, writer=writer):
            return "it was pinned meanwhile"
        catalog.tier.remove(snapshot_id)
    except ShardStoreError as error:
        return str(error)
    return ""
