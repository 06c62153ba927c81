"""Hostile snapshots: a folder in which somebody has replaced one thing of the newest snapshot."""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from shardstore import SnapshotStore
from shardstore.format.digests import table_digest
from shardstore.format.records import TensorRow
from tests.unit.format.builders import forge, forge_manifest, reseal, reseal_manifest

Hostile = Callable[[Path], object]
"""Called with the folder of the newest snapshot."""

SHARD = "rank-00000.safetensors"
MANIFEST = "manifest.json"
MARKER = "code-was-run"


def state() -> dict[str, Any]:
    """What is saved, with other values at each step."""
    return {"w": torch.arange(60.0).view(6, 10), "rng": torch.ones(2), "progress": {"epoch": 0}}


def save_two(folder: Path) -> None:
    """Steps 1 and 2 under `folder`/root, values 1 and 2."""
    with SnapshotStore(folder / "root", memory=0, timeout_s=20) as store:
        for step in (1, 2):
            live = state()
            live["w"].fill_(step)
            live["progress"]["epoch"] = step
            store.save(live, step=step).wait(20)


def bomb(folder: Path) -> bytes:
    """A pickle that leaves a marker when it is loaded."""
    marker = folder.parent.parent / MARKER
    return b"cposix\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."


def _manifest(edit: Callable[[dict[str, Any]], object]) -> Hostile:
    def act(folder: Path) -> None:
        path = folder / MANIFEST
        path.write_bytes(forge_manifest(path.read_bytes(), edit))

    return act


def _header(edit: Callable[[dict[str, Any]], object]) -> Hostile:
    def act(folder: Path) -> None:
        path = folder / SHARD
        path.write_bytes(forge(path.read_bytes(), lambda _, record: edit(record)))

    return act


def _entry(edit: Callable[[dict[str, Any]], object]) -> Hostile:
    def act(folder: Path) -> None:
        path = folder / SHARD
        path.write_bytes(forge(path.read_bytes(), lambda outer, _: edit(outer)))

    return act


def _file(name: str) -> Hostile:
    """An entry of the manifest names another file."""
    return _manifest(lambda m: m["shards"][0].update(file=name))


def _text(name: str, change: Callable[[bytes], bytes]) -> Hostile:
    """Change the JSON text itself and give it a right digest."""

    def act(folder: Path) -> None:
        path = folder / name
        data = path.read_bytes()
        if name == MANIFEST:
            path.write_bytes(reseal_manifest(change(data.rstrip(b"\n")) + b"\n"))
        else:
            length = struct.unpack("<Q", data[:8])[0]
            path.write_bytes(reseal(data, change(data[8 : 8 + length].rstrip(b" "))))

    return act


def _replace(name: str, make: Callable[[Path], object]) -> Hostile:
    """Put something else under a name."""

    def act(folder: Path) -> None:
        path = folder / name
        path.unlink()
        make(path)

    return act


def _sparse(nbytes: int) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        path.touch()
        os.truncate(path, nbytes)

    return make


def _longer(nbytes: int) -> Hostile:
    """The real file, with a hole after it."""
    return lambda folder: os.truncate(folder / SHARD, nbytes)


def _socket(path: Path) -> None:
    os.mknod(path, 0o600 | stat.S_IFSOCK)


def _outside(name: str) -> Hostile:
    """The file is elsewhere, and a link leads there."""

    def act(folder: Path) -> None:
        outside = folder.parent.parent / f"outside-{name}"
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside)

    return act


def _folder_elsewhere(folder: Path) -> None:
    outside = folder.parent.parent / "outside-folder"
    folder.rename(outside)
    folder.symlink_to(outside)


def _header_of(nbytes: int, fill: bytes) -> Callable[[Path], object]:
    """A file whose header has `nbytes`: `fill`, and then nothing but a hole."""

    def make(path: Path) -> None:
        path.write_bytes(struct.pack("<Q", nbytes) + fill)
        if nbytes < 2**40:
            os.truncate(path, 8 + nbytes)

    return make


