"""A root tier that takes its time."""

from __future__ import annotations

import math
import threading

from shardstore.testing.wrapped import WrappedTier
from shardstore.tiers.base import RootTier

_FOREVER_S = 300.0


class SlowTier(WrappedTier):
    """Every operation waits first: `latency_s`, and the time that its bytes take at `bytes_per_s`.

    Setting `go` ends all waits, present and to come, so that a test sleeps no longer than it looks; with
    an infinite latency nothing happens before that.

        tiers = []
        with use_tier(lambda tier: tiers.append(SlowTier(tier, latency_s=math.inf)) or tiers[-1]):
            store = SnapshotStore(root, memory="1GiB")
        handle = store.save(state, step=1)          # returns: training does not wait for the root
        tiers[0].waiting.wait()                     # the root is being asked
        assert not handle.committed.done()
        tiers[0].go.set()
        handle.wait()
    """

    def __init__(
        self, inner: RootTier, *, latency_s: float = 0.0, bytes_per_s: float = math.inf
    ) -> None:
        """Around `inner`.

        Args:
            inner: Keeps what is stored.
            latency_s: Wait before each operation, in seconds; `math.inf`: until `go` is set.
            bytes_per_s: Speed of reading and writing, for each of those who do so at the same time.
        """
        super().__init__(inner)
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.go = threading.Event()
        self.waiting = threading.Event()
        """Set once an operation waits."""
        self.asked_s = 0.0
        """What all operations together were to wait, whether or not `go` cut it short."""

    def enter(self, operation: str, nbytes: int = 0) -> None:
        """Wait.

        Raises:
            AssertionError: `go` was not set within minutes of an infinite latency.
        """
        seconds = self.latency_s + nbytes / self.bytes_per_s
        if seconds <= 0:
            return
        self.waiting.set()
        self.asked_s += seconds  # a lost update between threads only tells a smaller number
        if seconds > _FOREVER_S:
            assert self.go.wait(_FOREVER_S), f"{operation} waits since {_FOREVER_S} s for `go`"
        else:
            self.go.wait(seconds)
