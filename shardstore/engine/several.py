"""Several things at a time, where each of them is a request to storage."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from shardstore.tiers.base import RootTier

T = TypeVar("T")
R = TypeVar("R")

_NUM_THREADS: Final = 8
_FEW: Final = 2
"""One after the other as well: the usual number, for which threads are not worth it."""


def at_once(tier: RootTier, work: Callable[[T], R], items: Collection[T]) -> list[R]:
    """Call `work` for each item; on threads if there are many and `tier` is remote.

    Returns:
        The results, in the order of the items.

    Raises:
        Exception: What the first one raised; the others are over by then.
    """
    if not tier.keeps_index or len(items) <= _FEW:
        return [work(item) for item in items]
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="shardstore-several") as pool:
        futures = [pool.submit(work, item) for item in items]
    return [future.result() for future in futures]
