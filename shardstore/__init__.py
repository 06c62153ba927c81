"""A disk-spilling, persistent snapshot store for sharded PyTorch training.

Names are resolved on first use, so that `import shardstore` and listing snapshots do not pay torch's
import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from shardstore.engine.handle import SaveTimings, Snapshot
    from shardstore.engine.listing import SnapshotInfo, list_snapshots
    from shardstore.engine.progress import Progress
    from shardstore.engine.report import RestoreReport
    from shardstore.engine.retention import Keep
    from shardstore.engine.stats import PhaseStats, StoreStats
    from shardstore.errors import (
        CoordinationError,
        CoordinationTimeoutError,
        CorruptSnapshotError,
        FormatError,
        FormatVersionError,
        SaveFailedError,
        ShardStoreError,
        SnapshotNotFoundError,
        StateMismatchError,
        TierError,
        TierFullError,
        TopologyMismatchError,
        UnsupportedStateError,
    )
    from shardstore.state.rng import RNGState
    from shardstore.store import SnapshotStore

__version__ = "0.1.0"

_HOME: Final = {
    "CoordinationError": "errors",
    "CoordinationTimeoutError": "errors",
    "CorruptSnapshotError": "errors",
    "FormatError": "errors",
    "FormatVersionError": "errors",
    "Keep": "engine.retention",
    "PhaseStats": "engine.stats",
    "Progress": "engine.progress",
    "RNGState": "state.rng",
    "RestoreReport": "engine.report",
    "SaveFailedError": "errors",
    "SaveTimings": "engine.handle",
    "ShardStoreError": "errors",
    "Snapshot": "engine.handle",
    "SnapshotInfo": "engine.listing",
    "SnapshotNotFoundError": "errors",
    "SnapshotStore": "store",
    "StateMismatchError": "errors",
    "StoreStats": "engine.stats",
    "TierError": "errors",
    "TierFullError": "errors",
    "TopologyMismatchError": "errors",
    "UnsupportedStateError": "errors",
    "list_snapshots": "engine.listing",
}

__all__ = [
    "CoordinationError",
    "CoordinationTimeoutError",
    "CorruptSnapshotError",
    "FormatError",
    "FormatVersionError",
    "Keep",
    "PhaseStats",
    "Progress",
    "RNGState",
    "RestoreReport",
    "SaveFailedError",
    "SaveTimings",
    "ShardStoreError",
    "Snapshot",
    "SnapshotInfo",
    "SnapshotNotFoundError",
    "SnapshotStore",
    "StateMismatchError",
    "StoreStats",
    "TierError",
    "TierFullError",
    "TopologyMismatchError",
    "UnsupportedStateError",
    "list_snapshots",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
