"""S3 servers that answer wrongly, late or not at all: one clear fault, or the right result, never another one."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shardstore.tiers.remote.faults import Fault, FaultKind
from shardstore.tiers.remote.link import Link
from shardstore.tiers.remote.objects import Unfinished
from shardstore.tiers.remote.s3 import S3Store
from tests.unit.tiers.remote.scripted import Answer, Hang, Request, Reset, Script, ScriptedServer
from tests.unit.tiers.remote.test_s3 import fast_session

SECRET = "the-secret-of-this-test"
PART = 5 << 20

Serve = Callable[..., tuple[S3Store, ScriptedServer]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Make a server that follows a script, and a store on it."""
    made: list[tuple[S3Store, ScriptedServer]] = []

    def start(
        script: Script, *, stall_s: float = 20.0, reads_bodies: bool = True, **options: Any
    ) -> tuple[S3Store, ScriptedServer]:
        server = ScriptedServer(script, reads_bodies=reads_bodies)
        made.append((store_at(server.url, stall_s, **options), server))
        return made[-1]

    yield start
    for store, server in made:
        store.close()
        server.stop()


def store_at(url: str, stall_s: float = 20.0, **options: Any) -> S3Store:
    given = {
        "key": "the-key-of-this-test",
        "secret": SECRET,
        "endpoint_url": url,
        "client_kwargs": {"region_name": "us-east-1"},
        "session": fast_session(),
        **options,
    }
    return S3Store("bucket", "root", storage_options=given, link=Link(stall_s))


def xml_error(status: int, code: str, message: str = "because") -> Answer:
    return Answer(
        status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    )


def begun(request: Request, rest: Script) -> Answer | Hang | Reset:
    """Answer to the begin of an upload in parts; `rest` answers to everything else."""
    if request.method == "POST" and "uploads" in request.query:
        names = "<Bucket>bucket</Bucket><Key>root/a</Key><UploadId>u1</UploadId>"
        return Answer(body=f"<InitiateMultipartUploadResult>{names}</InitiateMultipartUploadResult>".encode())  # fmt: skip
    if request.method == "PUT" and "partNumber" in request.query:
        return Answer(headers={"ETag": f'"{hashlib.md5(request.body).hexdigest()}"'})
    return rest(request)


def get(store: S3Store, start: int, nbytes: int) -> bytes:
    into = bytearray(nbytes)
    return bytes(into[: store.get("a", start, memoryview(into))])


# --------------------------------------------------------------------------- kinds


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (403, "AccessDenied", "denied"),
        (403, "InvalidAccessKeyId", "denied"),
        (403, "SignatureDoesNotMatch", "denied"),
        (400, "ExpiredToken", "denied"),
        (403, "SomethingNew", "denied"),
        (404, "NoSuchBucket", "no bucket"),
        (503, "SlowDown", "throttled"),
        (429, "TooManyRequests", "throttled"),
        (409, "OperationAborted", "throttled"),
        (503, "SomethingNew", "throttled"),
        (400, "RequestTimeout", "slow"),
        (500, "InternalError", "broken"),
        (502, "BadGateway", "broken"),
        (400, "BadDigest", "broken"),
        (507, "XMinioStorageFull", "full"),
        (403, "QuotaExceeded", "full"),
        (400, "InvalidRequest", "refused"),
        (403, "InvalidObjectState", "refused"),
        (501, "NotImplemented", "refused"),
    ],
)
def test_an_error_of_the_server_has_a_kind_and_is_asked_for_once(
    serve: Serve, status: int, code: str, kind: FaultKind
) -> None:
    store, server = serve(lambda _request: xml_error(status, code))
    requests: list[Callable[[], object]] = [
        store.check,
        lambda: store.listing("", is_flat=True),
        lambda: get(store, 0, 10),
        lambda: store.put("a", b"data"),
        lambda: store.begin("a", 2 * PART, PART),
    ]
    for request in requests:
        before = len(server.requests)
        with pytest.raises(Fault) as caught:
            request()
        assert caught.value.kind == kind
        assert caught.value.__cause__ is not None
        assert len(server.requests) == before + 1


