"""Uploads and downloads over a link of which each connection has a part, against what the link and the clients allow.

    python -m benchmarks.remote                          # S3, 256 MiB, 40 MB/s and 10 ms per connection
    python -m benchmarks.remote --kind moto --rate 3 --mib 96
    python -m benchmarks.remote --kind sftp --rate 5 --mib 96
    python -m benchmarks.remote --json FILE

`s3` is a server of `benchmarks.quick_s3`, which holds each connection to a rate and is no bottleneck. moto and OpenSSH's
sftp run behind the tests' proxy, which does the same (SFTP: without the delay), and moves less than 100 MB/s
on two cores: give them a low rate. Each measurement is of a process of its own, which has connected before. "bare" is botocore on 12
threads: the ceiling. s3fs is no single connection: beyond 100 MB it sends and reads 50 MB parts at a time. At last, what training loses beside an
upload on a link of 100 MB/s, and beside the same bare upload from this process and another.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import remote_clients as clients
from benchmarks.children import call, child, receive
from benchmarks.facts import facts
from benchmarks.memory import PeakSampler
from benchmarks.remote_clients import Place
from benchmarks.remote_slowdown import slowdowns
from benchmarks.table import Table, Target
from tests.servers.openssh import SftpServer
from tests.servers.process import ServerProcess
from tests.servers.proxy import Proxy
from tests.servers.s3 import MotoServer, s3_options

MIB = 1 << 20
_DELAY_S = 0.01
_SLOW_LINK = 100e6
_NUM_CONNECTIONS = 12
_ONE = "one connection"
_WAYS = ("upload", "download")


@dataclass(frozen=True)
class Measured:
    """One transfer."""

    seconds: float
    cpu_s: float
    peak_bytes: int


def measure(client: type[clients.Client], way: str, place: Place, *, with_memory: bool) -> Measured:
    """One transfer in a process of its own; memory is watched only where asked for, as that takes time."""
    with child(_transfer, client, way, place) as (process, connection):
        receive(connection, process)
        assert process.pid is not None
        sampler = PeakSampler([process.pid]) if with_memory else None
        connection.send("go")
        try:
            seconds, cpu_s = receive(connection, process)
        finally:
            peak_bytes = sampler.stop() if sampler is not None else 0
        connection.send("leave")
    return Measured(seconds, cpu_s, peak_bytes)


def _transfer(connection: Connection, client: type[clients.Client], way: str, place: Place) -> None:
    try:
        opened = client(place)
        prepared: Callable[[], Any] = opened.upload if way == "upload" else opened.download
        opened.prepare(way)
        connection.send("ready")
        connection.recv()
        connection.send(clients.timed(prepared))
        connection.recv()
        opened.close()
    except Exception as error:  # noqa: BLE001 - raised again by who waits for it
        connection.send(RuntimeError(f"{type(error).__name__}: {error}"))


def transfers(table: Table, place: Place) -> None:
    """Fill the rows of all clients."""
    found = clients.OF_KIND[place.kind]
    for run in range(table.runs):
        for client in found if run % 2 else reversed(found):
            for way in _WAYS:
                measured = measure(client, way, place, with_memory=False)
                table.add(f"{client.name}: {way}", measured.seconds)
                table.add(f"{client.name}: {way}, CPU", measured.cpu_s, "s CPU")
    for client in found:
        for way in _WAYS:
            peak = measure(client, way, place, with_memory=True).peak_bytes
            beyond = peak - client.own_bytes(place.nbytes, way)
            table.add(f"{client.name}: {way}, memory beyond state and slot", beyond / MIB, "MiB")


def targets(kind: str, nbytes: int) -> list[Target]:
    """Several times one connection, and the default of fsspec's client, which may use several itself."""
    default = clients.Default.name
    times = ">= 3" if kind == "sftp" else ">= 4"  # of 4 connections; of 12
    of_default = ">= 1.5" if kind != "sftp" and nbytes > 100e6 else ">= 3"
    found = []
    for ours in (clients.Tier.name, clients.Store.name):
        for way in _WAYS:
            row = f"{ours}: {way}"
            found += [
                Target(f"{ours}, {way}: speed against one connection", row, times, f"{_ONE}: {way}", is_speed=True),
                Target(f"{ours}, {way}: speed against {default}", row, of_default, f"{default}: {way}", is_speed=True),
                Target(f"{ours}, {way}: memory, MiB", f"{row}, memory beyond state and slot", "<= 256"),
            ]  # fmt: skip
            if kind != "sftp":
                bare = f"{clients.Bare.name}: {way}"
                found.append(Target(f"{ours}, {way}: speed against bare requests", row, ">= 0.7", bare, is_speed=True))  # fmt: skip
    return found


