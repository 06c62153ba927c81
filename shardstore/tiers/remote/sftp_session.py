"""SFTP over one channel, with many requests on their way at once.

paramiko brings SSH; its SFTP client waits for each request, or reads ahead on threads whose errors nobody
hears, and hides the extensions that durable and exclusive writes need (OpenSSH's PROTOCOL, section 4).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from shardstore.tiers.remote.faults import Fault
from shardstore.tiers.remote.link import Link, Watch
from shardstore.tiers.remote.sftp_codec import (
    LONGEST_ANSWER,
    Answer,
    Attributes,
    Body,
    Code,
    Flags,
    Request,
    Space,
    Status,
    field,
    judged,
    listed_names,
    not_sftp,
    text,
)

IN_FLIGHT_BYTES: Final = 2 << 20
"""Of reads and writes that were not answered yet: what one channel's window holds."""
IN_FLIGHT_REQUESTS: Final = 64
_LEAST_BYTES: Final = 32 << 10
"""Every server takes reads and writes of this size."""
_MOST_BYTES: Final = 255 << 10
_RECEIVE_BYTES: Final = 1 << 20


class Channel(Protocol):
    """What is needed of paramiko's."""

    def settimeout(self, timeout: float) -> None:  # noqa: D102
        ...

    def send(self, data: bytes, /) -> int:  # noqa: D102
        ...

    def recv(self, nbytes: int, /) -> bytes:  # noqa: D102
        ...


