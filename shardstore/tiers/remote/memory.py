"""fsspec's memory://, an object store inside this process: for tests, and to try things out."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

from shardstore.tiers.remote.link import Link
from shardstore.tiers.remote.objects import Entry, Listing, PartUpload, Unfinished

_PART_BYTES: Final = 8 << 20
_LOCK: Final = threading.RLock()
"""All instances share one dict, and its files one position."""


class MemoryStore:
    """See ObjectStore. Every object is whole or absent, as on a real one."""

    kind = "memory"
    may_be_exclusive = True
    is_in_order = False
    num_parallel = 4

    def __init__(self, fs: Any, root: str, *, location: str, link: Link) -> None:
        """Over an instance of fsspec's MemoryFileSystem; `root` is a path of its."""
        self._fs = fs
        self._root = root
        self._link = link
        self.location = location

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def check(self) -> None:
        """It is there."""

    def check_writable(self) -> None:
        """It is."""

    def listing(self, prefix: str, *, is_flat: bool) -> Listing:
        """See ObjectStore."""
        start = self._path(prefix)
        objects: dict[str, Entry] = {}
        folders: set[str] = set()
        with _LOCK:
            for path in list(self._fs.store):
                if path.startswith(start):
                    key = path[len(self._root) + 1 :]
                    below = path[len(start) :]
                    if "/" in below and not is_flat:
                        folders.add(prefix + below.split("/", 1)[0])
                    else:
                        objects[key] = self._entry(path)
        return Listing(objects, frozenset(folders))

    def _entry(self, path: str) -> Entry:
        file = self._fs.store[path]
        return Entry(len(file.getbuffer()), file.created.isoformat())

    def entry(self, key: str) -> Entry | None:
        """See ObjectStore."""
        with _LOCK:
            path = self._path(key)
            return self._entry(path) if path in self._fs.store else None

    def get(self, key: str, start: int, into: memoryview) -> int:
        """See ObjectStore."""
        with _LOCK:
            data = self._fs.cat_file(self._path(key), start=start, end=start + len(into))
        into[: len(data)] = data
        self._link.moved(len(data))
        return len(data)

    def put(self, key: str, data: bytes) -> None:
        """See ObjectStore."""
        with _LOCK:
            self._fs.pipe_file(self._path(key), bytes(data))
        self._link.moved(len(data))

    def create(self, key: str, data: bytes) -> bool:
        """See ObjectStore."""
        with _LOCK:
            if self._path(key) in self._fs.store:
                return False
            self._fs.pipe_file(self._path(key), bytes(data))
        return True

    def part_bytes(self, nbytes: int) -> int:
        """See ObjectStore."""
        del nbytes
        return _PART_BYTES

    def begin(self, key: str, nbytes: int, part_bytes: int) -> PartUpload:
        """See ObjectStore."""
        del nbytes, part_bytes
        return _MemoryUpload(self, key)

    def delete(self, keys: Sequence[str]) -> None:
        """See ObjectStore."""
        with _LOCK:
            for key in keys:
                self._fs.store.pop(self._path(key), None)

    def unfinished(self) -> list[Unfinished]:
        """They end with the process."""
        return []

    def abort_unfinished(self, upload: Unfinished) -> None:
        """See `unfinished`."""

    def close(self) -> None:
        """Nothing is kept."""


class _MemoryUpload:
    def __init__(self, store: MemoryStore, key: str) -> None:
        self._store = store
        self._key = key
        self._parts: dict[int, bytes] = {}
        self._is_over = False

    def put(self, index: int, data: memoryview) -> None:
        """See PartUpload."""
        self._parts[index] = bytes(data)
        self._store._link.moved(len(data))  # noqa: SLF001 - one class in two

    def complete(self) -> None:
        """See PartUpload."""
        if not self._is_over:
            self._store.put(self._key, b"".join(self._parts[i] for i in sorted(self._parts)))
            self._is_over = True
            self._parts.clear()

    def abort(self) -> None:
        """See PartUpload."""
        self._is_over = True
        self._parts.clear()
