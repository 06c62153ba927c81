"""One coordinator per process group for callers without a store, kept as long as the group lives."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Final

from shardstore.cluster.connect import connect
from shardstore.cluster.coordination import Coordinator

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Alone:
    """Stands for the group where torch.distributed is not initialised."""


_ALONE: Final = _Alone()
_shared: Final[weakref.WeakKeyDictionary[object, tuple[Coordinator, Iterator[int]]]] = (
    weakref.WeakKeyDictionary()
)


def coordinator_of(
    process_group: ProcessGroup | None, *, timeout_s: float
) -> tuple[Coordinator, int]:
    """The coordinator of a group, and the number of this joint call; every rank of the group calls it.

    Only the first call of a group connects, with one small broadcast over it. A group that is
    destroyed takes its coordinator along.

    Args:
        process_group: Ranks that take part; None: all.
        timeout_s: How long the first call may wait for the others.

    Raises:
        CoordinationError: As `connect`.
    """
    import torch.distributed as dist

    group: object = process_group
    if group is None:
        initialised = dist.is_available() and dist.is_initialized()
        group = dist.group.WORLD if initialised else _ALONE
    known = _shared.get(group)
    if known is None:
        coordinator = connect(process_group, timeout_s=timeout_s)
        known = _shared[group] = (coordinator, itertools.count())
        # At the end of the group or of the process, whichever comes first: what this rank still has to
        # say goes out, or rank 0 would wait for it at its own exit.
        Finalize(group, coordinator.abandon, exitpriority=10)
    return known[0], next(known[1])
