"""Speeds, measured for about a second each on little data: an order of magnitude, no benchmark."""

from __future__ import annotations

import os
import time
from typing import Final

from shardstore.cli.checks.check import Check
from shardstore.cli.checks.folder import scratch_folder
from shardstore.cli.output import size
from shardstore.tiers.fileops import CHUNK_BYTES, FileOps, free_bytes
from shardstore.tiers.pages import private_pages
from shardstore.tiers.transfer import PacedWriter, Ring, read_ahead

_MAX_BYTES: Final = 256 << 20
_MAX_S: Final = 1.0
_COPY_BYTES: Final = 32 << 20
_SLOW_DISK: Final = 100e6
_SLOW_MEMORY: Final = 1e9


def check_disk_speed(folder: str, ops: FileOps) -> list[Check]:
    """Write with fsync, then read back past the page cache where that works."""
    if free_bytes(folder) < 4 * _MAX_BYTES:
        text = f"not measured: less than {size(4 * _MAX_BYTES)} are free"
        return [Check("speed: root", "warn", text, "Free space there.")]
    try:
        with scratch_folder(folder) as scratch:
            path = os.path.join(scratch, "speed")
            nbytes, seconds = _write(path, ops)
            checks = [_judge("speed: write + fsync", nbytes, seconds, _SLOW_DISK)]
            num_read, seconds = _read(path, nbytes, ops)
            checks.append(_judge("speed: read", num_read, seconds, _SLOW_DISK))
            return checks
    except OSError as error:
        return [Check("speed: root", "fail", f"{error.strerror}", "See the checks above.")]


def _write(path: str, ops: FileOps) -> tuple[int, float]:
    chunk = private_pages(CHUNK_BYTES)
    chunk[:] = os.urandom(1 << 20) * (CHUNK_BYTES >> 20)
    fd = ops.open_new(path)
    try:
        writer = PacedWriter(ops, fd)
        started, done = time.perf_counter(), 0
        while done < _MAX_BYTES and time.perf_counter() - started < _MAX_S:
            writer.write(chunk, done)
            done += CHUNK_BYTES
        writer.finish()
        return done, time.perf_counter() - started
    finally:
        os.close(fd)


def _read(path: str, nbytes: int, ops: FileOps) -> tuple[int, float]:
    fd = ops.open_existing(path)
    try:
        started = time.perf_counter()
        end = read_ahead(ops, fd, 0, nbytes, Ring().place, lambda _data, _start: None)
        return end, time.perf_counter() - started
    finally:
        os.close(fd)


def check_memory_speed() -> Check:
    """Copy warm memory on one thread."""
    source, target = private_pages(_COPY_BYTES), private_pages(_COPY_BYTES)
    source[:] = bytes(_COPY_BYTES)
    target[:] = source
    started, done = time.perf_counter(), 0
    while done < 8 * _COPY_BYTES:
        target[:] = source
        done += _COPY_BYTES
    return _judge("speed: memory copy", done, time.perf_counter() - started, _SLOW_MEMORY)


def _judge(name: str, nbytes: int, seconds: float, slow: float) -> Check:
    speed = nbytes / max(seconds, 1e-9)
    facts = {"bytes_per_s": speed, "nbytes": nbytes, "seconds": seconds}
    text = f"{size(int(speed))}/s ({size(nbytes)} in {seconds:.2f} s: a glance, no benchmark)"
    if speed < slow:
        return Check(
            name, "warn", text, "Slow: is something else at work on this host or disk?", facts
        )
    return Check(name, "ok", text, facts=facts)
