"""What can go wrong with one request, in words that the tier can act on."""

from __future__ import annotations

import errno
from typing import Final, Literal, TypeAlias

FaultKind: TypeAlias = Literal[
    "denied", "no bucket", "throttled", "unreachable", "slow", "broken", "full", "refused"
]
"""denied: credentials or permissions. no bucket: it is not there. throttled: the store asks to come back
later (429, 503 SlowDown). unreachable: no connection, or it was reset. slow: no answer, or no progress, by the
deadline. broken: an answer that cannot be right (a short body, another range, 5xx). full: quota or space.
refused: the request itself is wrong, and will be the next time."""

_RETRYABLE: Final = frozenset({"throttled", "unreachable", "slow", "broken"})
_ERRNO: Final[dict[str, int]] = {
    "denied": errno.EACCES,
    "no bucket": errno.ENOENT,
    "throttled": errno.EAGAIN,
    "unreachable": errno.ENETUNREACH,
    "slow": errno.ETIMEDOUT,
    "broken": errno.EIO,
    "full": errno.ENOSPC,
    "refused": errno.EINVAL,
}


class Fault(OSError):  # noqa: N818 - the tier's errors are made from it
    """One request failed. Not for a missing object, nor for one that exists: those are answers.

    Whether a request that changes something took effect is open, unless the kind is `denied`, `no
    bucket` or `refused`.
    """

    is_final: bool = False
    """The request cannot be made again, whatever the cause: what it built upon is lost."""

    def __init__(self, kind: FaultKind, detail: str) -> None:
        """`detail` is what the client said, without credentials."""
        super().__init__(_ERRNO[kind], f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail

    @property
    def may_pass(self) -> bool:
        """Whether the cause may be gone later, by itself."""
        return self.kind in _RETRYABLE

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return self.may_pass and not self.is_final
