"""Ranks that are threads of one process, over a dict: for tests and notebooks, without torch.distributed."""

from __future__ import annotations

import platform
import secrets
import threading

from shardstore.cluster.coordination import Coordinator
from shardstore.cluster.kv import LocalKeyValueStore


class ThreadGroup:
    """A group of `world_size` ranks, which all live in this process."""

    def __init__(self, world_size: int) -> None:
        """Nobody has joined yet."""
        self.world_size = world_size
        self._lock = threading.Lock()
        self._meetings: list[tuple[LocalKeyValueStore, str]] = []

    def rank(self, rank: int) -> ThreadRank:
        """What rank `rank` gives as `process_group`."""
        assert 0 <= rank < self.world_size
        return ThreadRank(self, rank)

    def meeting(self, number: int) -> tuple[LocalKeyValueStore, str]:
        """What the ranks share from their `number`-th opening on: keys, and the run's nonce."""
        with self._lock:
            while len(self._meetings) <= number:
                self._meetings.append((LocalKeyValueStore(), secrets.token_hex(4)))
            return self._meetings[number]


class ThreadRank:
    """One rank of a ThreadGroup. Belongs to one thread, which may open one store after the other."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        """See `ThreadGroup.rank`."""
        self._group = group
        self._num_opened = 0
        self.rank = rank

    def connect(self, *, timeout_s: float, boot_id: str) -> Coordinator:
        """This rank's coordinator; every rank of the group calls it as often."""
        keys, nonce = self._group.meeting(self._num_opened)
        self._num_opened += 1
        ranks = tuple(range(self._group.world_size))
        return Coordinator(
            keys,
            rank=self.rank,
            world_size=len(ranks),
            timeout_s=timeout_s,
            nonce=nonce,
            host=platform.node(),
            boot_id=boot_id,
            local_ranks=ranks,
        )


def rank_in_process(process_group: object) -> int:
    """Which of this process's ranks a store with this `process_group` is: 0 where there is only one."""
    return process_group.rank if isinstance(process_group, ThreadRank) else 0
