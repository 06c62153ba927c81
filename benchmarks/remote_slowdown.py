"""What training loses while a snapshot is uploaded: the loops of `benchmarks.slowdown` beside a save to S3."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.children import child, receive
from benchmarks.remote_clients import Bare, Place, Store
from benchmarks.slowdown import ALONE_S, Behind, Pending, PythonLoop, TorchLoop, disturb


class _Elsewhere:
    """A bare upload that goes on in another process."""

    def __init__(self, connection: Connection, process: Any) -> None:
        self._connection = connection
        self._process = process

    def begin(self) -> _Elsewhere:
        self._connection.send("go")
        return self

    def done(self) -> bool:
        return self._connection.poll()

    def result(self) -> None:
        receive(self._connection, self._process)


def _upload_when_told(connection: Connection, place: Place) -> None:
    bare = Bare(place)
    bare.prepare("upload")
    connection.send("ready")
    while connection.recv() == "go":
        bare.upload()
        connection.send("done")
    bare.close()


def slowdowns(place: Place, runs: int) -> list[tuple[str, str, float, float]]:
    """For each loop and system, how much slower it is (0.05: takes 5 % longer), and seconds lost."""
    ours, here = Store(place), Bare(place)
    ours.prepare("upload")
    here.prepare("upload")
    steps = 1
    found = []

    def save() -> Pending:
        nonlocal steps
        steps += 1
        return ours.store.save(ours.state, step=steps).committed

    with child(_upload_when_told, place) as (process, connection):
        receive(connection, process)
        elsewhere = _Elsewhere(connection, process)
        systems: dict[str, Callable[[], Pending]] = {
            "shardstore": save,
            "bare upload, another process": elsewhere.begin,
            "bare upload, this process": lambda: Behind(here.upload),
        }
        for begin in systems.values():
            begin().result()
        for run in range(2 * runs):
            for loop in (PythonLoop(), TorchLoop()):
                order = systems if run % 2 else reversed(systems)
                found += [
                    (loop.name, name, *disturb(loop.work, systems[name], ALONE_S)) for name in order
                ]
        connection.send("leave")
    ours.close()
    here.close()
    return found
