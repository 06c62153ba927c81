"""What rank 0 asks of roots that only other hosts see: one question at a time, over the key-value store.

The first rank of each such root answers (`steward`); every one of them answers every question, so that
all go on to the next one together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from shardstore.cluster.coordination import Coordinator, Stopped
from shardstore.engine.liveness import RootClass
from shardstore.engine.overview import State, ranks_among
from shardstore.errors import CoordinationError, TierError
from shardstore.format.marks import Mark
from shardstore.format.records import SnapshotId
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.marks import marks_among

_AGAIN_S: Final = 1.0
"""How long one that did not answer before is waited for."""

Operation: TypeAlias = Literal[
    "overview", "look", "manifest", "names", "runs", "deleted", "small", "run", "read", "publish", "abort", "unlist", "sync",
    "remove", "remove deleted", "remove temp", "mark", "unmark",
]  # fmt: skip


class Question(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something to be done, or looked up, on some roots."""

    operation: Operation
    whom: tuple[int, ...] = ()
    """First ranks of the roots that are meant."""
    id: SnapshotId | None = None
    data: bytes = b""
    folder: str = ""
    name: str = ""
    mark: Mark | None = None
    rank: int = 0
    start: int = 0
    stop: int = 0


class Problem(msgspec.Struct, frozen=True):
    """Why something could not be done there."""

    message: str
    key: str = ""
    operation: str = ""
    is_absent: bool = False
    """What was to be worked on is not there."""


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of one root."""

    value: bytes = b""
    """msgpack; what it is depends on the operation."""
    problem: Problem | None = None


class View(msgspec.Struct, frozen=True):
    """What one root has of one attempt."""

    id: SnapshotId
    state: State
    """`torn` where there is no register, be there files or not."""
    names: tuple[str, ...] = ()
    """Of all files in its folder."""
    has_folder: bool = False

    @property
    def ranks(self) -> list[int]:
        """Whose files are there."""
        return ranks_among(self.names)

    @property
    def marks(self) -> frozenset[Mark]:
        """Marks that are there."""
        return marks_among(self.names)


def question_key(name: str, number: int) -> str:
    """Where a question stands."""
    return f"{name}/ask/{number}"


def answer_key(name: str, number: int, rank: int) -> str:
    """Where a first rank answers it."""
    return f"{name}/answer/{number}/{rank}"


class Peers:
    """On rank 0: the first ranks of the roots that this host does not see. Thread-safe."""

    def __init__(
        self,
        coordinator: Coordinator,
        classes: Sequence[RootClass],
        *,
        name: str,
        patience: Callable[[], float],
        ops: FileOps,
    ) -> None:
        """Nothing is asked yet.

        Args:
            coordinator: Of rank 0.
            classes: Of all roots.
            name: Used once; the stewards have the same.
            patience: How long to wait for an answer, in seconds.
            ops: For the named points of protocols.
        """
        self._coordinator = coordinator
        self._name = name
        self._patience = patience
        self._ops = ops
        self._lock = threading.Lock()
        self._number = 0
        self._silent: set[int] = set()
        self.all = tuple(classes)
        self.classes = {c.first: c for c in classes if coordinator.rank not in c.ranks}
        """By first rank."""

    def ask(
        self, question: Question, *, whom: Collection[int] | None = None
    ) -> dict[int, bytes | TierError]:
        """Ask some of them, or all; what each answered, or why it did not. Empty if there is nobody to ask."""
        targets = tuple(sorted(self.classes if whom is None else whom))
        if not targets:
            return {}
        with self._lock:
            number, self._number = self._number, self._number + 1
            self._ops.point("ask other roots")
            asked = msgspec.structs.replace(question, whom=targets)
            key = question_key(self._name, number)
            self._coordinator.post(key, msgspec.msgpack.encode(asked))
            ready = [rank for rank in self.classes if rank not in self._silent]
            answers = self._collect(number, ready, self._patience())
            for rank in sorted(self._silent):
                answers |= self._collect(number, [rank], min(_AGAIN_S, self._patience()))
            if all(isinstance(answer, Answer) for answer in answers.values()):
                self._coordinator.forget(key)
        return {rank: self._value_of(rank, answers[rank]) for rank in targets}

    def must(self, question: Question, *, whom: Collection[int] | None = None) -> dict[int, bytes]:
        """As `ask`, where all have to answer.

        Raises:
            TierError: One of them could not do it, or did not answer.
        """
        values: dict[int, bytes] = {}
        for rank, value in self.ask(question, whom=whom).items():
            if isinstance(value, TierError):
                raise value
            values[rank] = value
        return values

    def _collect(
        self, number: int, ranks: Sequence[int], timeout_s: float
    ) -> dict[int, Answer | TierError]:
        if not ranks:
            return {}
        keys = {rank: answer_key(self._name, number, rank) for rank in ranks}
        try:
            values = self._coordinator.wait(
                list(keys.values()),
                phase="asking the hosts that have roots of their own",
                ranks=ranks,
                timeout_s=timeout_s,
            )
        except CoordinationError as error:
            missing = getattr(error, "missing_ranks", ()) or ranks
            if len(ranks) == 1:
                self._silent |= {*ranks}
                return {ranks[0]: self._unanswered(ranks[0], error)}
            self._silent |= {*missing}
            found: dict[int, Answer | TierError] = {}
            for rank in ranks:  # those that have answered, and those that have not
                found |= self._collect(number, [rank], _AGAIN_S if rank in missing else timeout_s)
            return found
        assert not isinstance(values, Stopped)
        for key in keys.values():
            self._coordinator.forget(key)
        self._silent -= {*ranks}
        return {
            rank: msgspec.msgpack.decode(value, type=Answer)
            for rank, value in zip(ranks, values, strict=True)
        }

    def _unanswered(self, rank: int, error: CoordinationError) -> TierError:
        failed = TierError(
            f"root: rank {rank} on host {self.classes[rank].host}, which has a root of its own, does not "
            f"answer: {error}",
            tier="root", operation="ask",
        )  # fmt: skip
        failed.__cause__ = error
        return failed

    def _value_of(self, rank: int, answer: Answer | TierError) -> bytes | TierError:
        if isinstance(answer, TierError):
            return answer
        return value_of(answer, host=self.classes[rank].host, rank=rank)


def value_of(answer: Answer, *, host: str, rank: int) -> bytes | TierError:
    """What a first rank answered, or the error that kept it from doing what was asked for."""
    problem = answer.problem
    if problem is None:
        return answer.value
    error = TierError(
        f"on host {host} (rank {rank}), {problem.message}",
        tier="root", key=problem.key, operation=problem.operation,
    )  # fmt: skip
    if problem.is_absent:
        error.__cause__ = FileNotFoundError(problem.message)
    return error
