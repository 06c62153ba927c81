"""What S3 clients and servers say when a request fails, as faults."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final

from shardstore.tiers.remote.faults import Fault, FaultKind

# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html, and what others add to it.
_CODES: Final[dict[str, FaultKind]] = {
    "NoSuchBucket": "no bucket",
    "AccessDenied": "denied",
    "AccountProblem": "denied",
    "AllAccessDisabled": "denied",
    "AuthFailure": "denied",
    "ExpiredToken": "denied",
    "InvalidAccessKeyId": "denied",
    "InvalidSecurity": "denied",
    "InvalidToken": "denied",
    "NotSignedUp": "denied",
    "RequestTimeTooSkewed": "denied",
    "SignatureDoesNotMatch": "denied",
    "TokenRefreshRequired": "denied",
    "Unauthorized": "denied",
    "UnauthorizedAccess": "denied",
    "BandwidthLimitExceeded": "throttled",
    "Busy": "throttled",
    "ConditionalRequestConflict": "throttled",
    "OperationAborted": "throttled",
    "RequestLimitExceeded": "throttled",
    "RequestThrottled": "throttled",
    "RequestThrottledException": "throttled",
    "ServiceUnavailable": "throttled",
    "SlowDown": "throttled",
    "SlowDownRead": "throttled",
    "SlowDownWrite": "throttled",
    "Throttling": "throttled",
    "ThrottlingException": "throttled",
    "TooManyRequests": "throttled",
    "RequestTimeout": "slow",
    "BadDigest": "broken",
    "IncompleteBody": "broken",
    "InternalError": "broken",
    "XAmzContentSHA256Mismatch": "broken",
    "InsufficientStorage": "full",
    "QuotaExceeded": "full",
    "ServiceQuotaExceeded": "full",
    "XMinioAdminBucketQuotaExceeded": "full",
    "XMinioStorageFull": "full",
    "InvalidObjectState": "refused",
}
_STATUSES: Final[dict[int, FaultKind]] = {
    401: "denied", 403: "denied", 408: "slow", 429: "throttled", 501: "refused", 503: "throttled", 507: "full",
}  # fmt: skip
# By name, of any class that an exception is derived from: neither client is imported for this.
_CLASSES: Final[dict[str, FaultKind]] = {
    "CredentialRetrievalError": "denied",
    "NoAuthTokenError": "denied",
    "NoCredentialsError": "denied",
    "PartialCredentialsError": "denied",
    "ProfileNotFound": "denied",
    "SSOError": "denied",
    "TokenRetrievalError": "denied",
    "ReadTimeoutError": "slow",
    "ServerTimeoutError": "slow",
    "ClientPayloadError": "broken",
    "FlexibleChecksumError": "broken",
    "IncompleteReadError": "broken",
    "ResponseParserError": "broken",
    "ConnectionClosedError": "unreachable",
    "ConnectTimeoutError": "unreachable",
    "EndpointConnectionError": "unreachable",
    "ProxyConnectionError": "unreachable",
    "ResponseStreamingError": "unreachable",
    "SSLError": "unreachable",
    "HTTPClientError": "unreachable",
    "ClientConnectionError": "unreachable",
}
_USER = re.compile(r"(?<=://)[^/\s@]+@")
_QUERY = re.compile(r"(?<=\?)\S*(?:signature|credential|token)=\S*", re.IGNORECASE)
_OPTIONS: Final = (
    "key", "secret", "token", "username", "password",
    "aws_access_key_id", "aws_secret_access_key", "aws_session_token",
)  # fmt: skip


class S3Fault(Fault):
    """A fault with what the server answered, for whoever can tell an answer from a failure."""

    def __init__(
        self, kind: FaultKind, detail: str, status: int = 0, code: str = "", size: int | None = None
    ) -> None:
        """`status` is HTTP's, 0 without an answer; `code` S3's; `size` the object's, where 416 says it."""
        super().__init__(kind, detail)
        self.status = status
        self.code = code
        self.size = size

    @property
    def is_missing_key(self) -> bool:
        """Whether the answer is that there is no such object."""
        return self.code == "NoSuchKey" or (self.status == 404 and self.kind == "refused")

    @property
    def is_not_implemented(self) -> bool:
        """Whether the server does not know the request."""
        return self.status in (405, 501) or self.code in ("NotImplemented", "MethodNotAllowed")


def secrets_of(options: Mapping[str, Any]) -> frozenset[str]:
    """What of the user's options must not be shown."""
    inner = options.get("client_kwargs")
    values = [options.get(name) for name in _OPTIONS]
    if isinstance(inner, Mapping):
        values += [inner.get(name) for name in _OPTIONS]
    return frozenset(value for value in values if isinstance(value, str) and len(value) > 3)


def s3_fault(error: Exception, secrets: frozenset[str]) -> S3Fault:
    """What an exception of the client means; `raise ... from error` is the caller's."""
    for each in _chain(error):
        response = getattr(each, "response", None)
        if isinstance(response, Mapping) and "ResponseMetadata" in response:
            return _answered(str(each), response, secrets)
    kind = _unanswered(error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return S3Fault(kind, _scrubbed(text, secrets))


def _answered(text: str, response: Mapping[str, Any], secrets: frozenset[str]) -> S3Fault:
    code = str(response.get("Error", {}).get("Code", ""))
    metadata = response["ResponseMetadata"]
    status = int(metadata.get("HTTPStatusCode") or (code if code.isdecimal() else 0))
    kind = _CODES.get(code) or _STATUSES.get(status) or ("broken" if status >= 500 else "refused")
    size = re.fullmatch(r"bytes \*/(\d+)", metadata.get("HTTPHeaders", {}).get("content-range", ""))
    return S3Fault(
        kind, _scrubbed(text, secrets), status, code, int(size.group(1)) if size else None
    )


def _unanswered(error: Exception) -> FaultKind:
    chain = list(_chain(error))
    if any(isinstance(each, ssl.SSLCertVerificationError) for each in chain):
        return "refused"
    for each in chain:
        for base in type(each).__mro__:
            if base.__name__ in _CLASSES:
                return _CLASSES[base.__name__]
        if isinstance(each, asyncio.TimeoutError | FutureTimeoutError | TimeoutError):
            return "slow"
        if isinstance(each, ConnectionError):
            return "unreachable"
    return "refused"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and what it was made from; botocore keeps that in `kwargs`."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        inner = getattr(error, "kwargs", None)
        held = inner.get("error") if isinstance(inner, Mapping) else None
        error = error.__cause__ or (held if isinstance(held, BaseException) else error.__context__)


def _scrubbed(text: str, secrets: frozenset[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, "***")
    return _QUERY.sub("***", _USER.sub("***@", text))
