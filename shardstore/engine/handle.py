"""Handle of one save."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import msgspec

from shardstore.engine.arguments import check_patience
from shardstore.engine.listing import SnapshotInfo
from shardstore.engine.session import PendingSave
from shardstore.errors import CoordinationTimeoutError


class SaveTimings(msgspec.Struct, frozen=True):
    """What one save has cost this rank so far. None: not known yet, or it never will be."""

    nbytes: int
    """Of this rank's file."""
    staged_s: float | None
    """From the call of `save` until live state was copied, in seconds; the others count from there as well."""
    sealed_s: float | None
    """Until this rank's file in memory was whole, with its digests."""
    written_s: float | None
    """Until it was durable on the root."""
    committed_s: float | None
    """Until it was known here that all ranks are as far."""


class Snapshot:
    """Handle of one save. May go to any thread; asking it does not use its error up."""

    def __init__(self, save: PendingSave) -> None:
        """Made by `SnapshotStore.save`."""
        self._save = save

    @property
    def step(self) -> int:
        """Step as given to `save`."""
        return self._save.step

    @property
    def staged(self) -> Future[None]:
        """Done when live state has been copied and may change; also when its copy failed."""
        return self._save.staged

    @property
    def committed(self) -> Future[SnapshotInfo | None]:
        """Done when the snapshot is safe on all ranks in the outermost tier meant for it."""
        return self._save.committed

    @property
    def timings(self) -> SaveTimings:
        """What this save has cost this rank so far; ask again after `wait` for all of it."""
        seconds = self._save.seconds
        return SaveTimings(
            self._save.nbytes,
            seconds.get("staged"),
            seconds.get("sealed"),
            seconds.get("written"),
            seconds.get("committed"),
        )

    def wait(self, timeout_s: float | None = None) -> SnapshotInfo | None:
        """Wait for the commit; a rank may wait alone.

        Raises:
            SaveFailedError: The save failed on some rank; the text names it and the first cause.
            CoordinationTimeoutError: Not known within `timeout_s`.
            ValueError: `timeout_s` is neither None nor a time in seconds.
        """
        timeout_s = check_patience(timeout_s)
        try:
            return self._save.committed.result(timeout_s)
        except FutureTimeoutError as error:
            if self._save.committed.done():
                raise
            raise CoordinationTimeoutError(
                f"step {self.step} was not committed within {timeout_s} s; it may still be",
                phase="waiting for the commit",
            ) from error

    def __repr__(self) -> str:
        future = self._save.committed
        state = "pending"
        if future.done():
            state = "failed" if future.exception() else "committed"
        return f"Snapshot(step={self.step}, {state})"