def test_what_is_no_xml_is_a_broken_answer(serve: Serve) -> None:
    store, _ = serve(lambda _request: Answer(200, b"<html>a proxy's <b>page"))
    with pytest.raises(Fault) as caught:
        store.listing("", is_flat=True)
    assert caught.value.kind == "broken"


def test_a_page_of_a_proxy_without_a_code_goes_by_its_status(serve: Serve) -> None:
    for status, kind in [(403, "denied"), (502, "broken"), (503, "throttled")]:
        store, _ = serve(lambda _request, s=status: Answer(s, b"<html><body>no</body></html>"))
        with pytest.raises(Fault) as caught:
            store.put("a", b"data")
        assert caught.value.kind == kind


def test_secrets_are_not_in_the_text(serve: Serve) -> None:
    echo = f"Credential=the-key-of-this-test {SECRET} http://user:pass-word@host/a?X-Amz-Signature=0123abcd&amp;b"
    store, _ = serve(lambda _request: xml_error(403, "SignatureDoesNotMatch", echo))
    with pytest.raises(Fault) as caught:
        store.put("a", b"data")
    text = f"{caught.value} {caught.value!r}"
    assert "SignatureDoesNotMatch" in text
    for secret in (SECRET, "the-key-of-this-test", "pass-word", "0123abcd"):
        assert secret not in text


def test_nobody_there_is_unreachable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        store = store_at(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(Fault) as caught:
            store.check()
        store.close()
    assert caught.value.kind == "unreachable"


def test_without_credentials_it_is_denied_and_says_so(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    store, server = serve(lambda _request: Answer(), key=None, secret=None)
    with pytest.raises(Fault, match="credentials") as caught:
        store.check()
    assert caught.value.kind == "denied"
    assert server.requests == []


def test_options_that_the_client_does_not_know_are_refused(serve: Serve) -> None:
    store, _ = serve(lambda _request: Answer(), no_such_option=1, session=None)
    with pytest.raises(Fault, match="no_such_option") as caught:
        store.check()
    assert caught.value.kind == "refused"
    with pytest.raises(ValueError, match="config_kwargs"):
        store_at("http://127.0.0.1:1", config_kwargs="text")
    with pytest.raises(ValueError, match="not both"):
        store_at("http://127.0.0.1:1", username="also")


# ------------------------------------------------------------------- no answer


@pytest.mark.parametrize("what", [Hang(), Reset()])
def test_requests_end_where_the_server_hangs_or_resets(serve: Serve, what: Hang | Reset) -> None:
    store, _ = serve(lambda request: begun(request, lambda _: what), stall_s=1.0)
    data = memoryview(bytes(PART))
    upload = store.begin("a", PART + 1, PART)
    upload.put(0, data)
    upload.put(1, data[:1])
    requests: list[Callable[[], object]] = [
        store.check,
        lambda: get(store, 0, 10),
        lambda: store.put("a", b"data"),
        lambda: store.put("a", bytes(PART)),
        lambda: store.create("a", b"data"),
        lambda: store.entry("a"),
        lambda: store.delete(["a"]),
        store.unfinished,
        upload.complete,
        upload.abort,
    ]

    def kind_of(request: Callable[[], object]) -> str:
        with pytest.raises(Fault) as caught:
            request()
        return caught.value.kind

    begin = time.monotonic()
    with ThreadPoolExecutor(len(requests)) as pool:
        kinds = set(pool.map(kind_of, requests))
    assert kinds == {"slow" if isinstance(what, Hang) else "unreachable"}
    assert time.monotonic() - begin < 20


def test_memory_is_the_callers_again_after_a_request_that_hung(serve: Serve) -> None:
    """A request that was given up neither sends nor fills what belongs to others by now."""
    store, _ = serve(
        lambda request: Hang() if request.method != "POST" else begun(request, lambda _: Hang()),
        stall_s=0.6,
    )
    memory = bytearray(PART)
    upload = store.begin("a", PART, PART - 1)
    requests = (lambda view: store.get("a", 0, view), lambda view: upload.put(0, view))
    for request in requests:
        with memoryview(memory)[: PART - 1] as view, pytest.raises(Fault) as caught:
            request(view)
        assert caught.value.kind == "slow"
        memory.extend(b"x")  # a BufferError while anybody holds it


def test_the_body_is_sent_without_waiting_to_be_asked_for(serve: Serve) -> None:
    store, server = serve(lambda request: begun(request, lambda _: Answer()))
    data = memoryview(bytes(PART + 1))
    upload = store.begin("a", PART + 1, PART)
    upload.put(0, data[:PART])
    store.put("b", b"data")
    (part,) = server.seen("PUT", query="partNumber")
    assert part.body == data[:PART]
    assert all("expect" not in request.headers for request in server.requests)


@pytest.mark.parametrize(("status", "code", "kind"), [(403, "AccessDenied", "denied"), (503, "SlowDown", "throttled")])  # fmt: skip
def test_an_answer_before_the_body_was_read_ends_the_request(
    serve: Serve, status: int, code: str, kind: FaultKind
) -> None:
    store, _ = serve(lambda _request: xml_error(status, code), reads_bodies=False)
    begin = time.monotonic()
    with pytest.raises(Fault) as caught:
        store.put("a", bytes(32 << 20))
    # The reset that follows the answer may overtake it.
    assert caught.value.kind in (kind, "unreachable")
    assert time.monotonic() - begin < 8


# --------------------------------------------------------------------- ranges

BODY = bytes(range(100))


def ranged(
    first: int, last: int, total: str, body: bytes, status: int = 206, **more: Any
) -> Answer:
    return Answer(status, body, {"Content-Range": f"bytes {first}-{last}/{total}"}, **more)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200, BODY),
        Answer(200, BODY[10:30]),
        Answer(206, BODY[10:30]),
        ranged(0, 19, "100", BODY[0:20]),
        ranged(11, 30, "100", BODY[11:31]),
        ranged(11, 30, "100", BODY[11:31], status=200),
        ranged(10, 29, "100", BODY[10:31]),
        ranged(10, 30, "100", BODY[10:31]),
        ranged(10, 28, "100", BODY[10:29]),
        ranged(10, 28, "*", BODY[10:29]),
        ranged(10, 29, "100", BODY[10:29]),
        ranged(10, 29, "100", BODY[10:29], length=20),
        ranged(10, 29, "100", b""),
        ranged(5, 29, "100", BODY[5:25]),
        ranged(9, 8, "100", b""),
        Answer(206, BODY[10:30], {"Content-Range": "nonsense"}),
        Answer(416, b"<Error><Code>InvalidRange</Code></Error>", {"Content-Range": "bytes */100"}),
    ],
)
def test_another_range_than_was_asked_for_is_a_fault(serve: Serve, answer: Answer) -> None:
    store, _ = serve(lambda _request: answer)
    with pytest.raises(Fault) as caught:
        get(store, 10, 20)
    assert caught.value.kind in ("broken", "refused")


