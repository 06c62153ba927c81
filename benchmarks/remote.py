"""Uploads and downloads over a link of which each connection has a part, against what the link and the clients allow.

    python -m benchmarks.remote                          # S3, 256 MiB, 40 MB/s and 10 ms per connection
    python -m benchmarks.remote --kind sftp
    python -m benchmarks.remote --rate 10 --mib 64       # where server, proxy and client have few cores
    python -m benchmarks.remote --json FILE

moto (or OpenSSH's sftp) runs on loopback behind the tests' proxy, which holds each connection to a rate and delays
requests (SFTP: only the rate). Each measurement is of a process of its own, which has connected before. Server
and proxy use the same cores: "bare" is what botocore on threads gets there, and the ceiling. Then what training loses beside
an upload on a link of 100 MB/s; the bare upload from another process says what the cores that server and proxy
take are worth.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
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
from tests.servers.proxy import Proxy
from tests.servers.s3 import MotoServer

MIB = 1 << 20
_DELAY_S = 0.01
_SLOW_LINK = 100e6
_ONE = "one connection"
_BARE = "bare: 12 connections"
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


def targets(kind: str) -> list[Target]:
    """Four times one connection and the default of fsspec's client."""
    peer = f"{clients.OF_KIND[kind][1].name}"
    return [
        target
        for ours in (clients.Tier.name, clients.Store.name)
        for way in _WAYS
        for target in (
            Target(f"{ours}, {way}: speed against one connection", f"{ours}: {way}", ">= 4", f"{_ONE}: {way}", is_speed=True),
            Target(f"{ours}, {way}: speed against {peer}", f"{ours}: {way}", ">= 4", f"{peer}: {way}", is_speed=True),
            *([Target(f"{ours}, {way}: speed against {_BARE}", f"{ours}: {way}", ">= 0.8", f"{_BARE}: {way}", is_speed=True)] if kind == "s3" else []),
            Target(f"{ours}, {way}: memory, MiB", f"{ours}: {way}, memory beyond state and slot", "<= 256"),
        )
    ]  # fmt: skip


def run(kind: str, mib: int, runs: int, rate: float, *, with_slowdown: bool, folder: Path) -> Table:
    """All of it, over a server of its own."""
    table = Table(f"{kind}: {mib} MiB, {rate / 1e6:.0f} MB/s per connection", mib * MIB, runs)
    table.targets = targets(kind)
    server: Any = MotoServer() if kind == "s3" else SftpServer()
    try:
        with Proxy(server.port, is_http=kind == "s3") as proxy:
            place = Place(
                kind, server.fresh(), server.options_at(proxy.port), mib * MIB, str(folder)
            )
            proxy.limit(per_connection=rate, delay_s=_DELAY_S if kind == "s3" else 0.0)
            # One connection's rate is what the proxy gives it: no need to measure it each time.
            for way in _WAYS:
                table.add(f"{_ONE}: {way}", place.nbytes / rate)
            transfers(table, place)
            if with_slowdown and kind == "s3":
                proxy.limit(total=_SLOW_LINK)
                for loop, system, slower, lost_s in call(slowdowns, place, runs):
                    table.add(f"{system}: {loop} slowed", slower * 100, "%")
                    table.add(f"{system}: {loop} loses", lost_s, "s")
    finally:
        server.stop()
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
