"""Which requests a fault is for, how many of them, and how often it struck."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

Kind: TypeAlias = Literal["reset", "hang", "answer", "short", "range", "flip", "stale"]
Stage: TypeAlias = Literal["head", "request", "done", "response"]
"""head: the request's head was read, nothing was passed on. request: in the middle of its body. done: it was
passed on and carried out, the client has no answer. response: in the middle of the answer's body."""


@dataclass(slots=True)
class Rule:
    """One fault, until `is_over`."""

    kind: Kind
    method: str = ".*"
    """Regular expression for the whole method."""
    path: str = ""
    """Regular expression searched for in the path with its query, as on the wire."""
    body: str = ""
    """Regular expression searched for in the beginning of the body: where the name of what is put goes there."""
    times: int | None = None
    """So many requests; None: all until removed."""
    skip: int = 0
    """So many matching requests pass first."""
    stage: Stage = "head"
    at: int = 0
    """Bytes of the body before it strikes."""
    options: dict[str, Any] = field(default_factory=dict)
    hits: int = 0
    is_over: bool = False

    def strikes(self, method: str, target: str, body: str) -> bool:
        """Whether it is for this request; counts it then."""
        if self.is_over or (self.times is not None and self.hits >= self.times):
            return False
        if not re.fullmatch(self.method, method) or not re.search(self.path, target):
            return False
        if self.body and not re.search(self.body, body):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.hits += 1
        return True


class Rules:
    """All faults of one proxy; the first that matches a request is the one it meets. Any thread."""

    def __init__(self) -> None:
        self._changed: Final = threading.Condition()
        self._rules: Final[dict[int, Rule]] = {}

    def add(self, rule: Rule) -> int:
        """Put it behind the others; returns its number."""
        with self._changed:
            number = len(self._rules)
            self._rules[number] = rule
            return number

    def remove(self, number: int | None = None) -> None:
        """End one, or all."""
        with self._changed:
            for each in self._rules if number is None else [number]:
                self._rules[each].is_over = True

    def wants_body(self) -> bool:
        """Whether some fault asks for the beginning of the body."""
        with self._changed:
            return any(rule.body and not rule.is_over for rule in self._rules.values())

    def match(self, method: str, target: str, body: bytes = b"") -> Rule | None:
        """The fault that this request meets."""
        text = body.decode("latin-1")
        with self._changed:
            for rule in self._rules.values():
                if rule.strikes(method, target, text):
                    self._changed.notify_all()
                    return rule
        return None

    def hits(self, number: int, at_least: int, timeout_s: float) -> int:
        """How often one struck, after waiting for `at_least` or `timeout_s`."""
        with self._changed:
            rule = self._rules[number]
            self._changed.wait_for(lambda: rule.hits >= at_least, timeout_s)
            return rule.hits