@pytest.mark.parametrize(
    ("answer", "start", "nbytes"),
    [
        (ranged(10, 29, "100", BODY[10:30]), 10, 20),
        (ranged(10, 29, "*", BODY[10:30]), 10, 20),
        (ranged(10, 29, "100", BODY[10:30], status=200), 10, 20),
        (ranged(90, 99, "100", BODY[90:]), 90, 20),
        (Answer(200, BODY), 0, 20),
        (Answer(200, BODY), 0, 100),
        (Answer(200, BODY), 0, 1000),
        (xml_error(416, "InvalidRange"), 100, 5),
        (Answer(416, b"", {"Content-Range": "bytes */100"}), 100, 5),
        (Answer(416, b"", {"Content-Range": "bytes */100"}), 107, 5),
    ],
)
def test_the_right_range_is_taken_in_whatever_form_it_comes(
    serve: Serve, answer: Answer, start: int, nbytes: int
) -> None:
    store, server = serve(lambda _request: answer)
    for _ in range(2):
        assert get(store, start, nbytes) == BODY[start : start + nbytes]
    assert server.requests[0].headers["range"] == f"bytes={start}-{start + nbytes - 1}"


# ------------------------------------------------------------------- creating


def test_a_conflict_while_creating_is_asked_for_again_later(serve: Serve) -> None:
    store, server = serve(lambda _request: xml_error(409, "ConditionalRequestConflict"))
    with pytest.raises(Fault) as caught:
        store.create("a", b"data")
    assert caught.value.kind == "throttled"
    assert server.requests[0].headers["if-none-match"] == "*"


