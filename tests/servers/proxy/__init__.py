"""A proxy in front of one of the servers, with faults that the test turns on and off while it runs.

    with Proxy(s3_server.port) as proxy:
        options = s3_server.options_at(proxy.port)
        lost = proxy.reset(method="PUT", path="manifest", times=1, stage="done")
        ...
        assert lost.hits == 1

It runs in a process of its own, so that its threads do not wait for the test's. Heads pass unchanged, Host
with them, which signatures cover; what a fault alters is said there.
"""

from __future__ import annotations

import json
import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.servers.process import ServerProcess
from tests.servers.proxy.counts import Request, Totals
from tests.servers.proxy.rules import Kind, Stage

__all__ = ["Fault", "Proxy", "Request", "Stage", "Totals"]

_REPOSITORY: Final = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault that was ordered; it acts until removed, or has struck `times`."""

    proxy: Proxy
    number: int

    @property
    def hits(self) -> int:
        """Requests that met it so far."""
        return self.wait(0, 0.0)

    def wait(self, at_least: int = 1, timeout_s: float = 30.0) -> int:
        """Return once so many requests met it, or after `timeout_s`: how many did."""
        hits: int = self.proxy.order(
            "hits", number=self.number, at_least=at_least, timeout_s=timeout_s
        )
        return hits

    def remove(self) -> None:
        """End it. Connections that hang because of it are reset."""
        self.proxy.order("remove", number=self.number)


class Proxy:
    """Listens on `port` and passes on to the server; `stop`, or leaving the `with`, ends it.

    Faults take `method` and `path`, regular expressions: the first for the whole method, the second searched
    for in path and query as they are on the wire (percent-encoded). `times` limits a fault to so many
    requests, `skip` lets so many pass first. A request meets the first fault that was ordered and matches.

    Without HTTP, a connection counts as one request of the method TCP. Of the faults, `reset` and `hang` then
    apply: at "head" (the connection is accepted), or after `at` bytes of "request" or "response".
    """

    def __init__(self, upstream_port: int, *, is_http: bool = True) -> None:
        """Start it in front of the server on `upstream_port`."""
        self._process = ServerProcess(
            "proxy",
            lambda port, folder: [
                sys.executable, "-m", "tests.servers.proxy.process", str(port), str(upstream_port),
                str(folder / "control"), *([] if is_http else ["--tcp"]),
            ],
            listens_on="control",
            PYTHONPATH=str(_REPOSITORY),
        )  # fmt: skip
        self.port: Final = self._process.port
        self.pid: Final = self._process.pid
        self.folder: Final = self._process.folder

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it, and all connections with it."""
        self._process.stop()

    # Faults

    def reset(self, *, stage: Stage = "head", at: int = 0, **match: Any) -> Fault:
        """Close with RST: at "done" the server has carried the request out, and the client has no answer."""
        return self._add("reset", match, stage=stage, at=at)

    def hang(self, *, stage: Stage = "head", at: int = 0, **match: Any) -> Fault:
        """Go no further, until the client gives up, or the fault is removed: then RST."""
        return self._add("hang", match, stage=stage, at=at)

    def answer(
        self,
        status: int,
        code: str = "InternalError",
        *,
        body: str | None = None,
        stage: Stage = "head",
        **match: Any,
    ) -> Fault:
        """Answer in the server's stead, as 503 SlowDown; at "done" the server has carried the request out.

        Args:
            status: HTTP's.
            code: S3's or Azure's.
            body: Instead of S3's XML; taken for JSON unless it begins with `<`.
            stage: "head" or "done".
            match: Which requests.
        """
        assert stage in ("head", "done")
        return self._add("answer", match, stage=stage, status=status, code=code, body=body)

    def hide(self, code: str = "NoSuchKey", **match: Any) -> Fault:
        """Answer reads with 404, as for an object that is not visible yet."""
        return self.answer(404, code, **{"method": "GET|HEAD", **match})

    def short(self, at: int, *, is_honest: bool = False, **match: Any) -> Fault:
        """End the answer's body after `at` bytes, cleanly; if honest, its Content-Length says so too."""
        return self._add("short", match, stage="response", at=at, is_honest=is_honest)

    def shift_range(self, by: int, *, claims_asked: bool, **match: Any) -> Fault:
        """Answer a ranged GET with bytes from elsewhere.

        The request's Range is changed, so only with servers that check no signature over it: moto, fake-gcs.

        Args:
            by: Bytes towards the end.
            claims_asked: Content-Range says what was asked for; else what was sent.
            match: Which requests.
        """
        return self._add("range", match, shift=by, claims_asked=claims_asked)

    def whole(self, **match: Any) -> Fault:
        """Answer a ranged GET with 200 and the whole object; with the servers of `shift_range`."""
        return self._add("range", match, shift=None, claims_asked=False)

    def flip(self, at: int = 0, **match: Any) -> Fault:
        """Flip a bit in byte `at` of the body of GET's answer."""
        return self._add("flip", {"method": "GET", **match}, at=at)

    def stale(self, **match: Any) -> Fault:
        """Answer with the first answer that the same method and target had since any such fault was ordered."""
        return self._add("stale", {"method": "GET", **match})

    def limit(
        self,
        *,
        per_connection: float | None = None,
        total: float | None = None,
        delay_s: float = 0.0,
    ) -> None:
        """Hold every connection to a rate; what is not given is unlimited again.

        Args:
            per_connection: Bytes per second for each connection, in each direction.
            total: Bytes per second for all connections and both directions together.
            delay_s: Before a connection's first request, and before each request; plain TCP has none.
        """
        self.order("limit", per_connection=per_connection, total=total, delay_s=delay_s)

    def hold(self, is_on: bool) -> None:
        """Stop all bytes on all connections, old and new; off lets them go on."""
        self.order("hold", is_on=is_on)

    def outage(self, is_on: bool) -> None:
        """Refuse new connections and reset the present ones; off accepts again, on the same port."""
        self.order("outage", is_on=is_on)

    def reset_connections(self) -> None:
        """Reset the present connections, once."""
        self.order("reset_connections")

    def clear(self) -> None:
        """End all faults and limits."""
        self.order("remove", number=None)
        self.limit()
        self.hold(False)
        self.outage(False)

    # Counts

    def requests(self, method: str = ".*", path: str = "") -> list[Request]:
        """Requests since the start or `forget`, by the order of their arrival; matched as for faults."""
        found = [Request(**one) for one in self.order("requests")]
        return [
            one for one in found if re.fullmatch(method, one.method) and re.search(path, one.path)
        ]

    def totals(self) -> Totals:
        """Sums since the start or `forget`."""
        return Totals(**self.order("totals"))

    def forget(self) -> None:
        """Count from zero."""
        self.order("forget")

    def order(self, name: str, **arguments: Any) -> Any:
        """Have the proxy's process do something, and wait until it has."""
        with socket.socket(socket.AF_UNIX) as control:
            control.connect(str(self.folder / "control"))
            with control.makefile("rwb") as file:
                file.write(json.dumps([name, arguments]).encode() + b"\n")
                file.flush()
                answer = file.readline()
        assert answer, f"the proxy failed: {self._process.log.read_text(errors='replace')[-2000:]}"
        return json.loads(answer)

    def _add(
        self, kind: Kind, match: dict[str, Any], stage: Stage = "head", at: int = 0, **options: Any
    ) -> Fault:
        known = {"method", "path", "body", "times", "skip"}
        assert match.keys() <= known, f"unknown: {sorted(match.keys() - known)}"
        return Fault(
            self, self.order("add", kind=kind, stage=stage, at=at, options=options, **match)
        )
