"""Small objects on remote storage: read whole, and created once, with every doubt settled by reading back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from shardstore.errors import TierError
from shardstore.tiers.remote.faults import Fault
from shardstore.tiers.remote.requests import Requests

_FIRST_READ_NBYTES: Final = 256 << 10


class Records:
    """Reads and creates manifests, run records and the like. Any thread."""

    def __init__(self, requests: Requests, *, name: str) -> None:
        """`name` is the tier's, for messages."""
        self._requests = requests
        self._store = requests.store
        self._name = name

    def read(self, key: str, limit: int, opening: bytes = b"") -> bytes | None:
        """Content of a record, None if there is none; its beginning where that is not `opening`.

        Raises:
            TierError: It cannot be read, or has more than `limit` bytes.
        """
        run = self._requests.run
        first = run("read", key, self._reading(key, _FIRST_READ_NBYTES))
        if first is None or len(first) < _FIRST_READ_NBYTES or not first.startswith(opening):
            return first
        entry = run("read", key, lambda: self._store.entry(key))
        if entry is None:
            return None
        if entry.nbytes > limit:
            where = self._requests.where(key)
            raise TierError(
                f"{self._name}: {where} has {entry.nbytes:,} bytes, no record has more than {limit:,}",
                tier=self._name, key=where, operation="read",
            )  # fmt: skip
        return run("read", key, self._reading(key, entry.nbytes))

    def _reading(self, key: str, nbytes: int) -> Callable[[], bytes | None]:
        def read() -> bytes | None:
            buffer = memoryview(bytearray(nbytes))
            try:
                return bytes(buffer[: self._store.get(key, 0, buffer)])
            except FileNotFoundError:
                if "/" in key:
                    self.check_unlisted(key)
                return None

        return read

    def check_unlisted(self, key: str) -> None:
        """Tell what is absent from what cannot be seen for a moment, which is a Fault that passes. One attempt."""
        folder, slash, _ = key.rpartition("/")
        if key in self._store.listing(folder + slash, is_flat=False).objects:
            raise Fault("broken", "it is listed, and not to be seen")

    def create(self, key: str, data: bytes, operation: str, *, is_exclusive: bool | None) -> bytes:
        """Create an object unless it is there; returns what it holds then, ours or another's.

        Args:
            key: Its name.
            data: Its content.
            operation: A verb, for messages.
            is_exclusive: Whether the store honours the condition; None: not known.

        Raises:
            TierError: Whether it is there could not be found out, or it could not be created.
        """

        def attempt() -> bytes:
            if not is_exclusive:
                stored = self._stored(key)
                if stored is not None:
                    return stored
            try:
                created = self._store.create(key, data)
            except Fault as fault:
                if not fault.is_retryable:
                    raise
                stored = self._stored(key)  # it may have been taken all the same
                if stored is None:
                    raise
                return stored
            if created and is_exclusive:
                return data
            stored = self._stored(key)
            if stored is None:
                raise Fault("broken", "it was created, and is not there")
            return stored

        return self._requests.run(operation, key, attempt, changes=True, is_behind=True)

    def _stored(self, key: str) -> bytes | None:
        """One attempt at reading it whole."""
        entry = self._store.entry(key)
        if entry is None or entry.nbytes == 0:
            return None if entry is None else b""
        return self._reading(key, entry.nbytes)()
