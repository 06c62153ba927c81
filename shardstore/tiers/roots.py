"""The tier that a root names, and the seam where tests put another one around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardstore.tiers.base import RootTier
from shardstore.tiers.disk import DiskTier
from shardstore.tiers.fileops import FileOps

WrapTier = Callable[[RootTier], RootTier]


def _as_it_is(tier: RootTier) -> RootTier:
    return tier


_wrap: WrapTier = _as_it_is


def open_root(location: str, ops: FileOps) -> RootTier:
    """The tier at an absolute path; nothing is read or written yet."""
    return _wrap(DiskTier(location, name="root", ops=ops))


@contextmanager
def use_tier(wrap: WrapTier) -> Iterator[None]:
    """Open stores inside the `with` over `wrap(their root tier)`, of every rank of this process.

    For tests: `wrap` is a wrapper of `shardstore.testing`, or any function from tier to tier. A store
    keeps its tier when the `with` is left.
    """
    global _wrap  # noqa: PLW0603 - as `use_ops`: one process, one kind of root
    before, _wrap = _wrap, wrap
    try:
        yield
    finally:
        _wrap = before
