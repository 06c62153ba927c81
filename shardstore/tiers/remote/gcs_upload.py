"""One object on its way to Google Cloud Storage: parts as objects beside it, joined by `compose`."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Final

from shardstore.tiers.remote.faults import Fault
from shardstore.tiers.remote.gcs_client import NUM_SMALL, GCSClient, check_size, object_path
from shardstore.tiers.remote.link import Watch

_TEMPORARY: Final = re.compile(r"((.+)\.[0-9a-f]{8}-)\d{5}\.tmp", re.DOTALL)
_JOINED_AT_ONCE: Final = 32
"""What one `compose` takes (https://cloud.google.com/storage/docs/json_api/v1/objects/compose)."""


def owner_of(name: str) -> tuple[str, str] | None:
    """The object that a temporary one is for, and what all those of its upload begin with."""
    found = _TEMPORARY.fullmatch(name)
    return (found[2], found[1]) if found else None


class SmallGCSUpload:
    """A PartUpload of at most one part: a copy of it is kept until `complete`, which sends it."""

    def __init__(self, client: GCSClient, name: str) -> None:
        """`name` is the object's whole name."""
        self._client = client
        self._name = name
        self._data: bytes = b""
        self._is_complete = False

    def put(self, index: int, data: memoryview) -> None:
        """See PartUpload."""
        assert index == 0
        self._data = bytes(data)

    def complete(self) -> None:
        """See PartUpload."""
        if not self._is_complete:
            self._client.upload(self._name, memoryview(self._data))
            self._is_complete = True
            self._data = b""

    def abort(self) -> None:
        """See PartUpload."""
        self._data = b""


class ComposedUpload:
    """A PartUpload whose parts are objects of their own, called `<name>.<nonce>-<index>.tmp`."""

    def __init__(self, client: GCSClient, name: str, nbytes: int, part_bytes: int) -> None:
        """Nothing is in the bucket yet."""
        self._client = client
        self._name = name
        self._nbytes = nbytes
        self._part_bytes = part_bytes
        self._start = f"{name}.{secrets.token_hex(4)}-"
        self._generations: dict[int, str] = {}
        self._begun: set[int] = set()
        self._is_complete = False

    def put(self, index: int, data: memoryview) -> None:
        """See PartUpload."""
        start = index * self._part_bytes
        assert len(data) == min(self._part_bytes, self._nbytes - start) > 0
        self._begun.add(index)
        reply = self._client.upload(self._temporary(index), data)
        self._generations[index] = str(reply.record().get("generation", ""))

    def complete(self) -> None:
        """See PartUpload: joins the parts in a tree, then removes them."""
        if self._is_complete:
            return
        level = [(i, self._size(i)) for i in range(-(-self._nbytes // self._part_bytes))]
        assert all(index in self._generations for index, _ in level), "not all parts were put"
        following = len(level)
        while len(level) > _JOINED_AT_ONCE:
            groups = [level[i : i + _JOINED_AT_ONCE] for i in range(0, len(level), _JOINED_AT_ONCE)]
            joined = list(range(following, following + len(groups)))
            following += len(groups)
            self._begun.update(joined)
            self._client.run(lambda watch, i=joined, g=groups: self._join_all(watch, i, g))  # type: ignore[misc]
            sizes = [sum(nbytes for _, nbytes in group) for group in groups]
            level = list(zip(joined, sizes, strict=True))
        self._client.run(lambda watch: self._join(watch, self._name, level))
        self._is_complete = True
        # The object is there, whatever happens to its parts: gc finds those that stay.
        with contextlib.suppress(Fault):
            self._remove_parts()

    def abort(self) -> None:
        """See PartUpload."""
        self._remove_parts()

    def _remove_parts(self) -> None:
        remove(self._client, [self._temporary(index) for index in sorted(self._begun)])
        self._begun.clear()

    def _size(self, index: int) -> int:
        return min(self._part_bytes, self._nbytes - index * self._part_bytes)

    def _temporary(self, index: int) -> str:
        return f"{self._start}{index:05d}.tmp"

    async def _join_all(
        self, watch: Watch, joined: Sequence[int], groups: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        free = asyncio.Semaphore(NUM_SMALL)

        async def join(index: int, group: Sequence[tuple[int, int]]) -> None:
            async with free:
                generation = await self._join(watch, self._temporary(index), group)
                self._generations[index] = generation

        await asyncio.gather(*map(join, joined, groups))

    async def _join(self, watch: Watch, name: str, parts: Sequence[tuple[int, int]]) -> str:
        sources = [
            {"name": self._temporary(index), "generation": self._generations[index]}
            for index, _ in parts
        ]
        body = {
            "sourceObjects": sources,
            "destination": {"contentType": "application/octet-stream"},
        }
        path = f"{object_path(name)}/compose"
        reply = await self._client.send(watch, "POST", "/storage/v1", path, body=body)
        record = reply.record()
        check_size(record, sum(nbytes for _, nbytes in parts))
        return str(record.get("generation", ""))


def remove(client: GCSClient, names: Iterable[str]) -> None:
    """Delete objects, many at the same time; absent ones are fine."""
    names = list(names)

    async def request(watch: Watch) -> None:
        free = asyncio.Semaphore(NUM_SMALL)

        async def delete(name: str) -> None:
            async with free:
                path = object_path(name)
                await client.send(watch, "DELETE", "/storage/v1", path, accept=(404,))

        await asyncio.gather(*map(delete, names))

    if names:
        client.run(request)