class Session:
    """One SFTP conversation. One thread at a time; after any error but `Status` it is of no use.

    Attributes:
        extensions: What the server says it can do beyond the protocol.
    """

    def __init__(self, channel: Channel, link: Link) -> None:
        """Agree on the version, and on how large requests may be.

        Raises:
            Fault: The other side does not speak SFTP, or not in time.
            Status: It refuses.
        """
        self._channel = channel
        self._link = link
        self._received = memoryview(b"")
        self._last_id = 0
        self.allow(0)
        self._send_all(struct.pack(">IBI", 5, Request.INIT, 3))
        kind, body = self._packet()
        fields = Body(body)
        if kind != Answer.VERSION or fields.u32() < 3:
            raise not_sftp()
        self.extensions: dict[bytes, bytes] = {}
        while fields.has_more():
            name = fields.string()
            self.extensions[name] = fields.string()
        self._read_bytes = self._write_bytes = _LEAST_BYTES
        if b"limits@openssh.com" in self.extensions:
            limits = Body(
                self._ask(Request.EXTENDED, field(b"limits@openssh.com"), Answer.EXTENDED_REPLY)
            )
            limits.u64()
            self._read_bytes = min(limits.u64() or _LEAST_BYTES, _MOST_BYTES)
            self._write_bytes = min(limits.u64() or _LEAST_BYTES, _MOST_BYTES)

    def allow(self, nbytes: int) -> float:
        """Begin the time that the next requests, which move `nbytes`, may take; returns its end."""
        self._watch = Watch(self._link.moved)
        self._limit = time.monotonic() + self._link.limit_s(nbytes)
        return self._limit

    # ---------------------------------------------------------------- requests

    def open(self, path: str, flags: Flags) -> bytes:
        """Open a file (or a folder, for reading); returns the handle, to be closed."""
        return Body(
            self._ask(Request.OPEN, text(path) + struct.pack(">II", flags, 0), Answer.HANDLE)
        ).string()

    def close(self, handle: bytes) -> None:
        """Close a handle; what the file system held back until then is raised here."""
        self._ask(Request.CLOSE, field(handle), Answer.STATUS)

    def attributes(self, path: str) -> Attributes | None:
        """Of a file or folder, links followed; None where there is none."""
        try:
            return Body(self._ask(Request.STAT, text(path), Answer.ATTRS)).attributes()
        except Status as answer:
            if answer.code == Code.NO_SUCH_FILE:
                return None
            raise

    def handle_attributes(self, handle: bytes) -> Attributes:
        """Of what is open."""
        return Body(self._ask(Request.FSTAT, field(handle), Answer.ATTRS)).attributes()

    def make_folder(self, path: str) -> None:
        """Make one folder in an existing one."""
        self._ask(Request.MKDIR, text(path) + struct.pack(">I", 0), Answer.STATUS)

    def rename_to_new(self, path: str, new: str) -> None:
        """Rename a file unless the new name is taken; the protocol demands that of every server."""
        self._ask(Request.RENAME, text(path) + text(new), Answer.STATUS)

    def extended(self, name: bytes, fields: bytes, answer: int = Answer.STATUS) -> bytes:
        """Ask for an extension."""
        return self._ask(Request.EXTENDED, field(name) + fields, answer)

    def space(self, path: str) -> Space | None:
        """Of the file system; None where the server cannot tell."""
        name = b"statvfs@openssh.com"
        if name not in self.extensions:
            return None
        try:
            fields = Body(self.extended(name, text(path), Answer.EXTENDED_REPLY))
        except Status:
            return None
        _, fragment, _, _, available, _, _, _, _, flags, _ = (fields.u64() for _ in range(11))
        return Space(fragment * available, bool(flags & 0x1))

    def each(self, kind: int, bodies: Sequence[bytes], answer: int) -> list[bytes | Status]:
        """Make many requests of one kind, all on their way together; results in their order."""
        results: dict[int, bytes | Status] = {}
        waiting: list[int] = []
        order: list[int] = []
        for start in range(0, len(bodies), IN_FLIGHT_REQUESTS):
            batch = bodies[start : start + IN_FLIGHT_REQUESTS]
            self.allow(0)
            waiting = [self._request(kind, body) for body in batch]
            order += waiting
            for _ in batch:
                number, got, body = self._answer()
                if number not in waiting or number in results:
                    raise not_sftp()
                results[number] = judged(got, body, answer)
        return [results[number] for number in order]

    def folders(self, paths: Sequence[str]) -> Iterator[tuple[str, list[tuple[str, Attributes]]]]:
        """What is in each of these folders (without `.` and `..`); missing ones are left out."""
        for start in range(0, len(paths), IN_FLIGHT_REQUESTS):
            batch = paths[start : start + IN_FLIGHT_REQUESTS]
            opened: dict[str, bytes] = {}
            refused: Status | None = None
            for path, got in zip(batch, self.each(Request.OPENDIR, [text(p) for p in batch], Answer.HANDLE), strict=True):  # fmt: skip
                if isinstance(got, bytes):
                    opened[path] = Body(got).string()
                elif got.code != Code.NO_SUCH_FILE:
                    refused = refused or Status(got.code, f"{path}: {got.text}")
            found: dict[str, list[tuple[str, Attributes]]] = {path: [] for path in opened}
            reading = list(opened) if refused is None else []
            while reading:
                answers = self.each(
                    Request.READDIR, [field(opened[path]) for path in reading], Answer.NAME
                )
                for path, names in zip(list(reading), answers, strict=True):
                    if isinstance(names, bytes):
                        found[path] += listed_names(names)
                    else:
                        reading.remove(path)
                        if names.code != Code.END:
                            refused = refused or names
            self.each(Request.CLOSE, [field(handle) for handle in opened.values()], Answer.STATUS)
            if refused is not None:
                raise refused
            yield from found.items()

    # -------------------------------------------------------------- contents

    def read(self, handle: bytes, start: int, into: memoryview) -> int:
        """Fill `into` from `start` on, until the file's end; returns how many bytes that were.

        Raises:
            Fault: More came than was asked for, or bytes beyond a place where the file ends.
        """
        end = len(into)
        at = 0
        again: list[tuple[int, int]] = []
        waiting: dict[int, tuple[int, int]] = {}
        in_flight = 0
        refused: Status | None = None
        got_to = 0
        while waiting or ((again or at < end) and refused is None):
            while refused is None and in_flight < IN_FLIGHT_BYTES and (again or at < end):
                offset, size = again.pop() if again else (at, min(self._read_bytes, end - at))
                at = max(at, offset + size)
                request = field(handle) + struct.pack(">QI", start + offset, size)
                waiting[self._request(Request.READ, request)] = (offset, size)
                in_flight += size
            number, kind, rest = self._head()
            offset, size = waiting.pop(number, (-1, 0))
            in_flight -= size
            if offset < 0:
                raise not_sftp()
            if kind == Answer.DATA:
                (length,) = struct.unpack(">I", self._exactly(4))
                if length != rest - 4 or not 0 < length <= size:
                    raise Fault("broken", f"{length} bytes came where {size} were asked for")
                self._fill(into[offset : offset + length])
                got_to = max(got_to, offset + length)
                if length < size:  # the file ends here, or the server gives less at once
                    again.append((offset + length, size - length))
                continue
            status = judged(kind, self._exactly(rest), Answer.DATA)
            assert isinstance(status, Status)
            if status.code == Code.END:
                end = min(end, offset)
            else:
                refused = refused or status
        if refused is not None:
            raise refused
        if got_to > end:
            raise Fault(
                "broken", f"bytes came from {start + end} on, where the file was said to end"
            )
        return end

    def write(self, handle: bytes, start: int, data: memoryview) -> None:
        """Write all of `data` at `start`; when it returns the server has taken it."""
        waiting: dict[int, int] = {}
        in_flight = at = 0
        refused: Status | None = None
        while waiting or (at < len(data) and refused is None):
            while refused is None and at < len(data) and in_flight < IN_FLIGHT_BYTES:
                piece = data[at : at + self._write_bytes]
                head = field(handle) + struct.pack(">QI", start + at, len(piece))
                waiting[self._request(Request.WRITE, head, piece)] = len(piece)
                in_flight += len(piece)
                at += len(piece)
            number, kind, body = self._answer()
            size = waiting.pop(number, 0)
            if not size:
                raise not_sftp()
            in_flight -= size
            answer = judged(kind, body, Answer.STATUS)
            if isinstance(answer, Status):
                refused = refused or answer
            else:
                self._watch.moved(size)
        if refused is not None:
            raise refused

    # ---------------------------------------------------------------- packets

    def _ask(self, kind: int, body: bytes, answer: int) -> bytes:
        number = self._request(kind, body)
        came, got, rest = self._answer()
        if came != number:
            raise not_sftp()
        result = judged(got, rest, answer)
        if isinstance(result, Status):
            raise result
        return result

    def _request(self, kind: int, body: bytes, data: memoryview | bytes = b"") -> int:
        self._last_id = (self._last_id + 1) & 0xFFFFFFFF
        head = struct.pack(">IBI", 5 + len(body) + len(data), kind, self._last_id)
        self._send_all(b"".join((head, body, data)))
        return self._last_id

    def _answer(self) -> tuple[int, int, bytes]:
        number, kind, rest = self._head()
        return number, kind, self._exactly(rest)

    def _head(self) -> tuple[int, int, int]:
        length, kind, number = struct.unpack(">IBI", self._exactly(9))
        if not 5 <= length <= LONGEST_ANSWER:
            raise not_sftp()
        return number, kind, length - 5

    def _packet(self) -> tuple[int, bytes]:
        length, kind = struct.unpack(">IB", self._exactly(5))
        if not 1 <= length <= LONGEST_ANSWER:
            raise not_sftp()
        return kind, self._exactly(length - 1)

    def _send_all(self, packet: bytes) -> None:
        rest = memoryview(packet)
        while rest:
            # Copied here, as paramiko wants bytes and takes no more than one SSH packet of them.
            sent = self._timed().send(bytes(rest[: 32 << 10]))
            if not sent:
                raise EOFError("the server closed the channel")
            self._watch.last = time.monotonic()
            rest = rest[sent:]

    def _exactly(self, nbytes: int) -> bytes:
        if len(self._received) >= nbytes:  # nearly always
            got = bytes(self._received[:nbytes])
            self._received = self._received[nbytes:]
            return got
        into = bytearray(nbytes)
        self._receive_into(memoryview(into), is_progress=False)
        return bytes(into)

    def _fill(self, into: memoryview) -> None:
        self._receive_into(into, is_progress=True)

    def _receive_into(self, into: memoryview, *, is_progress: bool) -> None:
        while len(into):
            if not self._received:
                came = self._timed().recv(_RECEIVE_BYTES)
                if not came:
                    raise EOFError("the server closed the channel")
                self._watch.last = time.monotonic()
                self._received = memoryview(came)
            size = min(len(into), len(self._received))
            into[:size] = self._received[:size]
            into, self._received = into[size:], self._received[size:]
            if is_progress:
                self._watch.moved(size)

    def _timed(self) -> Channel:
        now = time.monotonic()
        left = min(self._watch.last + self._link.stall_s, self._limit) - now
        if left <= 0:
            raise TimeoutError
        self._channel.settimeout(left)
        return self._channel
