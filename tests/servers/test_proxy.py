"""Each fault of the proxy does what it says, seen by plain requests to moto."""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.servers.proxy import Proxy, Stage
from tests.servers.s3 import MotoServer

BODY = bytes(range(256)) * 1024
SIGNATURE = (  # moto wants one, and does not check it
    "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
)
CUT = {"reset": (ConnectionResetError, 20.0), "hang": (TimeoutError, 0.5)}
"""What the client sees, and how long it waits for it."""


@pytest.fixture(scope="module")
def running_proxy(s3_server: MotoServer) -> Iterator[Proxy]:
    with Proxy(s3_server.port) as running:
        yield running


@pytest.fixture
def proxy(running_proxy: Proxy) -> Iterator[Proxy]:
    """In front of moto; without faults, nothing counted."""
    yield running_proxy
    running_proxy.clear()
    running_proxy.reset_connections()
    running_proxy.forget()


@pytest.fixture
def key(s3_server: MotoServer) -> str:
    """The path of an object that holds BODY."""
    bucket = s3_server.fresh_bucket()
    s3_server.client.put_object(Bucket=bucket, Key="it", Body=BODY)
    return f"/{bucket}/it"


def _ask(
    proxy: Proxy,
    method: str,
    path: str,
    body: bytes | None = None,
    timeout_s: float = 20.0,
    **headers: str,
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=timeout_s)
    try:
        connection.request(method, path, body, {**headers, "Authorization": SIGNATURE})
        answer = connection.getresponse()
        return (
            answer.status,
            {name.lower(): value for name, value in answer.getheaders()},
            answer.read(),
        )
    finally:
        connection.close()


def _stored(server: MotoServer, key: str) -> bytes | None:
    _, bucket, name = key.split("/", 2)
    try:
        found: bytes = server.client.get_object(Bucket=bucket, Key=name)["Body"].read()
    except server.client.exceptions.NoSuchKey:
        return None
    return found


def test_without_faults_everything_passes_and_is_counted(proxy: Proxy, key: str) -> None:
    assert _ask(proxy, "PUT", f"{key}-2", BODY)[0] == 200
    assert _ask(proxy, "GET", f"{key}-2")[2] == BODY
    status, headers, body = _ask(proxy, "GET", key, Range="bytes=10-19")
    assert (status, headers["content-range"], body) == (
        206,
        f"bytes 10-19/{len(BODY)}",
        BODY[10:20],
    )
    assert _ask(proxy, "HEAD", key)[1]["content-length"] == str(len(BODY))
    assert [
        (one.method, one.path, one.nbytes_up, one.nbytes_down, one.status)
        for one in proxy.requests()
    ] == [
        ("PUT", f"{key}-2", len(BODY), 0, 200),
        ("GET", f"{key}-2", 0, len(BODY), 200),
        ("GET", key, 0, 10, 206),
        ("HEAD", key, 0, 0, 200),
    ]
    assert len(proxy.requests(path="-2$")) == 2
    totals = proxy.totals()
    assert (totals.connections, totals.max_parallel) == (4, 1)
    assert totals.nbytes_up > len(BODY)
    proxy.forget()
    assert proxy.requests() == []


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_client_that_waits_for_100_continue_is_told_to(
    proxy: Proxy, key: str, is_chunked: bool
) -> None:
    framing = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: 4"
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=20) as sock:
        sock.sendall(
            b"PUT %b-3 HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nAuthorization: %b\r\n%b\r\n\r\n"
            % (key.encode(), SIGNATURE.encode(), framing)
        )
        assert sock.recv(1000).startswith(b"HTTP/1.1 100")
        sock.sendall(b"4\r\nbody\r\n0\r\n\r\n" if is_chunked else b"body")
        assert b" 200 " in sock.recv(1000)
    assert _ask(proxy, "GET", f"{key}-3")[2] == b"body"


@pytest.mark.parametrize(
    ("stage", "is_stored"), [("head", False), ("request", False), ("done", True)]
)
@pytest.mark.parametrize("fault", ["reset", "hang"])
def test_a_put_is_cut_before_within_or_after(
    proxy: Proxy, s3_server: MotoServer, key: str, fault: str, stage: Stage, is_stored: bool
) -> None:
    struck = getattr(proxy, fault)(method="PUT", stage=stage, at=1000, times=1)
    with pytest.raises(CUT[fault][0]):
        _ask(proxy, "PUT", f"{key}-new", BODY, timeout_s=CUT[fault][1])
    assert struck.wait(1) == 1
    # The server may still be at it when the client has given up.
    deadline = time.monotonic() + 30
    while is_stored and _stored(s3_server, f"{key}-new") is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _stored(s3_server, f"{key}-new") == (BODY if is_stored else None)
    assert _ask(proxy, "PUT", f"{key}-new", BODY)[0] == 200


@pytest.mark.parametrize("fault", ["reset", "hang"])
@pytest.mark.parametrize("stage", ["head", "response"])
def test_a_get_is_cut_before_or_within(proxy: Proxy, key: str, fault: str, stage: Stage) -> None:
    getattr(proxy, fault)(method="GET", stage=stage, at=1000)
    with pytest.raises(CUT[fault][0]):
        _ask(proxy, "GET", key, timeout_s=CUT[fault][1])
    assert _ask(proxy, "HEAD", key)[0] == 200


def test_what_hangs_is_reset_when_the_fault_is_removed(proxy: Proxy, key: str) -> None:
    hung, seen = proxy.hang(), []

    def ask() -> None:
        try:
            _ask(proxy, "GET", key)
        except ConnectionResetError as error:
            seen.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert hung.wait(1) == 1
    hung.remove()
    asking.join()
    assert len(seen) == 1
    assert _ask(proxy, "GET", key)[0] == 200


