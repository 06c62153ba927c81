"""Which ranks are missing in a joint step, whether they still work, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from shardstore.cluster.kv import KeyValueStore
from shardstore.cluster.owner import RELAY_KEY, progress_key
from shardstore.errors import CoordinationTimeoutError

_MAX_NAMED: Final = 16


class Verdict(msgspec.Struct, frozen=True):
    """Why a joint step failed; the same on all ranks."""

    message: str
    failed_ranks: tuple[int, ...] = ()
    missing_ranks: tuple[int, ...] = ()


class ProgressWatcher:
    """Who is missing, and whether they still work. Runs on the owner's thread.

    Work is bytes that a rank itself has worked through. For those who wait for rank 0, work of a rank
    that rank 0 waits for counts as well: rank 0 relays it. Nobody else does, and rank 0 never takes its
    own relay for work, or ranks that wait for each other would keep each other alive for ever.
    """

    def __init__(self, keys: Sequence[str], ranks: Sequence[int], *, viewer: int) -> None:
        """Rank `viewer` waits for `keys`, of which `ranks[i]` writes `keys[i]`."""
        self._viewer = viewer
        self._left = list(zip(keys, ranks, strict=True))
        self._seen: dict[int, tuple[bytes | None, bytes | None]] = {}

    @property
    def missing(self) -> list[int]:
        """Ranks whose key was not there at the last look."""
        return sorted({rank for _, rank in self._left})

    def look(self, store: KeyValueStore) -> bool:
        """Look again; whether a missing rank has worked since the last time."""
        self._left = [(key, rank) for key, rank in self._left if store.get(key) is None]
        moved = False
        for rank in self.missing:
            relayed = store.get(RELAY_KEY) if rank == 0 != self._viewer else None
            now = (store.get(progress_key(rank)), relayed)
            moved = moved or (rank in self._seen and now != self._seen[rank])
            self._seen[rank] = now
        return moved


def missing_ranks_error(
    ranks: Sequence[int], phase: str, limit_s: float
) -> CoordinationTimeoutError:
    """The error of ranks that did not come."""
    named = ", ".join(map(str, ranks[:_MAX_NAMED]))
    if ranks[_MAX_NAMED:]:
        named += f" and {len(ranks) - _MAX_NAMED} more"
    return CoordinationTimeoutError(
        f"rank {named} made no progress for {limit_s:g} s during {phase}: it died, hangs, or did not "
        "make the same call",
        missing_ranks=ranks,
        failed_ranks=ranks,
        phase=phase,
    )


def refusal(error: CoordinationTimeoutError) -> bytes:
    """What is written into the decision of a joint step whose time is up."""
    verdict = Verdict(error.message, error.failed_ranks, error.missing_ranks)
    return b"-" + msgspec.json.encode(verdict)
