"""Several ranks of a store as threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shardstore.cluster.threads import ThreadGroup, ThreadRank

T = TypeVar("T")


def run_rank_threads(num_ranks: int, function: Callable[[ThreadRank], T]) -> list[T]:
    """Call `function` on `num_ranks` threads at the same time, each a rank of one group.

    Each gives the rank that it gets to its stores as `process_group`. What ranks say to each other goes
    through a dict in place of sockets; all else is as between processes, but for what a process has
    only one of: torch's random state, default process group, and death. States hold plain tensors.

        def life(rank):
            with SnapshotStore(root, process_group=rank) as store:
                store.save({"weight": weights[rank.rank]}, step=1)

        run_rank_threads(4, life)

    Returns:
        Results by rank.

    Raises:
        Exception: What the lowest rank that failed raised, after all have ended.
    """
    group = ThreadGroup(num_ranks)
    with ThreadPoolExecutor(num_ranks, thread_name_prefix="rank") as pool:
        futures = [pool.submit(function, group.rank(rank)) for rank in range(num_ranks)]
    return [future.result() for future in futures]
