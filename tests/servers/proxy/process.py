"""The proxy's process: a listener, a thread for each connection, and a socket that takes orders."""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import threading
from dataclasses import asdict
from typing import Any, Final

from tests.servers.proxy.http import HttpConnection, Shared
from tests.servers.proxy.rules import Rule
from tests.servers.proxy.tcp import TcpConnection


class Listener:
    """Accepts connections, unless there is an outage. Its port stays its own meanwhile."""

    def __init__(self, shared: Shared, *, is_http: bool) -> None:
        self._shared: Final = shared
        self._kind: Final = HttpConnection if is_http else TcpConnection
        self._age = 0
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._listening: socket.socket | None = None
        self._accepting: threading.Thread | None = None
        self._placeholder = self._bound()
        self.listen()

    def _bound(self) -> socket.socket:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", self._shared.port))
        return sock

    def listen(self) -> None:
        """Accept from now on."""
        if self._listening is None:
            self._listening = self._bound()
            self._listening.listen(512)
            self._accepting = threading.Thread(
                target=self._accept, args=(self._listening,), daemon=True
            )
            self._accepting.start()

    def refuse(self) -> None:
        """Accept none from now on, and reset those that are there."""
        if self._listening is not None and self._accepting is not None:
            self._listening.shutdown(socket.SHUT_RDWR)
            self._accepting.join()  # what it has just accepted is to be reset too
            self._listening.close()
            self._listening = None
        self.reset()

    def reset(self) -> None:
        """Reset all connections; returns when they are."""
        with self._lock:
            self._age += 1
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listening.accept()
                with self._lock:
                    thread = threading.Thread(
                        target=self._serve, args=(sock, self._age), daemon=True
                    )
                    self._threads.add(thread)
                    thread.start()  # before anybody may join it

    def _serve(self, sock: socket.socket, age: int) -> None:
        def is_ended() -> bool:
            return age != self._age

        try:
            self._kind(sock, self._shared, is_ended).serve()
        finally:
            sock.close()
            with self._lock:
                self._threads.discard(threading.current_thread())


class Orders:
    """What the test may tell the proxy; each answer is JSON."""

    def __init__(self, shared: Shared, listener: Listener) -> None:
        self._shared: Final = shared
        self._listener: Final = listener

    def add(self, **rule: Any) -> int:
        return self._shared.rules.add(Rule(**rule))

    def hits(self, number: int, at_least: int, timeout_s: float) -> int:
        return self._shared.rules.hits(number, at_least, timeout_s)

    def remove(self, number: int | None) -> None:
        self._shared.rules.remove(number)

    def limit(self, per_connection: float | None, total: float | None, delay_s: float) -> None:
        limits = self._shared.limits
        limits.per_connection, limits.total.rate, limits.delay_s = per_connection, total, delay_s

    def hold(self, is_on: bool) -> None:
        if is_on:
            self._shared.limits.is_open.clear()
        else:
            self._shared.limits.is_open.set()

    def outage(self, is_on: bool) -> None:
        if is_on:
            self._listener.refuse()
        else:
            self._listener.listen()

    def reset_connections(self) -> None:
        self._listener.reset()

    def requests(self) -> list[dict[str, Any]]:
        return [asdict(request) for request in self._shared.counts.requests]

    def totals(self) -> dict[str, int]:
        return asdict(self._shared.counts.totals)

    def forget(self) -> None:
        self._shared.counts.clear()

    def obey(self, sock: socket.socket) -> None:
        """Carry out the one order that comes over a connection."""
        with sock, sock.makefile("rwb") as file:
            line = file.readline()
            if line:
                name, arguments = json.loads(line)
                file.write(json.dumps(getattr(self, name)(**arguments)).encode() + b"\n")


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("upstream_port", type=int)
    parser.add_argument("control")
    parser.add_argument("--tcp", action="store_true")
    given = parser.parse_args()
    shared = Shared(given.port, given.upstream_port)
    orders = Orders(shared, Listener(shared, is_http=not given.tcp))
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(given.control)
        control.listen(64)
        while True:
            sock, _ = control.accept()
            threading.Thread(target=orders.obey, args=(sock,), daemon=True).start()


if __name__ == "__main__":
    main()
