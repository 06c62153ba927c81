"""How a store ends: closed together, abandoned alone, or with the interpreter (P7)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from shardstore.engine.draining import drain
from shardstore.engine.failures import Failures
from shardstore.engine.liveness import left
from shardstore.engine.saving import SavePipeline
from shardstore.engine.session import Session
from shardstore.errors import SaveFailedError

_OWN_S: Final = 60.0
"""How long own seals and spills may take once the store was abandoned."""
_SEAL_S: Final = 10.0
"""How long an abandoned store tries to seal what was staged."""
_OTHERS_S: Final = 5.0
"""How long the interpreter's exit waits for outcomes that other ranks have a part in."""


class Leaver:
    """Ends one store, once."""

    def __init__(
        self,
        session: Session,
        pipeline: SavePipeline,
        failures: Failures,
        on_gone: Callable[[], None],
    ) -> None:
        """`on_gone` runs when memory was given back or left for the restart."""
        self._session = session
        self._pipeline = pipeline
        self._failures = failures
        self._on_gone = on_gone
        self._thread: threading.Thread | None = None

    def wait_outcomes(self, timeout_s: float | None) -> bool:
        """Wait until every save so far is settled; False if that took too long."""
        pending = self._pipeline.pending
        return not pending or drain(self._session, pending, timeout_s)

    def close(self, *, keep_memory: bool) -> SaveFailedError | None:
        """Drain, then leave together with the other ranks; returns what was not raised yet."""
        self.wait_outcomes(None)
        error = self._failures.rest()
        timeout_s = self._session.timeout_s
        self._pipeline.stop(timeout_s=timeout_s)
        clean = self._session.coordinator.close(timeout_s)
        self._give_back(keep_memory=keep_memory or not clean)
        return error

    def abandon(self) -> None:
        """Leave without waiting for any rank; own seals and spills go on in the background."""
        if self._thread is None:
            # Not a daemon: the process must not end before the others have read the last decision.
            self._thread = threading.Thread(
                target=self._finish_own, name="shardstore-leave", daemon=False
            )
            self._thread.start()

    def join(self) -> None:
        """Wait for what `abandon` began."""
        if self._thread is not None:
            self._thread.join(_OWN_S)

    def finish_at_exit(self) -> None:
        """The interpreter ends: finish own spills; outcomes of others only if they come soon."""
        deadline = time.monotonic() + _OWN_S
        for save in self._pipeline.pending:
            save.spilled.wait(max(0.0, deadline - time.monotonic()))
        self.wait_outcomes(_OWN_S if self._session.world_size == 1 else _OTHERS_S)
        error = self._failures.rest()
        if error is not None:
            logging.getLogger("shardstore").error("%s", error)

    def _finish_own(self) -> None:
        if self._session.world_size == 1:
            self.wait_outcomes(_OWN_S)
        # A first save needs the others once, for the run's number, before it can be sealed.
        deadline = time.monotonic() + min(_SEAL_S, self._session.timeout_s)
        for save in self._pipeline.pending:
            save.sealed.wait(max(0.0, deadline - time.monotonic()))
        self._session.coordinator.abandon()
        if self._pipeline.stop_own(_OWN_S):
            self._give_back(keep_memory=True)

    def _give_back(self, *, keep_memory: bool) -> None:
        memory = self._session.memory
        memory.close(keep=keep_memory)
        memory.leave(remove=not keep_memory)
        left(self._session.nonce)
        self._on_gone()
