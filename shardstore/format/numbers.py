"""Whole numbers as callers have them: Python's, NumPy's, or a tensor with one."""

from __future__ import annotations


def whole_number(value: object) -> int | None:
    """The integer that `value` is; None for anything else, floats and bools of any library included."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    if not hasattr(value, "__index__"):
        return None
    try:
        return int(value.__index__())
    except TypeError:  # a tensor of floats has the method as well
        return None