def _table(manifest: dict[str, Any], edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit a table, and store it under the digest that it then has."""
    (old,) = manifest["tables"]
    rows = manifest["tables"].pop(old)
    edit(rows[0])
    try:
        digest = table_digest(tuple(msgspec.convert(row, TensorRow) for row in rows))
    except msgspec.ValidationError:
        digest = old
    manifest["tables"][digest] = rows
    manifest["shards"][0]["table"] = digest


def _many_ranks(manifest: dict[str, Any]) -> None:
    manifest["world_size"] = 10**6


_DEEP = 100_000
_LONG = "x" * 5000
_PADDED = b'{"__metadata__":{"shardstore_digest":"' + b"0" * 32 + b'","format":"pt"'

HOSTILE: dict[str, Hostile] = {
    # Bytes that some readers run.
    "manifest: a pickle": lambda f: (f / MANIFEST).write_bytes(bomb(f)),
    "shard: a pickle": lambda f: (f / SHARD).write_bytes(bomb(f)),
    "shard: a pickle after a length": _replace(
        SHARD,
        lambda p: p.write_bytes(struct.pack("<Q", len(bomb(p.parent))) + bomb(p.parent)),
    ),
    # Ways out of the folder.
    "manifest: an absolute path": _file("/etc/passwd"),
    "manifest: a parent's path": _file("../../rank-00000.safetensors"),
    "manifest: a backslash": _file("..\\rank-00000.safetensors"),
    "manifest: a NUL": _file("rank-00000.safetensors\0"),
    "manifest: a very long name": _file(_LONG),
    "manifest: no name": _file(""),
    "manifest: a link out": _outside(MANIFEST),
    "shard: a link out": _outside(SHARD),
    "folder: a link out": _folder_elsewhere,
    "shard: a link to itself": _replace(SHARD, lambda p: p.symlink_to(p)),
    "manifest: a dangling link": _replace(MANIFEST, lambda p: p.symlink_to("nowhere")),
    # Things that are no files.
    "manifest: a pipe": _replace(MANIFEST, os.mkfifo),
    "shard: a pipe": _replace(SHARD, os.mkfifo),
    "manifest: a socket": _replace(MANIFEST, _socket),
    "shard: a socket": _replace(SHARD, _socket),
    "manifest: a folder": _replace(MANIFEST, Path.mkdir),
    "shard: a folder": _replace(SHARD, Path.mkdir),
    # Numbers.
    "manifest: a huge shape": _manifest(lambda m: _table(m, lambda r: r.update(shape=[10**12]))),
    "manifest: a huge product": _manifest(
        lambda m: _table(m, lambda r: r.update(shape=[10**12, 10**12]))
    ),
    "manifest: a million ranks": _manifest(_many_ranks),
    "manifest: a negative size": _manifest(lambda m: m["shards"][0].update(nbytes=-1)),
    "manifest: a huge size": _manifest(lambda m: m["shards"][0].update(nbytes=2**63)),
    "manifest: a negative rank": _manifest(lambda m: m["shards"][0].update(rank=-1)),
    "manifest: a float for a step": _manifest(lambda m: m.update(step=2.5)),
    "shard: a huge shape": _header(lambda h: h["table"][0].update(shape=[10**12])),
    "shard: many dims": _header(lambda h: h["table"][0].update(shape=[1] * 10**6)),
    "shard: a negative offset": _header(lambda h: h["pieces"][0].__setitem__(1, [-3, 0])),
    "shard: an offset that overflows": _header(
        lambda h: h["pieces"][0].__setitem__(1, [2**63 - 1, 2**63 - 1])
    ),
    "shard: an entry beyond the file": _entry(
        lambda o: o["w@0"].update(shape=[10**12], data_offsets=[0, 4 * 10**12])
    ),
    "shard: a negative span": _entry(lambda o: o["w@0"].update(data_offsets=[-240, 0])),
    "shard: overlapping spans": _entry(lambda o: o["w@0"].update(data_offsets=[0, 240])),
    "shard: another rank": _header(lambda h: h.update(rank=1, world_size=2)),
    # Text that parsers trip over.
    "manifest: twice a shard": _manifest(lambda m: m["shards"].append(m["shards"][0])),
    "manifest: twice a key": _text(MANIFEST, lambda t: t[:-1] + b',"step":2}'),
    "manifest: NaN": _text(MANIFEST, lambda t: t.replace(b'"metadata":null', b'"metadata":NaN')),
    "manifest: Infinity": _text(MANIFEST, lambda t: t[:-1] + b',"created":Infinity}'),
    "manifest: deep": _text(
        MANIFEST,
        lambda t: t.replace(b'"metadata":null', b'"metadata":' + b"[" * _DEEP + b"]" * _DEEP),
    ),
    "manifest: deep and never closed": _text(
        MANIFEST, lambda t: t.replace(b'"metadata":null', b'"metadata":' + b'{"a":' * _DEEP)
    ),
    "manifest: a number of a million digits": _text(
        MANIFEST, lambda t: t.replace(b'"metadata":null', b'"metadata":' + b"9" * 10**6)
    ),
    "shard: twice a key": _text(SHARD, lambda t: t[:-1] + b"," + t[t.index(b'"rng@0":{') :]),
    "shard: deep": _header(
        lambda h: h.update(metadata=json.loads("[" * 900 + "]" * 900)),
    ),
    "shard: deeper than any parser": _text(
        SHARD, lambda t: t[:-1] + b',"x":' + b"[" * _DEEP + b"]" * _DEEP + b"}"
    ),
    # Sizes.
    "manifest: of no bytes": lambda f: (f / MANIFEST).write_bytes(b""),
    "manifest: a gigabyte of zeros": _replace(MANIFEST, _sparse(1 << 30)),
    "manifest: a terabyte after its opening": lambda f: os.truncate(f / MANIFEST, 1 << 40),
    "manifest: 100 MB after its opening": lambda f: os.truncate(f / MANIFEST, 100 << 20),
    "shard: a terabyte of zeros": _replace(SHARD, _sparse(1 << 40)),
    "shard: a terabyte after it": _longer(1 << 40),
    "shard: a header of 2^63 bytes": _replace(SHARD, _header_of(2**63, b"{")),
    "shard: a header of 2^64 - 1 bytes": _replace(SHARD, _header_of(2**64 - 1, b"{")),
    "shard: a header of 100 MB of nothing": _replace(SHARD, _header_of(99_999_992, _PADDED)),
    "shard: a header of more than 100 MB": _replace(SHARD, _header_of(100_003_832, _PADDED)),
}
