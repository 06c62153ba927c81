"""Calls of blocking clients that have no deadline of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from shardstore.tiers.remote.faults import Fault

T = TypeVar("T")


def timed(call: Callable[[], T], limit_s: float) -> T:
    """Call on a thread of its own, and wait no longer than `limit_s`.

    A call that hangs keeps its thread, which keeps nobody from leaving.

    Raises:
        Fault: "slow".
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            future.set_exception(error)

    threading.Thread(target=work, name="shardstore-timed", daemon=True).start()
    try:
        return future.result(limit_s)
    except FutureTimeoutError as error:
        if future.done():
            raise
        raise Fault("slow", f"no answer within {limit_s:.0f} s") from error
