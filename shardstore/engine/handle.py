"""Handle of one save."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from shardstore.engine.arguments import check_patience
from shardstore.engine.listing import SnapshotInfo
from shardstore.engine.session import PendingSave
from shardstore.errors import CoordinationTimeoutError


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
        """Done when live state has been copied and may change."""
        return self._save.staged

    @property
    def committed(self) -> Future[SnapshotInfo | None]:
        """Done when the snapshot is safe on all ranks in the outermost tier meant for it."""
        return self._save.committed

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
