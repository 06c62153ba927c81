"""Arguments that are checked before anything is done: what is wrong with them, and what would be right."""

from __future__ import annotations

import math
import os
from typing import Final

from shardstore.errors import shown

MAX_TIMEOUT_S: Final = 365 * 86_400.0
"""A year: beyond it clocks and waits of the operating system overflow."""


def check_timeout(value: object, *, what: str, zero: bool = False) -> float:
    """Validate seconds to wait.

    Args:
        value: A number.
        what: Name of the argument.
        zero: Whether 0, which does not wait, is meant.

    Raises:
        ValueError: No number, negative, zero unless `zero`, nan, or more than `MAX_TIMEOUT_S`.
    """
    number = None
    if hasattr(value, "__float__") and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        except (TypeError, ValueError, RuntimeError):  # a tensor or array of several
            pass
    if number is None:
        raise ValueError(f"{what} must be a number of seconds, got {shown(value)}")
    if not (0 < number <= MAX_TIMEOUT_S or (zero and number == 0)):
        least = "at least" if zero else "above"
        raise ValueError(
            f"{what} must be {least} 0 and at most {MAX_TIMEOUT_S:,.0f} seconds (a year), got {shown(value)}"
        )
    return number


def check_patience(value: object) -> float | None:
    """Validate `timeout_s` of a wait that may have none.

    Raises:
        ValueError: Neither None nor a time.
    """
    return None if value is None else check_timeout(value, what="timeout_s", zero=True)


def check_path(value: object, *, what: str) -> str:
    """Validate a local path, as it was given.

    Raises:
        ValueError: No path, empty, bytes, or with a NUL.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(f"{what} must be a non-empty path, got {shown(value)}")
    return text


def resolve_memory_dir(value: object) -> str:
    """Absolute path of the tmpfs.

    Raises:
        ValueError: No path, or a URL.
    """
    text = check_path(value, what="memory_dir")
    if "://" in text:
        raise ValueError(f"memory_dir must be the path of a tmpfs on this host, got {shown(value)}")
    # By whatever name: two stores of one process in one folder must see that it is one.
    return os.path.realpath(text)


def check_flag(value: object, *, what: str) -> bool:
    """Validate a bool.

    Raises:
        ValueError: Anything else, however true.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be True or False, got {shown(value)}")
    return value