def test_a_server_that_cannot_create_exclusively_gets_a_plain_put(serve: Serve) -> None:
    def script(request: Request) -> Answer:
        return xml_error(501, "NotImplemented") if "if-none-match" in request.headers else Answer()

    store, server = serve(script)
    assert store.create("a", b"data")
    assert store.create("b", b"data")
    tried = [(r.path, "if-none-match" in r.headers) for r in server.seen("PUT")]
    assert tried == [("/bucket/root/a", True), ("/bucket/root/a", False), ("/bucket/root/b", False)]
    assert {r.body for r in server.seen("PUT")} == {b"data"}


@pytest.mark.parametrize("answer", [xml_error(412, "PreconditionFailed"), Answer(412)])
def test_what_exists_is_not_created(serve: Serve, answer: Answer) -> None:
    store, _ = serve(lambda _request: answer)
    assert store.create("a", b"data") is False


# -------------------------------------------------------------------- listing


def page(keys: list[str], token: str = "", folders: tuple[str, ...] = ()) -> Answer:
    contents = "".join(
        f"<Contents><Key>{key}</Key><Size>3</Size><ETag>&quot;e&quot;</ETag></Contents>"
        for key in keys
    )
    prefixes = "".join(f"<CommonPrefixes><Prefix>{f}</Prefix></CommonPrefixes>" for f in folders)
    more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>"
    tail = more if token else "<IsTruncated>false</IsTruncated>"
    return Answer(body=f"<ListBucketResult>{contents}{prefixes}{tail}</ListBucketResult>".encode())


