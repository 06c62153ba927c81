"""Functions in fresh processes: forked from a server that has only imported modules, so they start at once."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

TIMEOUT_S = 600.0
_PRELOAD = ["shardstore.store", "safetensors.torch", "benchmarks.peers", "benchmarks.ranks"]  # fmt: skip


class ChildError(RuntimeError):
    """A child raised, died or did not answer in time."""


@contextmanager
def child(
    fn: Callable[..., object], *args: object
) -> Iterator[tuple[ForkServerProcess, Connection]]:
    """Run `fn(connection, *args)` in a process; afterwards it is joined, or killed if it goes on."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    ours, theirs = context.Pipe()
    process = context.Process(target=fn, args=(theirs, *args))
    process.start()
    theirs.close()
    try:
        yield process, ours
        process.join(TIMEOUT_S)
    finally:
        if process.is_alive():
            process.kill()
        process.join()
        ours.close()


def receive(connection: Connection, process: ForkServerProcess) -> Any:
    """What a child sends next. Raises ChildError if it ended instead, or sent an error."""
    if not connection.poll(TIMEOUT_S):
        raise ChildError(f"process {process.pid} did not answer within {TIMEOUT_S:.0f} s")
    try:
        found = connection.recv()
    except EOFError:
        process.join(TIMEOUT_S)
        raise ChildError(f"process {process.pid} ended with exit code {process.exitcode}") from None
    if isinstance(found, Exception):
        raise ChildError(f"{type(found).__name__}: {found}") from found
    return found


def _answer(connection: Connection, fn: Callable[..., object], *args: object) -> None:
    try:
        connection.send(fn(*args))
    except Exception as error:  # noqa: BLE001 - raised again by who waits for it
        connection.send(ChildError(f"{type(error).__name__}: {error}"))


def call(fn: Callable[..., object], *args: object) -> Any:
    """`fn(*args)` in a fresh process."""
    with child(_answer, fn, *args) as (process, connection):
        return receive(connection, process)


def call_ranks(num_ranks: int, fn: Callable[..., object], *args: object) -> list[Any]:
    """`fn(rank, num_ranks, *args)` in a fresh process each, at once; results by rank."""
    with _started(num_ranks, fn, args) as started:
        return [receive(connection, process) for process, connection in started]


@contextmanager
def _started(
    num_ranks: int, fn: Callable[..., object], args: tuple[object, ...], rank: int = 0
) -> Iterator[list[tuple[ForkServerProcess, Connection]]]:
    if rank == num_ranks:
        yield []
        return
    with (
        child(_answer, fn, rank, num_ranks, *args) as first,
        _started(num_ranks, fn, args, rank + 1) as others,
    ):
        yield [first, *others]


def call_killed(fn: Callable[..., object], *args: object) -> None:
    """`fn(*args)` in a fresh process, which must end by killing itself."""
    with child(_answer, fn, *args) as (process, _):
        process.join(TIMEOUT_S)
        if process.exitcode != -9:
            raise ChildError(f"expected SIGKILL, got exit code {process.exitcode}")


def tree(pid: int) -> list[int]:
    """A process and all its descendants; those that end meanwhile are left out."""
    found, todo = [], [pid]
    while todo:
        at = todo.pop()
        found.append(at)
        try:
            for thread in os.listdir(f"/proc/{at}/task"):
                with open(f"/proc/{at}/task/{thread}/children") as file:
                    todo += [int(text) for text in file.read().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
