"""One client connection that speaks HTTP: requests one after the other, each with at most one fault."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from tests.servers.proxy.counts import Counts, Request
from tests.servers.proxy.message import Framing, Head, error_answer
from tests.servers.proxy.rules import Rule, Rules, Stage
from tests.servers.proxy.wire import EndedError, Limits, Pace, Side, chunks

_BEGINNING: Final = 4096


class _StruckError(Exception):
    """The fault has been carried out; the connection is over."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What the connections of one proxy have in common."""

    port: int
    upstream_port: int
    rules: Rules = field(default_factory=Rules)
    limits: Limits = field(default_factory=Limits)
    counts: Counts = field(default_factory=Counts)
    records: dict[tuple[str, str], tuple[Head, bytes]] = field(default_factory=dict)
    """Answers to give again, by method and target."""


class HttpConnection:
    """Passes requests on to the server, over a connection of its own."""

    def __init__(self, client: socket.socket, shared: Shared, is_ended: Callable[[], bool]) -> None:
        self._client = Side(client, is_ended)
        self._shared: Final = shared
        self._limits: Final = shared.limits
        self._counts: Final = shared.counts
        self._is_ended: Final = is_ended
        self._server: Side | None = None
        self._up, self._down = Pace(), Pace()
        self._is_last = False
        """The connection ends with the request in progress."""

    def serve(self) -> None:
        """Until either side ends it."""
        is_new = True
        try:
            while head := self._client.read_until(b"\r\n\r\n"):
                if is_new:
                    self._counts.connected()
                    time.sleep(self._limits.delay_s)  # the connection's own way there and back
                    is_new = False
                with self._counts.in_progress():
                    self._serve(Head.parse(head), len(head))
                if self._is_last:
                    break
            self._client.close()
        except _StruckError:
            pass
        except EndedError:
            self._client.reset()
        finally:
            if self._server is not None:
                self._server.reset()

    def _serve(self, head: Head, nbytes: int) -> None:
        """One request."""
        self._up.rate = self._down.rate = self._limits.per_connection
        if self._limits.per_connection is not None:
            self._client.be_paced()
        self._counts.moved(nbytes, is_up=True)
        time.sleep(self._limits.delay_s)
        self._up.restart()
        method, target = head.first.split(" ")[:2]
        self._is_last = head.is_last()
        request = self._counts.add(method, target)
        beginning = b""
        framing = head.request_body()
        if self._shared.rules.wants_body() and isinstance(framing, int) and not head.get("expect"):
            beginning = self._client.peek(min(framing, _BEGINNING))
        rule = self._shared.rules.match(method, target, beginning)
        request.fault = rule.kind if rule is not None else None
        self._strike(rule, "head")
        if (head.get("expect") or "").lower() == "100-continue":
            self._client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        instead = self._instead(rule, method, target)
        if instead is not None:
            for _ in _pieces(self._client, head.request_body(), self._limits.chunk):
                pass
            self._answer(method, *instead, request)
            return
        asked = head.get("range") or head.get("x-ms-range")
        if rule is not None and rule.kind == "range" and asked:
            _change_range(head, asked, rule)
        answer = self._pass_on(method, head, request, rule)
        self._is_last |= answer.is_last()
        if rule is not None and (rule.stage == "done" or rule.kind == "stale"):
            body = self._drain(answer.answer_body(method))
            self._strike(rule, "done")
            if rule.kind == "answer":
                answer, body = error_answer(**rule.options)
            else:
                self._shared.records[method, target] = answer, body
            self._answer(method, answer, body, request)
        else:
            self._relay_answer(method, answer, request, rule, asked)

    def _instead(self, rule: Rule | None, method: str, target: str) -> tuple[Head, bytes] | None:
        """What to answer without asking the server."""
        if rule is None or rule.stage != "head":
            return None
        if rule.kind == "answer":
            return error_answer(**rule.options)
        return self._shared.records.get((method, target)) if rule.kind == "stale" else None

    def _strike(self, rule: Rule | None, stage: Stage) -> None:
        """Reset or hang, if the rule says so at this stage."""
        if rule is None or rule.stage != stage or rule.kind not in ("reset", "hang"):
            return
        if rule.kind == "hang":
            while not (rule.is_over or self._client.is_gone()):
                pass
        self._client.reset()
        raise _StruckError

    def _answer(self, method: str, head: Head, body: bytes, request: Request) -> None:
        """Send an answer of ours or of earlier."""
        fresh = Head(head.first, list(head.lines))
        if fresh.get("transfer-encoding"):
            fresh.set("transfer-encoding", None)
            fresh.lines.append(f"Content-Length: {len(body)}")
        request.status = fresh.status
        self._send_down(fresh.data())
        if method != "HEAD" and body:
            request.nbytes_down = len(body)
            self._send_down(body)

    def _pass_on(self, method: str, head: Head, request: Request, rule: Rule | None) -> Head:
        """Send the request to the server; returns the head of its answer."""
        server = self._connected()
        self._send_up(server, head.data())
        limit = rule.at if rule is not None and rule.stage == "request" else None
        framing = head.request_body()
        for piece in _pieces(self._client, framing, self._limits.chunk):
            kept = piece if limit is None else piece[: limit - request.nbytes_up]
            request.nbytes_up += kept.nbytes
            try:
                self._send_up(server, _framed(kept, framing))
            except EndedError:  # it has answered before the whole body came
                self._is_last = True
                break
            if limit is not None and request.nbytes_up >= limit:
                break
        else:
            if framing == "chunked":
                self._send_up(server, b"0\r\n\r\n")
        self._strike(rule, "request")
        while True:
            data = server.read_until(b"\r\n\r\n")
            if not data:
                raise EndedError
            answer = Head.parse(data)
            if answer.status >= 200:  # 100 Continue the client has had from us
                return answer

    def _relay_answer(
        self, method: str, answer: Head, request: Request, rule: Rule | None, asked: str | None
    ) -> None:
        assert self._server is not None
        self._down.restart()
        framing = answer.answer_body(method)
        is_cut = rule is not None and rule.stage == "response"
        left = rule.at if rule is not None and is_cut else None
        is_honest = rule is not None and rule.options.get("is_honest", False)
        if left is not None and is_honest and isinstance(framing, int):
            answer.set("content-length", str(min(left, framing)))
        if rule is not None and rule.kind == "range" and asked and rule.options["claims_asked"]:
            total = (answer.get("content-range") or "/*").rpartition("/")[2]
            answer.set("content-range", f"{asked.replace('=', ' ', 1)}/{total}")
        request.status = answer.status
        self._send_down(answer.data())
        for piece in _pieces(self._server, framing, self._limits.chunk):
            kept = piece if left is None else piece[:left]
            if (
                rule is not None
                and rule.kind == "flip"
                and 0 <= rule.at - request.nbytes_down < kept.nbytes
            ):
                kept = memoryview(bytearray(kept))
                kept[rule.at - request.nbytes_down] ^= 1
            request.nbytes_down += kept.nbytes
            self._send_down(_framed(kept, framing))
            if left is not None:
                left -= kept.nbytes
                if left == 0:
                    break
        if is_cut:
            self._strike(rule, "response")
            self._is_last = True
        if framing == "chunked" and (not is_cut or is_honest):
            self._send_down(b"0\r\n\r\n")

    def _drain(self, framing: Framing) -> bytes:
        assert self._server is not None
        return b"".join(
            bytes(piece) for piece in _pieces(self._server, framing, self._limits.chunk)
        )

    def _connected(self) -> Side:
        """The connection to the server: a new one, if there is none or it was closed meanwhile."""
        if self._server is not None and self._server.is_stale():
            self._server.reset()
            self._server = None
        if self._server is None:
            try:
                sock = socket.create_connection(
                    ("127.0.0.1", self._shared.upstream_port), timeout=10.0
                )
            except OSError as error:
                raise EndedError from error
            self._server = Side(sock, self._is_ended)
        return self._server

    def _send_up(self, server: Side, data: bytes | memoryview) -> None:
        self._limits.wait(self._up, len(data), self._is_ended)
        self._counts.moved(len(data), is_up=True)  # before the test can see the bytes arrive
        server.send(data)

    def _send_down(self, data: bytes | memoryview) -> None:
        self._limits.wait(self._down, len(data), self._is_ended)
        self._counts.moved(len(data), is_up=False)
        self._client.send(data)


def _pieces(side: Side, framing: Framing, most: Callable[[], int]) -> Iterator[memoryview]:
    """A body without its framing."""
    if framing != "chunked":
        yield from chunks(side, framing, most)
        return
    while nbytes := int(side.read_until(b"\r\n").split(b";")[0] or b"0", 16):
        yield from chunks(side, nbytes, most)
        side.read_until(b"\r\n")
    while side.read_until(b"\r\n") not in (b"\r\n", b""):
        pass


def _framed(piece: memoryview, framing: Framing) -> bytes | memoryview:
    """A piece as a chunk, where the body goes in chunks."""
    if framing != "chunked" or not piece.nbytes:
        return piece
    return b"%x\r\n" % piece.nbytes + bytes(piece) + b"\r\n"


def _change_range(head: Head, asked: str, rule: Rule) -> None:
    """Ask the server for another range, or for the whole object."""
    name = "range" if head.get("range") else "x-ms-range"
    shift = rule.options["shift"]
    if shift is None:
        head.set(name, None)
        return
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", asked)
    assert found is not None, asked
    start, end = found.groups()
    head.set(name, f"bytes={int(start) + shift}-{int(end) + shift if end else ''}")