def test_only_matching_requests_meet_a_fault_and_only_so_often(proxy: Proxy, key: str) -> None:
    fault = proxy.answer(503, "SlowDown", method="GET", path="it$", skip=1, times=2)
    told = [_ask(proxy, "GET", key)[0] for _ in range(4)]
    assert told == [200, 503, 503, 200]
    assert _ask(proxy, "HEAD", key)[0] == 200
    assert fault.hits == 2
    assert [one.fault for one in proxy.requests("GET")] == [None, "answer", "answer", None]


@pytest.mark.parametrize(
    ("status", "code"), [(500, "InternalError"), (503, "SlowDown"), (403, "AccessDenied")]
)
def test_it_answers_in_the_servers_stead(
    proxy: Proxy, s3_server: MotoServer, key: str, status: int, code: str
) -> None:
    fault = proxy.answer(status, code, method="PUT")
    told, _, body = _ask(proxy, "PUT", f"{key}-new", BODY)
    assert told == status
    assert f"<Code>{code}</Code>".encode() in body
    assert _stored(s3_server, f"{key}-new") is None
    fault.remove()
    proxy.answer(status, code, method="PUT", stage="done")
    assert _ask(proxy, "PUT", f"{key}-new", BODY)[0] == status
    assert _stored(s3_server, f"{key}-new") == BODY


def test_it_hides_an_object_until_told_otherwise(proxy: Proxy, key: str) -> None:
    hidden = proxy.hide(path=f"^{re.escape(key)}$")
    assert [_ask(proxy, method, key)[0] for method in ("GET", "HEAD")] == [404, 404]
    hidden.remove()
    assert _ask(proxy, "GET", key)[2] == BODY


def test_a_short_body_contradicts_its_length_or_not(proxy: Proxy, key: str) -> None:
    proxy.short(100, times=1)
    with pytest.raises(http.client.IncompleteRead) as error:
        _ask(proxy, "GET", key)
    assert error.value.partial == BODY[:100]
    proxy.short(100, is_honest=True, times=1)
    assert _ask(proxy, "GET", key)[2] == BODY[:100]
    assert _ask(proxy, "GET", key)[2] == BODY


def test_wrong_ranges(proxy: Proxy, key: str) -> None:
    def ask() -> tuple[int, str | None, bytes]:
        status, headers, body = _ask(proxy, "GET", key, Range="bytes=10-19")
        return status, headers.get("content-range"), body

    proxy.shift_range(5, claims_asked=True, times=1)
    proxy.shift_range(5, claims_asked=False, times=1)
    proxy.whole(times=1)
    assert ask() == (206, f"bytes 10-19/{len(BODY)}", BODY[15:25])
    assert ask() == (206, f"bytes 15-24/{len(BODY)}", BODY[15:25])
    assert ask() == (200, None, BODY)
    assert ask() == (206, f"bytes 10-19/{len(BODY)}", BODY[10:20])


def test_a_byte_is_flipped(proxy: Proxy, key: str) -> None:
    proxy.flip(100_000, times=1)
    found = _ask(proxy, "GET", key)[2]
    assert [at for at in range(len(BODY)) if found[at] != BODY[at]] == [100_000]
    assert _ask(proxy, "GET", key)[2] == BODY


def test_listings_are_stale_until_told_otherwise(proxy: Proxy, key: str) -> None:
    listing = f"{key.rpartition('/')[0]}?list-type=2"
    stale = proxy.stale(path="list-type=2")
    before = _ask(proxy, "GET", listing)[2]
    _ask(proxy, "PUT", f"{key}-new", b"x")
    assert _ask(proxy, "GET", listing)[2] == before
    stale.remove()
    assert b"it-new" in _ask(proxy, "GET", listing)[2]


def test_an_outage_refuses_and_resets_and_ends(proxy: Proxy, key: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=20)
    connection.request("GET", key, headers={"Authorization": SIGNATURE})
    assert connection.getresponse().read() == BODY
    idle = socket.create_connection(("127.0.0.1", proxy.port), timeout=20)
    idle.sendall(b"GET ")
    for _ in range(3):
        proxy.outage(True)
        with pytest.raises(ConnectionRefusedError):
            _ask(proxy, "GET", key)
        proxy.outage(False)
        assert _ask(proxy, "GET", key)[2] == BODY
    with pytest.raises(ConnectionResetError):
        idle.recv(1)
    idle.close()
    connection.close()


def test_rates_hold_for_each_connection_and_in_total(proxy: Proxy, key: str) -> None:
    def time_s(num_parallel: int) -> float:
        asking = [
            threading.Thread(target=_ask, args=(proxy, "GET", key)) for _ in range(num_parallel)
        ]
        begin = time.monotonic()
        for one in asking:
            one.start()
        for one in asking:
            one.join()
        return time.monotonic() - begin

    rate = len(BODY) / 0.3
    proxy.limit(per_connection=rate)
    assert time_s(1) >= 0.3
    each_their_own = time_s(3)
    proxy.limit(total=rate)
    together = time_s(3)
    assert together >= 0.3 * 3 - 0.1
    assert each_their_own < together
    proxy.limit(delay_s=0.1)
    assert time_s(1) >= 0.2
    assert proxy.totals().max_parallel == 3


def test_uploads_are_paced_without_much_in_buffers(proxy: Proxy, key: str) -> None:
    proxy.limit(per_connection=len(BODY) / 0.3)
    begin = time.monotonic()
    assert _ask(proxy, "PUT", f"{key}-new", BODY)[0] == 200
    assert time.monotonic() - begin >= 0.3


def test_a_server_that_is_down_is_a_reset(proxy: Proxy) -> None:
    with Proxy(1) as nowhere, pytest.raises(ConnectionResetError):
        _ask(nowhere, "GET", "/")
