"""Remote storage as the tier uses it: a folder of objects. One attempt per call, exact names, no caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Entry:
    """An object, as the store describes it."""

    nbytes: int
    tag: str
    """Unequal for two contents of one name (ETag, generation); empty where the store has nothing like it."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What is below a name."""

    objects: Mapping[str, Entry] = field(default_factory=dict)
    """By key, relative to the root."""
    folders: frozenset[str] = frozenset()
    """Keys up to the next slash, without it; empty where all was listed."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An upload in parts that was begun, and neither completed nor aborted."""

    key: str
    token: str
    """What the store calls it."""


class PartUpload(Protocol):
    """One object on its way; nobody sees it before `complete`."""

    def put(self, index: int, data: memoryview) -> None:
        """Send part `index`, from 0 on: bytes [index * part_bytes, ...). From any thread; again replaces.

        `data` is read until this returns, and not after.
        """
        ...

    def complete(self) -> None:
        """Make it visible, whole. Again after a fault in doubt is fine."""
        ...

    def abort(self) -> None:
        """Drop what was sent. Again, or after `complete`, is fine: it removes no visible object."""
        ...


class ObjectStore(Protocol):
    """One folder in a bucket (or on a server). Thread-safe, and none of its state survives a fork.

    Keys are relative to the root, with `/` between folder and name, and taken literally: no globs, no
    unquoting, no `..`. Each method makes the requests of one attempt, bounded by a deadline; who calls
    decides about another one. Errors are `Fault`, with the client's exception as cause.
    """

    kind: str
    """For messages: `S3`, `Google Cloud Storage`, `Azure`, `SFTP`, or fsspec's protocol."""
    location: str
    """The root's URL, normalised, without credentials."""
    num_parallel: int
    """Requests at the same time that are worth it."""
    may_be_exclusive: bool
    """False: `create` only looks before it writes, which no trial can tell from exclusive."""
    is_in_order: bool
    """Parts of one object must be put one after the other, from 0 on."""

    def check(self) -> None:
        """Make the smallest request that shows the server, the credentials and the bucket are good.

        That nothing is at the root yet is fine.
        """
        ...

    def check_writable(self) -> None:
        """Raise the Fault that a write would meet, as far as can be told without leaving anything."""
        ...

    def listing(self, prefix: str, *, is_flat: bool) -> Listing:
        """All objects whose key begins with `prefix`, never from a cache; missing folders are empty.

        Args:
            prefix: Empty, or a key up to and with a slash.
            is_flat: Everything below, in as few requests as the store allows. Else only what is directly in
                the folder, with `folders`.
        """
        ...

    def entry(self, key: str) -> Entry | None:
        """Describe one object, never from a cache; None if there is none."""
        ...

    def get(self, key: str, start: int, into: memoryview) -> int:
        """Read bytes from `start` on into `into`, which is not empty; returns how many there were.

        Fewer than asked only at the object's end. What the server sends beyond, or from elsewhere, is a
        Fault ("broken").

        Raises:
            FileNotFoundError: There is no such object.
            Fault: It failed.
        """
        ...

    def put(self, key: str, data: bytes) -> None:
        """Create or replace a small object, atomically where the store can."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Create a small object unless there is one: False then. Whether that is honoured is probed."""
        ...

    def begin(self, key: str, nbytes: int, part_bytes: int) -> PartUpload:
        """Begin an object of `nbytes` that is sent in parts of `part_bytes` (the last one smaller)."""
        ...

    def part_bytes(self, nbytes: int) -> int:
        """A good size for the parts of an object of `nbytes`: 8 MiB, or what the number of parts needs."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; absent ones are fine."""
        ...

    def unfinished(self) -> list[Unfinished]:
        """Uploads in parts below the root that were begun and not ended, by whomever."""
        ...

    def abort_unfinished(self, upload: Unfinished) -> None:
        """Drop one of them; that it is gone is fine."""
        ...

    def close(self) -> None:
        """Give up connections."""
        ...
