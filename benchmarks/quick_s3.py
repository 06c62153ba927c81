"""An S3 server that is no bottleneck: a few requests of the protocol, objects in memory, a rate for each connection.

    python -m benchmarks.quick_s3 PORT RATE DELAY_S

moto behind a proxy in Python moves 50 to 100 MB/s on two cores, whatever the client does. This moves more than
ten times that, so that a link of 12 x 40 MB/s is the limit, and not the machine. Signatures are not looked at, tags
are counters. For measurements only: the tests' servers say what is right.
"""

from __future__ import annotations

import itertools
import re
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

Answer: TypeAlias = tuple[int, dict[str, str], Sequence[bytes | memoryview]]
"""Status, heads, and the body in pieces."""

_CHUNK: Final = 1 << 20
_KEPT_IN_KERNEL: Final = 256 << 10


@dataclass(frozen=True)
class Stored:
    """An object, in the parts that it came in."""

    parts: list[bytearray]
    tag: str

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum(map(len, self.parts))

    def between(self, start: int, stop: int) -> list[memoryview]:
        """Its bytes, not copied."""
        found, at = [], 0
        for part in self.parts:
            view = memoryview(part)[max(0, start - at) : max(0, stop - at)]
            found.append(view)
            at += len(part)
        return [view for view in found if view.nbytes]


class Objects:
    """What is stored; any thread."""

    def __init__(self) -> None:
        """Nothing is."""
        self.lock: Final = threading.Lock()
        self.whole: dict[str, Stored] = {}
        self.parts: dict[str, dict[int, bytearray]] = {}
        self._numbers = itertools.count()

    def tag(self) -> str:
        """A new one."""
        return f'"{next(self._numbers):032x}"'


class Connection:
    """One client's requests, one after the other."""

    def __init__(self, sock: socket.socket, objects: Objects, rate: float, delay_s: float) -> None:
        """`rate` in bytes per second, of bodies in each direction."""
        self._socket = sock
        self._file = sock.makefile("rb", buffering=1 << 16)
        self._objects = objects
        self._rate = rate
        self._delay_s = delay_s
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _KEPT_IN_KERNEL)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def serve(self) -> None:
        """Until the client closes."""
        time.sleep(self._delay_s)
        while line := self._file.readline():
            method, target, _ = line.decode().split(" ")
            heads: dict[str, str] = {}
            while (head := self._file.readline()) not in (b"\r\n", b""):
                name, _, value = head.decode().partition(":")
                heads[name.lower()] = value.strip()
            time.sleep(self._delay_s)
            if "expect" in heads:
                self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = self._body(int(heads.get("content-length", 0)))
            url = urlsplit(target)
            query = dict(parse_qsl(url.query, keep_blank_values=True))
            self._answer(method, unquote(url.path).lstrip("/"), query, heads, body)

    def _body(self, nbytes: int) -> bytearray:
        body = bytearray(nbytes)
        view, due = memoryview(body), time.monotonic()
        while view.nbytes:
            got = self._file.readinto(view[:_CHUNK])  # type: ignore[attr-defined]
            if not got:
                raise ConnectionError
            view = view[got:]
            due += got / self._rate
            time.sleep(max(0.0, due - time.monotonic()))
        return body

    def _answer(
        self, method: str, path: str, query: dict[str, str], heads: dict[str, str], body: bytearray
    ) -> None:
        objects = self._objects
        answer: Answer
        with objects.lock:
            found = objects.whole.get(path)
            if "uploads" in query:
                token = objects.tag().strip('"')
                objects.parts[token] = {}
                answer = (200, {}, [f"<R><UploadId>{token}</UploadId></R>".encode()])
            elif "partNumber" in query:
                objects.parts[query["uploadId"]][int(query["partNumber"])] = body
                answer = (200, {"ETag": objects.tag()}, [])
            elif "uploadId" in query:
                parts = objects.parts.pop(query["uploadId"], {})
                if method == "POST":
                    objects.whole[path] = Stored([parts[i] for i in sorted(parts)], objects.tag())
                answer = (200, {}, [b"<R><ETag>t</ETag></R>"])
            elif "delete" in query:
                bucket = path.split("/", maxsplit=1)[0]
                for key in re.findall(rb"<Key>(.*?)</Key>", body):
                    objects.whole.pop(f"{bucket}/{key.decode()}", None)
                answer = (200, {}, [b"<R></R>"])
            elif "/" not in path.rstrip("/"):
                answer = (200, {}, [self._listed(path.rstrip("/"), query)])
            elif method == "PUT" and "if-none-match" in heads and found is not None:
                answer = (412, {}, [b"<Error><Code>PreconditionFailed</Code></Error>"])
            elif method == "PUT":
                objects.whole[path] = Stored([body], objects.tag())
                answer = (200, {"ETag": objects.whole[path].tag}, [])
            elif method == "DELETE":
                objects.whole.pop(path, None)
                answer = (204, {}, [])
            elif found is None:
                answer = (404, {}, [b"<Error><Code>NoSuchKey</Code></Error>"])
            else:
                answer = _object(found, heads.get("range"))
        self._send(method, answer)

    def _listed(self, bucket: str, query: dict[str, str]) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        rows, folders = [], set()
        for name, stored in sorted(self._objects.whole.items()):
            key = name.removeprefix(f"{bucket}/")
            if name.startswith(f"{bucket}/{prefix}"):
                below = key[len(prefix) :]
                if delimiter and delimiter in below:
                    folders.add(prefix + below.split(delimiter)[0] + delimiter)
                else:
                    rows.append(
                        f"<Contents><Key>{escape(key)}</Key><Size>{stored.nbytes}</Size><ETag>{escape(stored.tag)}</ETag></Contents>"
                    )
        shown = [
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in folders
        ]
        return f"<R><IsTruncated>false</IsTruncated>{''.join(rows + shown)}</R>".encode()

    def _send(self, method: str, answer: Answer) -> None:
        status, heads, body = answer
        heads = {"Content-Length": str(sum(map(len, body))), **heads}
        lines = [f"HTTP/1.1 {status} x", *(f"{name}: {value}" for name, value in heads.items())]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode())
        due = time.monotonic()
        for each in body if method != "HEAD" else ():
            view = memoryview(each)
            for start in range(0, view.nbytes, _CHUNK):
                piece = view[start : start + _CHUNK]
                self._socket.sendall(piece)
                due += piece.nbytes / self._rate
                time.sleep(max(0.0, due - time.monotonic()))


def _object(found: Stored, asked: str | None) -> Answer:
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", asked or "")
    heads = {"ETag": found.tag}
    if match is None:
        return 200, heads, found.between(0, found.nbytes)
    start, stop = int(match[1]), min(int(match[2] or found.nbytes) + 1, found.nbytes)
    heads["Content-Range"] = f"bytes {start}-{stop - 1}/{found.nbytes}"
    return 206, heads, found.between(start, stop)


def main() -> None:
    """Serve until killed."""
    port, rate, delay_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    objects = Objects()

    def serve(sock: socket.socket) -> None:
        with sock:
            try:
                Connection(sock, objects, rate, delay_s).serve()
            except (ConnectionError, ValueError):
                pass  # the client went

    with socket.create_server(("127.0.0.1", port), backlog=512) as listener:
        while True:
            threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


if __name__ == "__main__":
    main()
