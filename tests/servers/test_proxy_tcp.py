"""The proxy in front of something that is not HTTP: an echo."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers.proxy import Proxy, Stage

BODY = bytes(range(256)) * 200


class _Echo:
    """Gives back what it is sent."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                while data := sock.recv(65536):
                    sock.sendall(data)
            except OSError:
                return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture(scope="module")
def running_echo() -> Iterator[Proxy]:
    server = _Echo()
    with Proxy(server.port, is_http=False) as running:
        yield running
    server.close()


@pytest.fixture
def echo(running_echo: Proxy) -> Iterator[Proxy]:
    """Without HTTP, in front of an echo; without faults, nothing counted."""
    yield running_echo
    running_echo.clear()
    running_echo.reset_connections()
    running_echo.forget()


def _echoed(sock: socket.socket, data: bytes) -> bytes:
    sock.sendall(data)
    found = b""
    while len(found) < len(data):
        more = sock.recv(65536)
        if not more:
            break
        found += more
    return found


def _connected(proxy: Proxy, timeout_s: float = 20.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=timeout_s)


def test_plain_tcp_passes_and_is_counted(echo: Proxy) -> None:
    with _connected(echo) as one, _connected(echo) as other:
        assert _echoed(one, BODY[:50_000]) == BODY[:50_000]
        assert _echoed(other, b"x") == b"x"
        totals = echo.totals()
    assert (totals.connections, totals.max_parallel, totals.nbytes_up, totals.nbytes_down) == (
        2,
        2,
        50_001,
        50_001,
    )


def test_plain_tcp_ends_cleanly_where_the_server_does() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Proxy(listener.getsockname()[1], is_http=False) as proxy,
        _connected(proxy) as client,
    ):
        server, _ = listener.accept()
        with server:
            server.sendall(b"last words")
        found = b""
        while more := client.recv(100):
            found += more
    assert found == b"last words"


@pytest.mark.parametrize("stage", ["head", "request", "response"])
def test_plain_tcp_is_reset_after_so_many_bytes(echo: Proxy, stage: Stage) -> None:
    echo.reset(stage=stage, at=1000, times=1)
    with pytest.raises(ConnectionResetError), _connected(echo) as sock:
        _echoed(sock, BODY[:2000])
    with _connected(echo) as sock:
        assert _echoed(sock, BODY[:2000]) == BODY[:2000]


@pytest.mark.parametrize("stage", ["head", "request", "response"])
def test_plain_tcp_hangs_after_so_many_bytes(echo: Proxy, stage: Stage) -> None:
    echo.hang(stage=stage, at=1000, times=1)
    with _connected(echo, 0.3) as sock, pytest.raises(TimeoutError):
        _echoed(sock, BODY[:2000])


def test_plain_tcp_is_held_and_reset_and_refused(echo: Proxy) -> None:
    with _connected(echo, 0.3) as sock:
        assert _echoed(sock, b"1") == b"1"
        echo.hold(True)
        with pytest.raises(TimeoutError):
            _echoed(sock, b"2")
        echo.hold(False)
        sock.settimeout(20)
        assert sock.recv(1) == b"2"
        echo.reset_connections()
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
    echo.outage(True)
    with pytest.raises(ConnectionRefusedError):
        _connected(echo)
    echo.clear()
    with _connected(echo) as sock:
        assert _echoed(sock, b"3") == b"3"


def test_plain_tcp_is_paced(echo: Proxy) -> None:
    echo.limit(per_connection=100_000)
    begin = time.monotonic()
    with _connected(echo) as sock:
        assert _echoed(sock, BODY[:30_000]) == BODY[:30_000]
    assert time.monotonic() - begin >= 0.2


def test_an_unknown_argument_of_a_fault_is_refused(echo: Proxy) -> None:
    wrong: dict[str, Any] = {"key": "it"}
    with pytest.raises(AssertionError, match="key"):
        echo.reset(**wrong)
