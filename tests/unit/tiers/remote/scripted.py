"""An HTTP server on loopback that answers as a test says, also wrongly or not at all."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass(frozen=True)
class Request:
    """What came."""

    method: str
    path: str
    """Unquoted, with the bucket."""
    query: dict[str, str]
    headers: dict[str, str]
    """With names in lower case."""
    body: bytes


@dataclass(frozen=True)
class Answer:
    """What goes back."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None
    """What the header says of the body; None is the truth."""


class Hang:
    """No answer until the server is stopped."""


class Reset:
    """The connection is reset."""


Script = Callable[[Request], Answer | Hang | Reset]


class ScriptedServer:
    """Serves until `stop`; each request is kept in `requests`."""

    def __init__(self, script: Script, *, reads_bodies: bool = True) -> None:
        """With `reads_bodies` False it answers, and closes, when it has seen the head of a request."""
        self.requests: list[Request] = []
        self._stopped = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def answer(self) -> None:
                nbytes = int(self.headers.get("content-length", 0)) if reads_bodies else 0
                parts = urlsplit(self.path)
                query = parse_qs(parts.query, keep_blank_values=True)
                request = Request(
                    self.command,
                    unquote(parts.path),
                    {name: values[0] for name, values in query.items()},
                    {name.lower(): value for name, value in self.headers.items()},
                    self.rfile.read(nbytes),
                )
                outer.requests.append(request)
                answer = script(request)
                if isinstance(answer, Hang):
                    outer._stopped.wait(60)
                if not isinstance(answer, Answer):
                    linger = struct.pack("ii", 1, 0)
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    self.close_connection = True
                    self.connection.close()
                    return
                self.send_response_only(answer.status)
                length = len(answer.body) if answer.length is None else answer.length
                for name, value in {"Content-Length": str(length), **answer.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body)
                if length != len(answer.body) or not reads_bodies:
                    self.close_connection = True

            def do_GET(self) -> None:
                with contextlib.suppress(OSError, ValueError):
                    self.answer()

            do_PUT = do_POST = do_HEAD = do_DELETE = do_GET  # noqa: N815 - http.server's names

            def handle_expect_100(self) -> bool:
                outer._stopped.wait(60)  # never says "go on"
                return False

            def log_message(self, *_args: object) -> None:
                return

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, *_args: object) -> None:
                return

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def stop(self) -> None:
        """End it, and what hangs."""
        self._stopped.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def seen(self, method: str, *, query: str = "") -> list[Request]:
        """The requests of a method, perhaps only those with a query parameter."""
        return [r for r in self.requests if r.method == method and (not query or query in r.query)]
