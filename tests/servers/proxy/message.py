"""Heads of HTTP messages, changed as little as possible: what a signature covers stays as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Framing: TypeAlias = int | Literal["chunked"] | None
"""How a body ends: after so many bytes, with the connection, or with its last chunk."""

_BODILESS: Final = frozenset({204, 304})


@dataclass(slots=True)
class Head:
    """First line and header lines, in order."""

    first: str
    lines: list[str]

    @classmethod
    def parse(cls, data: bytes) -> Head:
        """From the wire."""
        first, *lines = data.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        return cls(first, lines)

    def data(self) -> bytes:
        """For the wire."""
        return "\r\n".join([self.first, *self.lines, "", ""]).encode("latin-1")

    def get(self, name: str) -> str | None:
        """A header's value."""
        for line in self.lines:
            key, _, value = line.partition(":")
            if key.strip().lower() == name:
                return value.strip()
        return None

    def set(self, name: str, value: str | None) -> None:
        """Give a header another value in its place, or remove it; nothing, if it is not there."""
        kept = []
        for line in self.lines:
            key = line.partition(":")[0]
            if key.strip().lower() != name:
                kept.append(line)
            elif value is not None:
                kept.append(f"{key}: {value}")
        self.lines = kept

    @property
    def status(self) -> int:
        """Of an answer."""
        return int(self.first.split(" ", 2)[1])

    def is_last(self) -> bool:
        """Whether the sender closes the connection after this message."""
        told = (self.get("connection") or "").lower()
        is_old = "HTTP/1.0" in self.first
        return told == "close" or (is_old and told != "keep-alive")

    def request_body(self) -> Framing:
        """How the body of this request ends."""
        if "chunked" in (self.get("transfer-encoding") or "").lower():
            return "chunked"
        return int(self.get("content-length") or 0)

    def answer_body(self, method: str) -> Framing:
        """How the body of this answer to a `method` ends."""
        if method == "HEAD" or self.status in _BODILESS or self.status < 200:
            return 0
        if "chunked" in (self.get("transfer-encoding") or "").lower():
            return "chunked"
        length = self.get("content-length")
        return None if length is None else int(length)


def error_answer(status: int, code: str, body: str | None = None) -> tuple[Head, bytes]:
    """An answer as S3 and Azure give it: the code in XML, and in the header that Azure's clients read."""
    if body is None:
        body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>fault</Message></Error>'
    data = body.encode()
    lines = [
        f"Content-Type: {'application/xml' if body.startswith('<') else 'application/json'}",
        f"Content-Length: {len(data)}",
        f"x-ms-error-code: {code}",
    ]
    return Head(f"HTTP/1.1 {status} {code}", lines), data
