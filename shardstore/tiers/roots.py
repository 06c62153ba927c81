"""The tier that a root names, and the seam where tests put another one around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from shardstore.tiers.addresses import is_url
from shardstore.tiers.base import RootTier
from shardstore.tiers.disk import DiskTier
from shardstore.tiers.fileops import FileOps

WrapTier = Callable[[RootTier], RootTier]


def _as_it_is(tier: RootTier) -> RootTier:
    return tier


_wrap: WrapTier = _as_it_is


def open_root(
    location: str,
    ops: FileOps,
    *,
    storage_options: Mapping[str, object] | None = None,
    timeout_s: float = 600.0,
) -> RootTier:
    """The tier at an absolute path or a URL; nothing is read or written yet.

    Args:
        location: See `resolve_address`.
        ops: System calls.
        storage_options: For the client of remote storage.
        timeout_s: How long its faults may last.

    Raises:
        ValueError: Nothing is known of the URL's protocol, or options do not fit.
        TierError: The client is not installed.
    """
    if is_url(location):
        from shardstore.tiers.remote.opening import open_remote

        return _wrap(
            open_remote(location, ops=ops, storage_options=storage_options, timeout_s=timeout_s)
        )
    if storage_options:
        raise ValueError(f"storage_options= are for URLs; {location} is a path")
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
