"""Break storage on purpose: wrappers of tiers, operations that are counted, and the suite that tiers pass.

For the tests of whoever trains with shardstore or writes a tier for it; the package itself imports none
of this. Names are resolved on first use: only `TierContract` needs pytest, none needs torch.

    from shardstore.testing import CrashingTier, use_tier

    with use_tier(lambda tier: CrashingTier(tier, at=7)):
        store = SnapshotStore(root)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from shardstore.cluster.threads import ThreadGroup, ThreadRank
    from shardstore.testing.contract import ShardContract
    from shardstore.testing.crashing import Crash, CrashingTier
    from shardstore.testing.flipping import FlippingTier
    from shardstore.testing.forked import Ended, run_forked
    from shardstore.testing.full import FullTier
    from shardstore.testing.ops import CountingOps, kill_at, kill_at_point, raise_at
    from shardstore.testing.ranks import run_rank_threads
    from shardstore.testing.rootcontract import TierContract
    from shardstore.testing.slow import SlowTier
    from shardstore.testing.wrapped import WrappedTier
    from shardstore.tiers.fileops import FileOps, use_ops
    from shardstore.tiers.roots import use_tier

_HOME: Final = {
    "CountingOps": "testing.ops",
    "Crash": "testing.crashing",
    "CrashingTier": "testing.crashing",
    "Ended": "testing.forked",
    "FileOps": "tiers.fileops",
    "FlippingTier": "testing.flipping",
    "FullTier": "testing.full",
    "ShardContract": "testing.contract",
    "SlowTier": "testing.slow",
    "ThreadGroup": "cluster.threads",
    "ThreadRank": "cluster.threads",
    "TierContract": "testing.rootcontract",
    "WrappedTier": "testing.wrapped",
    "kill_at": "testing.ops",
    "kill_at_point": "testing.ops",
    "raise_at": "testing.ops",
    "run_forked": "testing.forked",
    "run_rank_threads": "testing.ranks",
    "use_ops": "tiers.fileops",
    "use_tier": "tiers.roots",
}

__all__ = [
    "CountingOps",
    "Crash",
    "CrashingTier",
    "Ended",
    "FileOps",
    "FlippingTier",
    "FullTier",
    "ShardContract",
    "SlowTier",
    "ThreadGroup",
    "ThreadRank",
    "TierContract",
    "WrappedTier",
    "kill_at",
    "kill_at_point",
    "raise_at",
    "run_forked",
    "run_rank_threads",
    "use_ops",
    "use_tier",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shardstore.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
