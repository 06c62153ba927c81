"""The result of one check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Status: TypeAlias = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what was found, and what to do about it."""

    name: str
    status: Status
    found: str
    remedy: str = ""
    """Empty if there is nothing to do."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Figures, for scripts."""
