"""What ranks decide together, over a key-value store; never a collective (P2).

Every joint decision is one key, written once. Giving up at a deadline means proposing failure and
obeying what is stored, so ranks never end with different answers. Only an unreachable store leaves a
rank without one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final, TypeVar

import msgspec

from shardstore.cluster.kv import KeyValueStore
from shardstore.cluster.missing import ProgressWatcher, Verdict, missing_ranks_error, refusal
from shardstore.cluster.owner import Stopped, StoreOwner
from shardstore.errors import CoordinationError, CoordinationTimeoutError

__all__ = ["Coordinator", "Stopped"]

T = TypeVar("T")

_REPLY_S: Final = 5.0
"""How long the store's host may take to answer one small call before it counts as unreachable."""
_HURRIED_S: Final = 1.0
"""The same in a grace period."""
_SLACK: Final = 1.25
"""Others wait this much longer than rank 0, which knows best who is missing."""
_MAX_UNTOLD: Final = 64
_LINGER_S: Final = 5.0
_LINGER_POLL_S: Final = 0.005


class Coordinator:
    """One rank's voice. Thread-safe; names and keys are used once."""

    def __init__(
        self,
        store: KeyValueStore,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        nonce: str = "00000000",
        host: str = "localhost",
        boot_id: str = "",
        local_ranks: Sequence[int] = (0,),
        group_ranks: Sequence[int] = (),
    ) -> None:
        """Talk over `store`.

        Args:
            store: Shared by all ranks; owned by this coordinator's thread from now on.
            rank: This rank in the group.
            world_size: Size of the group.
            timeout_s: Longest wait without progress of the ranks that are waited for.
            nonce: Eight hex digits, equal on all ranks and new at each start.
            host: Name of this host.
            boot_id: Of this host's kernel; equal for ranks that share memory.
            local_ranks: Ranks on this host.
            group_ranks: The job's rank of each rank of the group; empty: they are the same.
        """
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.nonce = nonce
        self.host = host
        self.boot_id = boot_id
        self.local_ranks = tuple(local_ranks)
        self.group_ranks = tuple(group_ranks)
        self._owner = StoreOwner(store, rank)
        self._untold: deque[str] = deque(maxlen=_MAX_UNTOLD)

    # -------------------------------------------------------------- primitives

    def post(self, key: str, value: bytes) -> None:
        """Store a value; does not wait. Calls of one rank take effect in order."""
        self._owner.call(lambda store: store.set(key, value))

    def propose(self, key: str, value: bytes, *, is_hurried: bool = False) -> bytes:
        """Write a key once; returns what is stored, this value or an earlier one.

        Args:
            key: Equal on all ranks.
            value: This rank's proposal.
            is_hurried: The process ends soon: do not wait long for a store that does not answer.

        Raises:
            CoordinationTimeoutError: The store is unreachable: the outcome is unknown.
        """
        reply = self._owner.call(lambda store: store.compare_set(key, value))
        return self._reply(reply, key, _HURRIED_S if is_hurried else None)

    def claim(self, key: str) -> bool:
        """Whether this is the first claim of `key` over all ranks."""
        return self._reply(self._owner.call(lambda store: store.add(key, 1)), key) == 1

    def retire(self, name: str, keys: Sequence[str]) -> None:
        """This rank needs `keys` no more; the last rank that says so removes them."""
        self._untold.append(name)

        def count(store: KeyValueStore) -> None:
            counter = f"{name}/done"
            if store.add(counter, 1) == self.world_size:
                for key in (*keys, counter):
                    store.delete(key)

        self._owner.call(count)

    def forget(self, key: str) -> None:
        """Remove a key that nobody waits for any more."""
        self._owner.call(lambda store: store.delete(key))

    def progress(self, nbytes: int) -> None:
        """Count work done in bytes: deadlines of those who wait for this rank start anew."""
        self._owner.progress(nbytes)

    def _reply(self, future: Future[T], phase: str, limit_s: float | None = None) -> T:
        try:
            return future.result(limit_s or max(_REPLY_S, min(self.timeout_s, 60.0)))
        except FutureTimeoutError:
            future.cancel()
            raise self._unreachable(phase) from None

    def _unreachable(self, phase: str) -> CoordinationTimeoutError:
        return CoordinationTimeoutError(
            f"store host (rank 0) unreachable during {phase}: the process of rank 0 is stopped or its "
            "host is cut off. The outcome is unknown; this rank is unchanged.",
            failed_ranks=(0,),
            phase=phase,
        )

    def propose_later(self, key: str, value: bytes) -> None:
        """`propose` without waiting for the answer."""
        self._owner.call(lambda store: store.compare_set(key, value))

    def watch(
        self, keys: Sequence[str], *, stop: str | None = None, every_s: float = 0.0
    ) -> Future[list[bytes] | Stopped]:
        """Wait for keys without blocking and without a deadline; callbacks run on the owner's thread.

        `stop` is a key that ends it early. `every_s` is for what may be long in coming: looked for no more often than that, in seconds.
        """
        return self._owner.watch(keys, stop, every_s=every_s)

    # ------------------------------------------------------------------- waits

    def wait(
        self,
        keys: Sequence[str],
        *,
        phase: str,
        ranks: Sequence[int],
        stop: str | None = None,
        timeout_s: float | None = None,
        is_total: bool = False,
    ) -> list[bytes] | Stopped:
        """Wait until all `keys` are there, or `stop` is.

        Args:
            keys: To wait for.
            phase: What the ranks are doing, for messages.
            ranks: `ranks[i]` writes `keys[i]`.
            stop: Ends the wait early with its value.
            timeout_s: Longest wait without progress of the missing ranks; default: the store's.
            is_total: That is the longest wait, whatever their progress.

        Raises:
            CoordinationTimeoutError: Names the missing ranks; or the store is unreachable.
            CoordinationError: The connection to the store broke.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        future = self._owner.watch(keys, stop)
        watcher = ProgressWatcher(keys, ranks, viewer=self.rank)
        deadline = time.monotonic() + limit_s
        look_s = max(0.05, min(limit_s / 8, 5.0))
        while True:
            left = deadline - time.monotonic()
            try:
                return future.result(max(0.0, min(left, look_s)))
            except FutureTimeoutError:
                pass
            moved = self._look(watcher, future, phase, must_answer=left <= 0, is_hurried=is_total)
            if moved and not is_total:
                deadline = time.monotonic() + limit_s
                if self.rank == 0:
                    self._owner.relay()
            elif left <= 0 and not future.done():
                future.cancel()
                raise missing_ranks_error(watcher.missing, phase, limit_s)

    def _look(
        self,
        watcher: ProgressWatcher,
        future: Future[Any],
        phase: str,
        *,
        must_answer: bool,
        is_hurried: bool,
    ) -> bool:
        """Whether a missing rank has made progress since the last look."""
        reply = self._owner.call(watcher.look)
        patience_s = _HURRIED_S if is_hurried else _REPLY_S
        try:
            return reply.result(patience_s if must_answer else 0.5)
        except FutureTimeoutError:
            if not must_answer:
                return False
            future.cancel()
            raise self._unreachable(phase) from None

    # -------------------------------------------------------- joint decisions

    def gather_decide(
        self,
        name: str,
        value: bytes,
        decide: Callable[[list[bytes]], bytes],
        *,
        phase: str,
        timeout_s: float | None = None,
        is_total: bool = False,
    ) -> bytes:
        """Every rank posts a value, rank 0 decides from all of them, every rank gets the decision.

        Args:
            name: Used once; equal on all ranks.
            value: This rank's.
            decide: Runs on rank 0 only; what it raises becomes a failure on all ranks.
            phase: What the ranks are doing, for messages.
            timeout_s: Longest wait without progress; default: the store's.
            is_total: That is the longest wait, whatever the ranks' progress.

        Raises:
            CoordinationTimeoutError: Some rank is missing; the same on all ranks.
            CoordinationError: `decide` failed; the same on all ranks.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        mine, out = f"{name}/in/{self.rank}", f"{name}/out"
        cause: BaseException | None = None
        self.post(mine, value)
        if self.rank == 0:
            stored, cause = self._decide(name, out, decide, phase, limit_s, is_total=is_total)
        else:
            stored = self._await_decision(name, out, phase, limit_s, is_total=is_total)
        self.forget(mine)
        self.retire(name, [out])
        if stored[:1] == b"+":
            return stored[1:]
        verdict = msgspec.json.decode(stored[1:], type=Verdict)
        if verdict.missing_ranks:
            raise CoordinationTimeoutError(
                verdict.message,
                missing_ranks=verdict.missing_ranks,
                failed_ranks=verdict.failed_ranks,
                phase=phase,
            )
        raise CoordinationError(
            verdict.message, failed_ranks=verdict.failed_ranks, phase=phase
        ) from cause

    def _decide(
        self,
        name: str,
        out: str,
        decide: Callable[[list[bytes]], bytes],
        phase: str,
        limit_s: float,
        *,
        is_total: bool,
    ) -> tuple[bytes, BaseException | None]:
        """On rank 0: what is stored, and the exception of `decide` if that is why."""
        cause: BaseException | None = None
        ranks = range(self.world_size)
        keys = [f"{name}/in/{rank}" for rank in ranks]
        try:
            values = self.wait(
                keys, phase=phase, ranks=ranks, stop=out, timeout_s=limit_s, is_total=is_total
            )
            if isinstance(values, Stopped):
                return values.value, None
            proposal = b"+" + decide(values)
        except CoordinationTimeoutError as error:
            if not error.missing_ranks:
                raise
            proposal = refusal(error)
        except Exception as error:  # noqa: BLE001 - becomes the answer of all ranks
            message = f"{phase} failed on rank 0: {type(error).__name__}: {error}"
            proposal = b"-" + msgspec.json.encode(Verdict(message, failed_ranks=(0,)))
            cause = error
        return self.propose(out, proposal, is_hurried=is_total), cause

    def _await_decision(
        self, name: str, out: str, phase: str, limit_s: float, *, is_total: bool
    ) -> bytes:
        try:
            values = self.wait(
                [out], phase=phase, ranks=[0], timeout_s=limit_s * _SLACK, is_total=is_total
            )
        except CoordinationTimeoutError as error:
            if not error.missing_ranks:
                raise
            ranks = range(self.world_size)
            watcher = ProgressWatcher(
                [f"{name}/in/{rank}" for rank in ranks], ranks, viewer=self.rank
            )
            self._reply(self._owner.call(watcher.look), phase)
            late = watcher.missing or [0]
            return self.propose(out, refusal(missing_ranks_error(late, phase, limit_s)))
        assert not isinstance(values, Stopped)
        return values[0]

    # ----------------------------------------------------------------- leaving

    def close(self, timeout_s: float, *, is_total: bool = False) -> bool:
        """Leave together; rank 0, which hosts the store, last. False if some rank did not come.

        `is_total`: `timeout_s` is the longest wait, whatever the ranks' progress.
        """
        clean = True
        try:
            self.gather_decide(
                "close", b"", lambda _: b"",
                phase="closing the store", timeout_s=timeout_s, is_total=is_total,
            )  # fmt: skip
            if self.rank == 0:
                others = range(1, self.world_size)
                self.wait(
                    [f"left/{rank}" for rank in others],
                    phase="closing the store",
                    ranks=others,
                    timeout_s=min(timeout_s, _REPLY_S),
                )
            else:
                self.propose(f"left/{self.rank}", b"1")
        except CoordinationError:
            clean = False
            self._linger(min(_LINGER_S, timeout_s) if is_total else _LINGER_S)
        self._owner.end("the store was closed")
        return clean

    def abandon(self) -> None:
        """Leave without the others.

        Only rank 0, whose process hosts the store, lingers a few seconds: until the others have read
        what was decided, so that they raise its error and not "the host is gone".
        """
        self._linger()
        self._owner.end("this rank has left the store")

    def _linger(self, limit_s: float = _LINGER_S) -> None:
        if self.rank != 0 or self.world_size == 1:
            return

        def untold(store: KeyValueStore) -> bool:
            return any(store.get(f"{name}/done") is not None for name in self._untold)

        deadline = time.monotonic() + limit_s
        pause = threading.Event()
        try:
            while time.monotonic() < deadline and self._owner.call(untold).result(limit_s):
                pause.wait(_LINGER_POLL_S)
        except (CoordinationError, FutureTimeoutError):
            pass
