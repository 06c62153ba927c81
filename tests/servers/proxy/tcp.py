"""One client connection of which nothing is understood: bytes both ways, with at most one fault."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Final

from tests.servers.proxy.http import Shared
from tests.servers.proxy.rules import Rule, Stage
from tests.servers.proxy.wire import EndedError, Pace, Side


class TcpConnection:
    """Counts as one request of the method TCP, with no path."""

    def __init__(self, client: socket.socket, shared: Shared, is_ended: Callable[[], bool]) -> None:
        self._is_over: Final = threading.Event()
        self._is_clean = False
        self._is_ended: Final = lambda: self._is_over.is_set() or is_ended()
        self._client = Side(client, self._is_ended)
        self._shared: Final = shared

    def serve(self) -> None:
        """Until either side ends it."""
        shared = self._shared
        rule = shared.rules.match("TCP", "")
        request = shared.counts.add("TCP", "")
        request.fault = rule.kind if rule is not None else None
        shared.counts.connected()
        with shared.counts.in_progress():
            server = None
            try:
                if rule is not None and rule.stage == "head":
                    self._strike(rule)
                    return
                try:
                    sock = socket.create_connection(
                        ("127.0.0.1", shared.upstream_port), timeout=10.0
                    )
                except OSError:
                    return
                server = Side(sock, self._is_ended)
                up = threading.Thread(
                    target=self._relay, args=(self._client, server, rule, "request"), daemon=True
                )
                up.start()
                self._relay(server, self._client, rule, "response")
                up.join()
            finally:
                if self._is_clean:
                    self._client.close()
                else:
                    self._client.reset()
                if server is not None:
                    server.reset()

    def _relay(self, source: Side, sink: Side, rule: Rule | None, stage: Stage) -> None:
        pace, moved, is_up = Pace(), 0, stage == "request"
        limits = self._shared.limits
        try:
            while piece := source.read(limits.chunk()):
                pace.rate = limits.per_connection
                if pace.rate is not None:
                    self._client.be_paced()
                limits.wait(pace, piece.nbytes, self._is_ended)
                if rule is not None and rule.stage == stage:
                    piece = piece[: rule.at - moved]
                self._shared.counts.moved(piece.nbytes, is_up=is_up)
                sink.send(piece)
                moved += piece.nbytes
                if rule is not None and rule.stage == stage and moved >= rule.at:
                    self._strike(rule)
                    break
            else:
                self._is_clean = True
        except EndedError:
            pass
        self._is_over.set()

    def _strike(self, rule: Rule) -> None:
        if rule.kind == "hang":
            while not (rule.is_over or self._client.is_gone()):
                pass
