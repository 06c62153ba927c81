"""Two ranks, as threads of one process, that save to a remote root through memory and disks."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.threaded import Ranks, Stores
from tests.servers.proxy import Proxy
from tests.servers.s3 import MotoServer, RcloneServer
from tests.unit.tiers.remote.test_s3 import fast_session


@dataclass
class Host:
    """What is near the ranks: memory and a disk. Both can be lost."""

    memory: Path
    disk: Path | None
    root: str
    storage_options: Mapping[str, object]
    options: dict[str, Any] = field(default_factory=dict)

    def open(self, **options: Any) -> Stores:
        """A store on both ranks."""
        self.memory.mkdir(exist_ok=True)
        given: dict[str, Any] = {"memory": "1MiB", "memory_dir": self.memory, **self.options}
        return Ranks().open(
            self.root,
            disk=self.disk,
            name="job",
            storage_options=self.storage_options,
            **given | options,
        )

    def lose_memory(self) -> None:
        """As after a reboot."""
        shutil.rmtree(self.memory)

    def lose_disk(self) -> None:
        """As on another host."""
        assert self.disk is not None
        shutil.rmtree(self.disk)

    def in_memory(self, step: int, rank: int) -> Path:
        """A rank's file in memory."""
        return _one(self.memory, step, rank)

    def on_disk(self, step: int, rank: int) -> Path:
        """A rank's file on its disk."""
        assert self.disk is not None
        return _one(self.disk, step, rank)

    def steps_on_disk(self) -> set[int]:
        """Steps of which the disk has a file."""
        assert self.disk is not None
        return {
            int(path.parent.name.partition("step-")[2][:12])
            for path in self.disk.rglob("rank-*.safetensors")
        }


def _one(folder: Path, step: int, rank: int) -> Path:
    (found,) = folder.rglob(f"step-{step:012d}.*/rank-{rank:05d}.safetensors")
    return found


def flip(path: Path, at: int = -3) -> None:
    """Damage one byte of the data."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


@functools.cache
def _session() -> Any:
    return fast_session()


def s3_options(server: MotoServer | RcloneServer, proxy: Proxy | None = None) -> dict[str, Any]:
    """Options that start a client fast, through a proxy or directly."""
    port = server.port if proxy is None else proxy.port
    return {**server.options_at(port), "session": _session()}


def s3_keys(server: MotoServer, bucket: str | None = None) -> list[str]:
    """All keys of a bucket, as the server's own client sees them."""
    pages = server.client.get_paginator("list_objects_v2").paginate(Bucket=bucket or server.bucket)
    return [each["Key"] for page in pages for each in page.get("Contents", ())]


numbers = itertools.count()
