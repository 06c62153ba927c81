"""The exception tree: one class per decision that a caller can take.

```
ShardStoreError
├── SnapshotNotFoundError (LookupError)    nothing was ever committed, or not that step
├── CorruptSnapshotError                   stored bytes are not what was written: an older snapshot may do
├── FormatError (ValueError)               unreadable header or manifest; lists every problem
│   └── FormatVersionError                 written by a newer shardstore: upgrade
├── StateMismatchError (ValueError)        the snapshot does not fit the live state
│   └── TopologyMismatchError              it was saved on other ranks or another mesh
├── UnsupportedStateError (TypeError)      this object cannot be stored
├── TierError (OSError)                    storage failed
│   └── TierFullError                      no room; says how much was needed
├── CoordinationError                      another rank failed
│   └── CoordinationTimeoutError (TimeoutError)   another rank is missing
└── SaveFailedError                        a background write failed on some rank
```

Facts are attributes, messages say what, where and what to do. Every class pickles, because errors
cross process borders (test harnesses, launchers).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

E = TypeVar("E", bound=BaseException)

_MAX_SHOWN: Final = 60


def without_frames(error: E) -> E:
    """Let go of the frames that an error and its causes passed: for those that are kept.

    They hold all local variables of their callers, and so the state that was to be saved or restored.
    """
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def shown(value: object) -> str:
    """A caller's value for a message, however long or broken it is."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - of whatever class: it is only named here
        text = f"a {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


class ShardStoreError(Exception):
    """Base of every error that shardstore raises on purpose."""

    def __init__(self, message: str, **facts: Any) -> None:
        """Keep the message for people and the facts, as attributes, for handlers."""
        super().__init__(message)
        self.message = message
        self._facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self._facts)


def _rebuild(cls: type[ShardStoreError], message: str, facts: dict[str, Any]) -> ShardStoreError:
    error = cls.__new__(cls)
    ShardStoreError.__init__(error, message, **facts)
    return error


class SnapshotNotFoundError(ShardStoreError, LookupError):
    """Nothing was ever committed here, or not that step: start fresh or pick a listed step."""

    step: int | None

    def __init__(self, message: str, *, step: int | None = None) -> None:
        """`step` is the step that was asked for, None for "the newest"."""
        super().__init__(message, step=step)


class CorruptSnapshotError(ShardStoreError):
    """Stored bytes differ from what was written. No live tensor was touched."""

    tier: str | None
    file: str | None
    tensor: str | None
    expected: str | None
    actual: str | None

    def __init__(
        self,
        message: str,
        *,
        tier: str | None = None,
        file: str | None = None,
        tensor: str | None = None,
        expected: str | None = None,
        actual: str | None = None,
    ) -> None:
        """Say where the damage is; `expected` and `actual` are digests or sizes as text."""
        super().__init__(
            message, tier=tier, file=file, tensor=tensor, expected=expected, actual=actual
        )


class FormatError(ShardStoreError, ValueError):
    """A header or manifest breaks the format. `problems` lists everything found wrong."""

    problems: tuple[str, ...]

    def __init__(self, message: str, *, problems: Sequence[str] = ()) -> None:
        """The message names the file; `problems` are appended to it, one per line."""
        listed = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(message + listed, problems=tuple(problems))


class FormatVersionError(FormatError):
    """Written by a newer shardstore: upgrade to read it."""


class StateMismatchError(ShardStoreError, ValueError):
    """The snapshot does not fit the live state. No live tensor was touched."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]

    def __init__(
        self,
        message: str,
        *,
        missing: Iterable[str] = (),
        unexpected: Iterable[str] = (),
        mismatched: Iterable[str] = (),
        **facts: Any,
    ) -> None:
        """`missing`: live, not stored. `unexpected`: stored, not live. `mismatched`: readable diffs."""
        super().__init__(
            message,
            missing=tuple(missing),
            unexpected=tuple(unexpected),
            mismatched=tuple(mismatched),
            **facts,
        )


class TopologyMismatchError(StateMismatchError):
    """Saved on another world size, mesh or rank. `saved` and `current` are one-line descriptions."""

    saved: str
    current: str

    def __init__(
        self, message: str, *, saved: str = "", current: str = "", **differences: Any
    ) -> None:
        """`differences` are those of StateMismatchError."""
        super().__init__(message, saved=saved, current=current, **differences)


class UnsupportedStateError(ShardStoreError, TypeError):
    """This object cannot be stored. Nothing was."""

    path: str
    type: str

    def __init__(self, message: str, *, path: str = "", type: str = "") -> None:  # noqa: A002
        """`path` is where in the state it sits, `type` its qualified class name."""
        super().__init__(message, path=path, type=type)


class TierError(ShardStoreError, OSError):
    """A storage operation failed; the operating system's error is its cause."""

    tier: str
    key: str
    operation: str

    def __init__(
        self, message: str, *, tier: str = "", key: str = "", operation: str = "", **facts: Any
    ) -> None:
        """`key` is the path or object name, `operation` the verb that failed."""
        super().__init__(message, tier=tier, key=key, operation=operation, **facts)


class TierFullError(TierError):
    """A tier has no room."""

    needed_bytes: int
    free_bytes: int

    def __init__(
        self, message: str, *, needed_bytes: int = 0, free_bytes: int = 0, **where: Any
    ) -> None:
        """`free_bytes` is what the tier would have given."""
        super().__init__(message, needed_bytes=needed_bytes, free_bytes=free_bytes, **where)


class CoordinationError(ShardStoreError):
    """Another rank failed, or ranks disagree. Raised on every rank."""

    failed_ranks: tuple[int, ...]
    phase: str

    def __init__(
        self, message: str, *, failed_ranks: Iterable[int] = (), phase: str = "", **facts: Any
    ) -> None:
        """`phase` is what the ranks were doing together, in words."""
        super().__init__(message, failed_ranks=tuple(failed_ranks), phase=phase, **facts)


class CoordinationTimeoutError(CoordinationError, TimeoutError):
    """Some rank made no progress before the deadline."""

    missing_ranks: tuple[int, ...]

    def __init__(
        self,
        message: str,
        *,
        missing_ranks: Iterable[int] = (),
        failed_ranks: Iterable[int] = (),
        phase: str = "",
    ) -> None:
        """`missing_ranks` had not answered; empty when the store host itself is unreachable."""
        super().__init__(
            message, missing_ranks=tuple(missing_ranks), failed_ranks=failed_ranks, phase=phase
        )


class SaveFailedError(ShardStoreError):
    """A save did not become a snapshot. Older snapshots are untouched and training state is intact."""

    step: int | None
    failed_ranks: tuple[int, ...]

    def __init__(
        self, message: str, *, step: int | None = None, failed_ranks: Iterable[int] = ()
    ) -> None:
        """`failed_ranks` are those that reported the first cause."""
        super().__init__(message, step=step, failed_ranks=tuple(failed_ranks))
