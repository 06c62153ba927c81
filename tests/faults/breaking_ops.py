"""System calls that count themselves, and break or end processes at a chosen one: short names for tests."""

from __future__ import annotations

from typing import Any

from shardstore.testing.ops import Before as Action
from shardstore.testing.ops import CountingOps as WatchedOps
from shardstore.testing.ops import kill_at, kill_at_point, raise_at

__all__ = ["Action", "WatchedOps", "hold_at", "kill_at", "kill_at_point", "raise_at"]


def hold_at(match: str, reached: Any, go: Any) -> Action:
    """Set the event `reached` and wait for the event `go` at operations that start with `match`."""

    def act(name: str, _at: int) -> None:
        if name.startswith(match):
            reached.set()
            assert go.wait(60.0), "the test never let the writer go on"

    return act