@contextmanager
def quick_s3(rate: float) -> Iterator[Place]:
    """A server that gives each connection a rate; the place has no size and no folder yet."""
    server = ServerProcess(
        "quick-s3",
        lambda port, _: [
            sys.executable, "-m", "benchmarks.quick_s3", str(port), str(rate), str(_DELAY_S)
        ],
        PYTHONPATH=str(Path(__file__).parents[1]),
    )  # fmt: skip
    try:
        yield Place("s3", "s3://bucket/run", s3_options(server.port), 0, "")
    finally:
        server.stop()


@contextmanager
def _proxied(kind: str, rate: float) -> Iterator[Place]:
    server: Any = MotoServer() if kind == "moto" else SftpServer()
    try:
        with Proxy(server.port, is_http=kind == "moto") as proxy:
            proxy.limit(per_connection=rate, delay_s=_DELAY_S if kind == "moto" else 0.0)
            yield Place(kind, server.fresh(), server.options_at(proxy.port), 0, "")
    finally:
        server.stop()


def run(kind: str, mib: int, runs: int, rate: float, *, with_slowdown: bool, folder: Path) -> Table:
    """All of it, over a server of its own."""
    nbytes = mib * MIB
    table = Table(f"{kind}: {mib} MiB, {rate / 1e6:g} MB/s per connection", nbytes, runs)
    table.targets = targets(kind, nbytes)
    for way in _WAYS:  # what the server gives it: no need to measure it
        table.add(f"{_ONE}: {way}", nbytes / rate)
    with quick_s3(rate) if kind == "s3" else _proxied(kind, rate) as place:
        transfers(table, replace(place, nbytes=nbytes, folder=str(folder)))
    if with_slowdown and kind == "s3":
        with quick_s3(_SLOW_LINK / _NUM_CONNECTIONS) as place:
            at = replace(place, nbytes=nbytes, folder=str(folder))
            for loop, system, slower, lost_s in call(slowdowns, at, runs):
                table.add(f"{system}: {loop} slowed", slower * 100, "%")
                table.add(f"{system}: {loop} loses", lost_s, "s lost")
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kind", choices=[*clients.OF_KIND, "all"], default="s3")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rate", type=float, default=40.0, help="MB/s of each connection")
    parser.add_argument("--no-slowdown", action="store_true", help="transfers only")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    tables = []
    folder = Path(tempfile.mkdtemp(prefix="shardstore-benchmark-", dir="/dev/shm"))
    machine = facts(folder)
    try:
        for kind in clients.OF_KIND if options.kind == "all" else [options.kind]:
            table = run(
                kind, options.mib, options.runs, options.rate * 1e6,
                with_slowdown=not options.no_slowdown, folder=folder,
            )  # fmt: skip
            table.print()
            tables.append(table)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json is not None:
        command = f"python -m benchmarks.remote --kind {options.kind} --mib {options.mib} --runs {options.runs} --rate {options.rate:g}"
        results = {
            "command": command,
            "machine": machine,
            "tables": [table.to_json() for table in tables],
        }
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
