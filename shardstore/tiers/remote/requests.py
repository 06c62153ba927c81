"""Requests to remote storage: tried again where that helps, for as long as the caller may wait, and told in full."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn, TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_delay,
    stop_when_event_set,
    wait_fixed,
    wait_random_exponential,
)
from tenacity.nap import sleep_using_event

from shardstore.errors import TierError, TierFullError
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.remote.faults import Fault
from shardstore.tiers.remote.objects import ObjectStore

_LOG: Final = logging.getLogger("shardstore")
T = TypeVar("T")

_FIRST_WAIT_S: Final = 0.1
_LONGEST_WAIT_S: Final = 5.0
_QUIET_S: Final = 10.0
_TELL_EVERY_S: Final = 60.0

_REMEDIES: Final[dict[str, str]] = {
    "denied": "Check the credentials (storage_options=, or the client's own configuration and "
    "environment), and that they may list, read and write there.",
    "no bucket": "Make the bucket, or correct root=.",
    "throttled": "It asked for fewer requests: save less often, or ask for a higher limit.",
    "unreachable": "Check the endpoint in storage_options= and the network.",
    "slow": "Check the network; raise timeout_s= if the link is that slow.",
    "broken": "The server, or a proxy before it, does not work as it should: see its logs.",
    "full": "Free space or raise the quota, or use keep= to delete old snapshots.",
    "refused": "",
}


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a request is tried again, in seconds."""

    fore_s: float
    """Where a caller waits: listing, restoring. Since the storage failed first: a restore makes many requests,
    and an outage costs it this time once."""
    behind_s: float
    """Where training goes on meanwhile: writing. Since the request began."""

    @property
    def quiet_s(self) -> float:
        """An outage of less is told to nobody."""
        return min(_QUIET_S, self.behind_s / 4)


