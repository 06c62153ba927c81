"""Which slots may serve again, and which will soon: P3's rule, of one slot and what this rank knows."""

from __future__ import annotations

from dataclasses import dataclass

from shardstore.format.records import SnapshotId
from shardstore.tiers.slots import Slot


@dataclass(slots=True)
class Facts:
    """What a rank knows of its run and of the other ranks."""

    owner: str
    """Nonce of the run."""
    has_outer: bool
    """What is in a slot can go further out."""
    newest: SnapshotId | None = None
    """P: the newest snapshot known complete on all ranks."""

    def is_decided(self, snapshot_id: SnapshotId) -> bool:
        """Whether it is known if all ranks sealed it: outcomes come in the order of the saves."""
        if snapshot_id.nonce != self.owner:
            return True
        return self.newest is not None and snapshot_id.order <= self.newest.order


def is_superseded(slot: Slot, facts: Facts) -> bool:
    """Whether a sealed slot other than the newest's is of no more use here."""
    if slot.state != "sealed" or slot.users or slot.id is None:
        return False
    if slot.is_failed:
        return True
    older = facts.newest is not None and slot.id.order < facts.newest.order
    nameless = slot.path is None and facts.has_outer
    return slot.is_safe and (older or nameless)


def is_in_flight(slot: Slot, facts: Facts) -> bool:
    """Whether it will become reusable without another save, or a request, of this rank."""
    if slot.state == "staging" or slot.users or slot.is_leaving:
        return True
    if slot.state == "free" or slot.id is None or slot.is_failed or slot.is_safe:
        return False
    if slot.is_only_here:
        return False
    if not facts.is_decided(slot.id):
        return True
    return facts.has_outer and not slot.is_kept and slot.id.nonce == facts.owner


def is_spillable(slot: Slot, facts: Facts) -> bool:
    """Whether it is here only because nobody needed its memory: complete on all ranks, and not further out.

    Of this run that is what was saved with persist=False. Of earlier ones it is what they had no time to spill:
    nothing else would ever take it further out, and its slot would be lost to this run.
    """
    return (
        facts.has_outer
        and slot.state == "sealed"
        and slot.id is not None
        and (slot.is_kept or slot.id.nonce != facts.owner)
        and not (slot.is_failed or slot.is_safe or slot.is_leaving)
        and facts.is_decided(slot.id)
    )
