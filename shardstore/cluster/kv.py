"""The key-value store under the coordinator: torch's TCPStore between processes, a dict within one."""

from __future__ import annotations

import datetime
import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


class KeyValueStore(Protocol):
    """What the coordinator needs. Reads never wait for a key."""

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        ...

    def compare_set(self, key: str, value: bytes) -> bytes:
        """Store `value` if the key is absent; returns what is stored."""
        ...

    def get(self, key: str) -> bytes | None:
        """The value, None if absent."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns the sum."""
        ...

    def delete(self, key: str) -> None:
        """Remove a key; absent is fine."""
        ...


class LocalKeyValueStore:
    """A dict for one process; shared by the threads that play ranks in tests."""

    def __init__(self) -> None:
        """Empty."""
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        with self._lock:
            self._values[key] = value

    def compare_set(self, key: str, value: bytes) -> bytes:
        """Store `value` if the key is absent; returns what is stored."""
        with self._lock:
            return self._values.setdefault(key, value)

    def get(self, key: str) -> bytes | None:
        """The value, None if absent."""
        with self._lock:
            return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns the sum."""
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            return total

    def delete(self, key: str) -> None:
        """Remove a key; absent is fine."""
        with self._lock:
            self._values.pop(key, None)

    def __len__(self) -> int:
        with self._lock:
            return len(self._values)


class TcpKeyValueStore:
    """A TCPStore of our own. One thread owns it: its client serialises calls and may block without end."""

    def __init__(self, store: TCPStore) -> None:
        """Take over a connected store."""
        self._store = store

    @classmethod
    def host(cls, timeout_s: float) -> tuple[TcpKeyValueStore, int]:
        """Start the server in this process, on a free port of all interfaces; returns it with the port."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(
            "localhost",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        return cls(store), store.port

    @classmethod
    def join(cls, host: str, port: int, timeout_s: float) -> TcpKeyValueStore:
        """Connect to a server.

        Raises:
            RuntimeError: It does not answer within `timeout_s`.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        return cls(
            TCPStore(
                host,
                port,
                is_master=False,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=timeout_s),
            )
        )

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self._store.set(key, value)  # type: ignore[arg-type]

    def compare_set(self, key: str, value: bytes) -> bytes:
        """Store `value` if the key is absent; returns what is stored."""
        return bytes(self._store.compare_set(key, "", value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes | None:
        """The value, None if absent."""
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns the sum."""
        return int(self._store.add(key, amount))

    def delete(self, key: str) -> None:
        """Remove a key; absent is fine."""
        self._store.delete_key(key)
