"""Run a function on several gloo ranks, each in its own process, within a deadline."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_ROOT = str(Path(__file__).resolve().parent.parent)
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)  # children unpickle `tests.<module>.<function>`
_PRELOAD = ("torch", "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "tests.ranks")
PRELOAD = (*_PRELOAD, *(("pytest",) if "pytest" in sys.modules else ()))
"""What the fork server has imported already."""
_GRACE_S = 5.0
_exit_codes = threading.Lock()
"""Held to ask for exit codes: `start` asks for those of all processes, also of other threads, and
whoever asks second for one gets 255."""


class RanksFailedError(RuntimeError):
    """Some rank raised, died or did not finish. The message holds every rank's traceback."""

    def __init__(self, message: str, failed_ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.failed_ranks = failed_ranks

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.failed_ranks)


def run_ranks(
    n: int,
    fn: Callable[..., T],
    *args: object,
    timeout_s: float = 60.0,
    grace_s: float = _GRACE_S,
) -> list[T]:
    """Call `fn(rank, *args)` in `n` processes with an initialised gloo group; results by rank.

    `fn` is a module-level function; its arguments and results must pickle. Processes come from a
    fork server that has imported torch already. Whoever is left at the deadline, or `grace_s` seconds
    after another rank failed, is killed.

    Raises:
        RanksFailedError: with the tracebacks of all ranks that failed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        rendezvous = f"file://{folder}/rendezvous"
        started = [_start(context, rank, n, rendezvous, timeout_s, fn, args) for rank in range(n)]
        try:
            outcomes = _gather(started, time.monotonic() + timeout_s, grace_s)
        finally:
            for process, connection in started:
                with _exit_codes:
                    is_alive = process.is_alive()
                if is_alive:
                    process.kill()
                _join(process, None)
                connection.close()
    failed = {rank: text for rank, (ok, text) in outcomes.items() if not ok}
    if failed:
        listing = "\n".join(f"--- rank {rank} ---\n{failed[rank]}" for rank in sorted(failed))
        raise RanksFailedError(
            f"{len(failed)} of {n} ranks failed\n{listing}", tuple(sorted(failed))
        )
    return [outcomes[rank][1] for rank in range(n)]


def _start(
    context: ForkServerContext,
    rank: int,
    n: int,
    rendezvous: str,
    timeout_s: float,
    fn: Callable[..., object],
    args: tuple[object, ...],
) -> tuple[ForkServerProcess, Connection]:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_rank_main, args=(theirs, rank, n, rendezvous, timeout_s, fn, args), daemon=False
    )
    with _exit_codes:
        process.start()
    theirs.close()
    return process, ours


def _join(process: ForkServerProcess, timeout_s: float | None) -> int | None:
    """Wait for a process to end; its exit code, None if it has none yet."""
    wait([process.sentinel], timeout_s)
    with _exit_codes:
        process.join(0)
        return process.exitcode


def _gather(
    started: list[tuple[ForkServerProcess, Connection]], deadline: float, grace_s: float
) -> dict[int, tuple[bool, Any]]:
    """Collect what ranks report, then give them a moment to exit by themselves."""
    outcomes: dict[int, tuple[bool, Any]] = {}
    waiting = {connection: rank for rank, (_, connection) in enumerate(started)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                outcomes[rank] = connection.recv()
            except EOFError:
                code = _join(started[rank][0], _GRACE_S)
                outcomes[rank] = (False, f"died with exit code {code}")
            if not outcomes[rank][0]:
                deadline = min(deadline, time.monotonic() + grace_s)
    for rank in waiting.values():
        outcomes[rank] = (False, "did not finish before the deadline and was killed")
    if not waiting:
        for process, _ in started:
            _join(process, _GRACE_S)
    return outcomes


def _rank_main(
    connection: Connection,
    rank: int,
    n: int,
    rendezvous: str,
    timeout_s: float,
    fn: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n)
    )
    try:
        dist.init_process_group(
            "gloo",
            init_method=rendezvous,
            rank=rank,
            world_size=n,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        dist.barrier()  # nobody ends while others are still connecting
        result = fn(rank, *args)
        connection.send((True, result))
    except BaseException:  # noqa: BLE001 - the parent raises it
        connection.send((False, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        connection.close()
