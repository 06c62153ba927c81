"""Checks of a root on remote storage: reading, writing, exclusive create, ranges, uploads left over, speed.

Everything is tried with one object under a random name beside the snapshots, which is removed again.
"""

from __future__ import annotations

import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from shardstore.cli.checks.check import Check
from shardstore.cli.output import size
from shardstore.errors import ShardStoreError
from shardstore.tiers.base import RootTier
from shardstore.tiers.remote.tier import RemoteTier

_SPEED_BYTES: Final = 64 << 20


def check_remote(tier: RootTier, *, with_speed: bool) -> list[Check]:
    """Look at a remote root; one that cannot be read ends it."""
    try:
        tier.check()
    except ShardStoreError as error:
        return [Check("root: read", "fail", str(error), "")]
    checks = [Check("root: read", "ok", f"{tier.location} answers")]
    if not isinstance(tier, RemoteTier):
        return checks
    try:
        tier.make_location()
    except ShardStoreError as error:
        remedy = "Snapshots can be restored from there; for saving it must be writable."
        return [*checks, Check("root: write", "fail", str(error), remedy)]
    checks.append(Check("root: write", "ok", "objects can be made, replaced and removed"))
    checks.append(_exclusive(tier))
    checks += _uploads(tier)
    if with_speed:
        checks += _speed(tier)
    return checks


def _exclusive(tier: RemoteTier) -> Check:
    name, facts = "root: exclusive create", {"honoured": tier.is_exclusive}
    if tier.is_exclusive:
        return Check(name, "ok", "an object is created only once", facts=facts)
    return Check(
        name, "warn", "an object that exists is created again: the store ignores the condition",
        "Two processes that commit at the same time are not kept apart. Let one job at a time work on this "
        "root, and clear what dead runs left yourself (gc --including-unknown).",
        facts,
    )  # fmt: skip


def _uploads(tier: RemoteTier) -> list[Check]:
    name = "root: unfinished uploads"
    try:
        found = tier.list_unfinished()
    except ShardStoreError as error:
        text = f"they cannot be listed: {error}"
        return [Check(name, "warn", text, "Set a rule that ends them after some days.")]
    if not found:
        return [Check(name, "ok", "there are none")]
    text = f"{len(found)} uploads in parts were begun and not ended; those of dead runs take space"
    return [Check(name, "ok", text, facts={"uploads": len(found)})]


def _speed(tier: RemoteTier) -> list[Check]:
    """One shard up and down, as a rank would."""
    key = f".probe-{secrets.token_hex(8)}"
    data = memoryview(secrets.token_bytes(1 << 20) * (_SPEED_BYTES >> 20))
    try:
        writer = tier.probe_writer(key, len(data))
        started = time.perf_counter()
        step = writer.piece_bytes
        try:
            with ThreadPoolExecutor(writer.num_parallel) as pool:
                starts = range(0, len(data), step)
                list(pool.map(lambda at: writer.write(data[at : at + step], at), starts))
            writer.publish()
            up_s = time.perf_counter() - started
            started = time.perf_counter()
            into = memoryview(bytearray(len(data)))
            with tier.probe_reader(key, len(data)) as reader:
                reader.stream(0, len(data), lambda a, b: into[a:b], lambda _data, _at: None)
            down_s = time.perf_counter() - started
        finally:
            writer.discard()
            tier.remove_small(key)
    except ShardStoreError as error:
        return [Check("root: speed", "fail", str(error), "")]
    if into != data:
        return [Check("root: speed", "fail", "what was read is not what was written", "")]
    up, down = len(data) / up_s, len(data) / down_s
    text = f"{size(int(up))}/s up and {size(int(down))}/s down, {size(len(data))} in parts"
    return [
        Check("root: speed", "ok", text, facts={"up_bytes_per_s": up, "down_bytes_per_s": down})
    ]