class Requests:
    """Makes requests of one store for the tier. Any thread.

    Whatever fails is a TierError that says what was done, where, what the client said, and what to do.
    """

    def __init__(self, store: ObjectStore, *, name: str, ops: FileOps, patience: Patience) -> None:
        """Nothing is asked yet.

        Args:
            store: What is asked.
            name: Of the tier.
            ops: Passed before and after each request: where tests break things.
            patience: How long to try again.
        """
        self.store = store
        self._name = name
        self._ops = ops
        self._patience = patience
        self._leaving = threading.Event()
        self._lock = threading.Lock()
        self._failing_since: float | None = None
        self._failed_at = 0.0
        self._hung_at = 0.0
        self._last_fault: Fault | None = None
        self._told_at = 0.0
        self.waiting: Callable[[], None] = lambda: None
        """Called while bytes move, or a request waits for another attempt: its caller is not stuck."""

    @property
    def is_failing(self) -> bool:
        """Whether the store has not answered for a while, as far as anybody asked."""
        with self._lock:
            since = self._failing_since
        return since is not None and time.monotonic() - since > self._patience.quiet_s

    def leave(self) -> None:
        """Try nothing again from now on."""
        self._leaving.set()

    def run(
        self,
        operation: str,
        key: str,
        request: Callable[[], T],
        *,
        changes: bool = False,
        is_behind: bool = False,
        is_answer: bool = True,
        needed_bytes: int = 0,
    ) -> T:
        """Make one request, and again while its faults may pass.

        Args:
            operation: A verb, for messages.
            key: What it is about.
            request: One attempt; raises Fault.
            changes: Whether it changes what is stored: tests count those.
            is_behind: Whether training goes on meanwhile.
            is_answer: Its success shows that the store works; False where the client may not ask it.
            needed_bytes: For the message where there is no space.

        Raises:
            TierError: It failed for good; a FileNotFoundError of `request` is its cause.
        """
        patience = self._patience
        limit_s = patience.behind_s if is_behind else patience.fore_s

        def may_help(error: BaseException) -> bool:
            if not isinstance(error, Fault) or not error.is_retryable:
                return False
            return is_behind or self._failing_for() < limit_s

        retrying = Retrying(
            retry=retry_if_exception(may_help),
            wait=wait_fixed(_FIRST_WAIT_S)
            + wait_random_exponential(_FIRST_WAIT_S, _LONGEST_WAIT_S),
            stop=stop_after_delay(limit_s) | stop_when_event_set(self._leaving),
            sleep=sleep_using_event(self._leaving),
            before_sleep=lambda state: self._note_wait(state, operation, key),
            reraise=True,
        )
        try:
            if not is_behind:
                self._raise_if_hanging()
            answer: T = retrying(self._once, operation, key, request, changes, is_behind)
        except TierError:
            raise
        except OSError as error:
            self.raise_translated(error, operation, key, needed_bytes)
        if is_answer:
            self._note_answer()
        return answer

    def _once(
        self,
        operation: str,
        key: str,
        request: Callable[[], T],
        changes: bool,
        is_behind: bool,
    ) -> T:
        self._ops.request(operation, key, changes=changes)
        try:
            answer = request()
        except Fault as fault:
            self._note_fault(fault, is_behind=is_behind)
            raise
        if changes:
            self._ops.request(f"{operation} answered", key, changes=True)
        return answer

    def _note_fault(self, fault: Fault, *, is_behind: bool) -> None:
        if not fault.may_pass:
            return
        now = time.monotonic()
        with self._lock:
            # After a time in which nobody asked, nothing is known of what was before.
            is_known = now - self._failed_at < max(self._patience.fore_s, _TELL_EVERY_S)
            if self._failing_since is None or not is_known:
                self._failing_since = now
            self._failed_at = now
            if not is_behind:
                # What hung behind, perhaps one large part, tells no caller not to ask.
                self._hung_at, self._last_fault = now, fault

    def _failing_for(self) -> float:
        with self._lock:
            since = self._failing_since
        return 0.0 if since is None else time.monotonic() - since

    def _raise_if_hanging(self) -> None:
        """Do not have a caller wait for one deadline after the other while no answer comes at all."""
        with self._lock:
            fault, hung_at = self._last_fault, self._hung_at
        is_recent = time.monotonic() - hung_at < self._patience.fore_s / 2
        is_hanging = fault is not None and fault.kind == "slow" and is_recent
        if fault is not None and is_hanging and self._failing_for() >= self._patience.fore_s:
            raise fault

    def _note_wait(self, state: RetryCallState, operation: str, key: str) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        now = time.monotonic()
        with self._lock:
            since = self._failing_since
            failing_s = 0.0 if since is None else now - since
            tell = failing_s > self._patience.quiet_s and now - self._told_at > _TELL_EVERY_S
            if tell:
                self._told_at = now
        if tell:
            _LOG.warning(
                "%s: %s does not work for %.0f s now (%s %s: %s). It is tried again; training goes on, and "
                "snapshots are durable only once it works",
                self._name, self.store.location, failing_s, operation, key, error,
            )  # fmt: skip
        self.waiting()

    def _note_answer(self) -> None:
        with self._lock:
            since, self._failing_since = self._failing_since, None
            self._last_fault = None
            told, self._told_at = self._told_at, 0.0
        if since is not None and told:
            _LOG.warning("%s: %s works again", self._name, self.store.location)

    def where(self, key: str) -> str:
        """Address of an object, for messages."""
        return f"{self.store.location}/{key}" if key else self.store.location

    def raise_translated(
        self, error: OSError, operation: str, key: str, needed_bytes: int = 0
    ) -> NoReturn:
        """Raise `error` as a TierError that says where, and what to do."""
        where = self.where(key)
        kind = error.kind if isinstance(error, Fault) else type(error).__name__
        said = error.detail if isinstance(error, Fault) else str(error.strerror or error)
        remedy = _REMEDIES[error.kind] if isinstance(error, Fault) else ""
        text = f"{self._name}: {operation} {where} failed: {kind} ({self.store.kind}: {said}). {remedy}"
        if isinstance(error, Fault) and error.kind == "full":
            raise TierFullError(
                text.rstrip(), tier=self._name, key=where, operation=operation, needed_bytes=needed_bytes,
                free_bytes=0,
            ) from error  # fmt: skip
        raise TierError(text.rstrip(), tier=self._name, key=where, operation=operation) from error
