"""What a restore tells its caller."""

from __future__ import annotations

import msgspec

from shardstore.engine.choose import Skip


class RestoreReport(msgspec.Struct, frozen=True):
    """What a restore did; equal on all ranks but for the seconds. Prints as one line."""

    step: int
    id: str
    metadata: object
    """Rank 0's, as given to `save`."""
    tier: str
    """Which tiers the ranks read from, in words."""
    duration_s: float
    skipped: tuple[Skip, ...]
    """Newer snapshots that were passed over, and why."""
    missing: tuple[str, ...]
    """Names of the live state that the snapshot lacks (strict=False)."""
    unexpected: tuple[str, ...]
    """Names of the snapshot that were not asked for."""
    uncovered: tuple[str, ...]
    """Non-persistent buffers: never stored, so left as they are."""
    num_tensors: int
    """Tensors that this rank filled."""
    agree_s: float
    verify_s: float
    """Read, compare, verify and allocate, until all ranks had voted."""
    copy_s: float

    def __str__(self) -> str:
        text = f"step {self.step} from {self.tier} in {self.duration_s:.1f} s"
        for skip in self.skipped:
            text += f"; skipped {skip.step}: {skip.reason.splitlines()[0]}"
        return text
