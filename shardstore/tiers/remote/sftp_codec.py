"""SFTP version 3 on the wire: numbers, fields, answers (draft-ietf-secsh-filexfer-02)."""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Final

from shardstore.tiers.remote.faults import Fault, FaultKind

LONGEST_ANSWER: Final = 1 << 20


class Request(IntEnum):
    """What a client sends."""

    INIT = 1
    OPEN = 3
    CLOSE = 4
    READ = 5
    WRITE = 6
    FSTAT = 8
    OPENDIR = 11
    READDIR = 12
    REMOVE = 13
    MKDIR = 14
    RMDIR = 15
    STAT = 17
    RENAME = 18
    EXTENDED = 200


class Answer(IntEnum):
    """What a server sends."""

    VERSION = 2
    STATUS = 101
    HANDLE = 102
    DATA = 103
    NAME = 104
    ATTRS = 105
    EXTENDED_REPLY = 201


class Code(IntEnum):
    """Of a status."""

    OK = 0
    END = 1
    NO_SUCH_FILE = 2
    PERMISSION_DENIED = 3
    FAILURE = 4
    BAD_MESSAGE = 5
    NO_CONNECTION = 6
    CONNECTION_LOST = 7
    UNSUPPORTED = 8


class Flags(IntFlag):
    """How to open a file."""

    READ = 0x01
    WRITE = 0x02
    CREATE = 0x08
    EXCLUSIVE = 0x20


class Status(Exception):  # noqa: N818 - an answer, which the store judges
    """The server answered a request with something else than OK."""

    def __init__(self, code: int, text: str, *, kind: FaultKind | None = None) -> None:
        """By the protocol's codes; `kind` where more is known than those say."""
        super().__init__(f"{text or 'no reason given'} (SFTP status {code})")
        self.code = code
        self.kind = kind
        self.text = text


@dataclass(frozen=True, slots=True)
class Attributes:
    """What the server says of a file."""

    nbytes: int
    mode: int

    @property
    def is_file(self) -> bool:
        """Regular; a server that tells no modes has only files and folders that it lists."""
        return stat.S_ISREG(self.mode) or stat.S_IFMT(self.mode) == 0

    @property
    def is_folder(self) -> bool:
        """A folder itself, not a link to one."""
        return stat.S_ISDIR(self.mode)

    @property
    def is_link(self) -> bool:
        """A symbolic link."""
        return stat.S_ISLNK(self.mode)


@dataclass(frozen=True, slots=True)
class Space:
    """What is free on the file system of a folder."""

    free_nbytes: int
    is_read_only: bool


class Body:
    """Fields of an answer, in order."""

    def __init__(self, data: bytes) -> None:
        """Nothing is read yet."""
        self._data = data
        self._at = 0

    def u32(self) -> int:
        """A number of 32 bits."""
        return int(self._number(">I"))

    def u64(self) -> int:
        """A number of 64 bits."""
        return int(self._number(">Q"))

    def string(self) -> bytes:
        """Bytes with their length before them."""
        start, end = self._at + 4, self._at + 4 + self.u32()
        if end > len(self._data):
            raise not_sftp()
        self._at = end
        return self._data[start:end]

    def attributes(self) -> Attributes:
        """What is said of a file."""
        flags = self.u32()
        nbytes = self.u64() if flags & 0x1 else 0
        self._at += 8 if flags & 0x2 else 0
        mode = self.u32() if flags & 0x4 else 0
        self._at += 8 if flags & 0x8 else 0
        for _ in range(self.u32() if flags & 0x80000000 else 0):
            self.string()
            self.string()
        return Attributes(nbytes, mode)

    def has_more(self) -> bool:
        """Whether fields are left."""
        return self._at < len(self._data)

    def _number(self, kind: str) -> int:
        try:
            (value,) = struct.unpack_from(kind, self._data, self._at)
        except struct.error as error:
            raise not_sftp() from error
        self._at += struct.calcsize(kind)
        return int(value)


def text(value: str) -> bytes:
    """A path as a field."""
    return field(value.encode("utf-8", "surrogatepass"))


def field(value: bytes) -> bytes:
    """Bytes with their length before them."""
    return struct.pack(">I", len(value)) + value


def judged(kind: int, body: bytes, wanted: int) -> bytes | Status:
    """The body of an answer of the wanted kind, or the status that came instead."""
    if kind == Answer.STATUS:
        fields = Body(body)
        code = fields.u32()
        if code != Code.OK:
            return Status(
                code, fields.string().decode(errors="replace") if fields.has_more() else ""
            )
    if kind != wanted:
        raise not_sftp()
    return body


def listed_names(body: bytes) -> Iterator[tuple[str, Attributes]]:
    """What one answer says is in a folder."""
    fields = Body(body)
    for _ in range(fields.u32()):
        name = fields.string().decode("utf-8", "replace")
        fields.string()  # as `ls -l` would print it
        attributes = fields.attributes()
        if "/" in name:
            raise not_sftp()
        if name not in (".", "..") and "\ufffd" not in name:  # which is no key
            yield name, attributes


def not_sftp() -> Fault:
    """For an answer that cannot be one."""
    return Fault(
        "broken",
        "the answer is not SFTP's; if this never works, a shell start-up file on the server may print something",
    )