def test_a_listing_takes_all_pages(serve: Serve) -> None:
    pages = {
        "": page(["root/", "root/a"], "t1", ("root/x/",)),
        "t1": page([], "t2"),
        "t2": page(["root/b"], "", ("root/y/",)),
    }
    store, server = serve(lambda request: pages[request.query.get("continuation-token", "")])
    found = store.listing("", is_flat=False)
    assert (list(found.objects), set(found.folders)) == (["a", "b"], {"x", "y"})
    assert found.objects["a"].tag == "e"
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    "answer",
    [page(["root/a"], "again"), page(["elsewhere/a"]), Answer(body=b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>")],
)  # fmt: skip
def test_a_listing_that_cannot_be_right_ends_in_a_fault(serve: Serve, answer: Answer) -> None:
    store, server = serve(lambda _request: answer)
    with pytest.raises(Fault) as caught:
        store.listing("", is_flat=True)
    assert caught.value.kind == "broken"
    assert len(server.requests) <= 3


def test_unfinished_uploads_take_all_pages(serve: Serve) -> None:
    def uploads(*names: str, more: str = "") -> Answer:
        each = "".join(f"<Upload><Key>root/{n}</Key><UploadId>u{n}</UploadId></Upload>" for n in names)  # fmt: skip
        return Answer(body=f"<ListMultipartUploadsResult>{each}{more}</ListMultipartUploadsResult>".encode())  # fmt: skip

    more = "<IsTruncated>true</IsTruncated><NextKeyMarker>root/b</NextKeyMarker><NextUploadIdMarker>ub</NextUploadIdMarker>"

    def script(request: Request) -> Answer:
        return uploads("c") if request.query.get("upload-id-marker") else uploads("a", "b", more=more)  # fmt: skip

    store, _ = serve(script)
    assert store.unfinished() == [Unfinished(name, f"u{name}") for name in "abc"]


def test_a_server_that_cannot_list_uploads_has_none(serve: Serve) -> None:
    store, _ = serve(lambda _request: xml_error(501, "NotImplemented"))
    assert store.unfinished() == []


# ------------------------------------------------------------------- deleting


@pytest.mark.parametrize(
    "batch",
    [xml_error(501, "NotImplemented"), xml_error(400, "InvalidRequest", "Missing required header for this request: Content-MD5")],
)  # fmt: skip
def test_where_deleting_many_is_not_to_be_had_each_is_deleted(serve: Serve, batch: Answer) -> None:
    def script(request: Request) -> Answer:
        return batch if request.method == "POST" else Answer(204)

    store, server = serve(script)
    keys = [f"a {i}#" for i in range(30)]
    store.delete(keys)
    store.delete(["b"])
    deleted = sorted(r.path for r in server.seen("DELETE"))
    assert deleted == sorted([*(f"/bucket/root/{key}" for key in keys), "/bucket/root/b"])
    assert len(server.seen("POST")) == 1


def test_an_error_inside_the_answer_to_a_delete_raises(serve: Serve) -> None:
    error = (
        b"<DeleteResult><Error><Key>root/b</Key><Code>AccessDenied</Code></Error></DeleteResult>"
    )

    def script(request: Request) -> Answer:
        if request.method == "POST":
            return Answer(body=error)
        return xml_error(403, "AccessDenied") if request.path.endswith("/b") else Answer(204)

    store, _ = serve(script)
    with pytest.raises(Fault) as caught:
        store.delete(["a", "b"])
    assert caught.value.kind == "denied"


# ----------------------------------------------------------------- completing


def tag_of(*parts: bytes) -> str:
    joined = b"".join(hashlib.md5(part).digest() for part in parts)
    return f"{hashlib.md5(joined).hexdigest()}-{len(parts)}"


FIRST, SECOND = bytes(PART), b"second"


@pytest.mark.parametrize(
    ("found", "is_ours"),
    [
        ({"ETag": f'"{tag_of(FIRST, SECOND)}"'}, True),
        ({"ETag": '"0123456789abcdef0123456789abcdef"'}, True),  # another scheme: not comparable
        ({"ETag": f'"{"0" * 32}-2"', "x-amz-server-side-encryption": "aws:kms"}, True),
        ({"ETag": f'"{tag_of(FIRST, SECOND, b"")}"'}, False),
        ({"ETag": f'"{tag_of(SECOND, FIRST)}"'}, False),
        ({"ETag": f'"{tag_of(FIRST, SECOND)}"', "Content-Length": "7"}, False),
        (None, False),
    ],
)
def test_an_upload_that_is_gone_was_completed_if_the_object_is_what_it_makes(
    serve: Serve, found: dict[str, str] | None, is_ours: bool
) -> None:
    def rest(request: Request) -> Answer:
        if request.method == "HEAD":
            length = {"Content-Length": str(PART + len(SECOND))}
            return Answer(404) if found is None else Answer(headers=length | found)
        return xml_error(404, "NoSuchUpload")

    store, server = serve(lambda request: begun(request, rest))
    upload = store.begin("a", PART + len(SECOND), PART)
    upload.put(1, memoryview(SECOND))
    upload.put(0, memoryview(FIRST))
    if is_ours:
        upload.complete()
        before = len(server.requests)
        upload.complete()
        upload.abort()
        assert len(server.requests) == before
    else:
        with pytest.raises(Fault) as caught:
            upload.complete()
        assert caught.value.is_retryable
        upload.abort()


def test_an_error_inside_a_good_answer_to_a_complete_is_an_error(serve: Serve) -> None:
    inner = b"<Error><Code>InternalError</Code><Message>again</Message></Error>"
    store, _ = serve(lambda request: begun(request, lambda _: Answer(200, inner)))
    upload = store.begin("a", PART + len(SECOND), PART)
    upload.put(0, memoryview(FIRST))
    upload.put(1, memoryview(SECOND))
    with pytest.raises(Fault) as caught:
        upload.complete()
    assert caught.value.kind == "broken"


def test_checking_for_writes_drops_what_it_began(serve: Serve) -> None:
    store, server = serve(lambda request: begun(request, lambda _: Answer(204)))
    store.check_writable()
    (dropped,) = server.seen("DELETE")
    assert dropped.query["uploadId"] == "u1"
    assert server.seen("PUT") == []


def test_parts_are_at_most_ten_thousand() -> None:
    store = store_at("http://127.0.0.1:1")
    for nbytes in (1, 8 << 20, 10_000 * (8 << 20), 10_000 * (8 << 20) + 1, 5 << 40):
        part = store.part_bytes(nbytes)
        assert part >= 8 << 20
        assert -(-nbytes // part) <= 10_000
    assert store.part_bytes(10_000 * (8 << 20)) == 8 << 20
