"""Warm processes of one thread that fork whatever dies: a life costs milliseconds, and its death is real."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.ranks import PRELOAD

_WARM = ("shardstore.store", "shardstore.testing.forked", "torch.distributed.device_mesh")


class Drivers:
    """Runs functions in a few processes, each of which runs one after the other."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    def map(self, function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Results of `function(*args)` for all `arguments`, in order; raises what one of them raised.

        `function` is of a module, and everything pickles.
        """
        left = list(enumerate(arguments))[::-1]
        results: dict[int, Any] = {}
        errors: list[str] = []
        busy: dict[Connection, int] = {}
        idle = list(self._connections)
        while left or busy:
            while left and idle:
                number, args = left.pop()
                idle[-1].send((function, args))
                busy[idle.pop()] = number
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                number = busy.pop(connection)
                is_good, value = connection.recv()
                if is_good:
                    results[number] = value
                else:
                    errors.append(value)
                    left.clear()
                idle.append(connection)
        assert not errors, errors[0]
        return [results[number] for number in sorted(results)]


@contextmanager
def drivers(num: int) -> Iterator[Drivers]:
    """Start `num` of them; they end with the `with`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    connections, processes = [], []
    for _ in range(num):
        ours, theirs = context.Pipe()
        process = context.Process(target=_drive, args=(theirs,), daemon=False)
        process.start()
        theirs.close()
        connections.append(ours)
        processes.append(process)
    try:
        yield Drivers(connections)
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.join(30)
            if process.is_alive():
                process.kill()


def _drive(connection: Connection) -> None:
    import importlib
    import logging

    import torch

    logging.getLogger("shardstore").setLevel(
        logging.CRITICAL
    )  # the dead and their heirs warn a lot

    torch.set_num_threads(1)
    for name in _WARM:
        importlib.import_module(name)
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*args))
        except BaseException:  # noqa: BLE001 - the test raises it
            answer = (False, traceback.format_exc())
        connection.send(answer)
