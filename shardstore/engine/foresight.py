"""Say at the first save, and not after hours of training, that the disk will not hold what is to be kept."""

from __future__ import annotations

from shardstore.engine.session import Session
from shardstore.errors import ShardStoreError
from shardstore.tiers.addresses import is_url
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.places import nearest


class Foresight:
    """Looks once, on the rank that answers for the root (or for the disk of its host). It only warns."""

    def __init__(self, session: Session, ops: FileOps) -> None:
        """Nothing is looked at yet."""
        self._session = session
        self._ops = ops
        self._has_looked = False

    def look(self, nbytes: int) -> None:
        """Compare free space with what is to be kept and one more, for shards of about `nbytes`. Never raises."""
        if self._has_looked or nbytes == 0:
            return
        self._has_looked = True
        try:
            self._look(nbytes)
        except (ShardStoreError, OSError):
            pass  # the save itself will say what is wrong there

    def _look(self, nbytes: int) -> None:
        session = self._session
        if session.catalog is not None:
            own = next((c.ranks for c in session.classes if session.rank in c.ranks), None)
            ranks = range(session.world_size) if own is None else own
            is_mine, where = session.rank == ranks[0], session.catalog.tier.location
            if is_url(where):
                return  # nobody can say
            num_ranks, argument = len(ranks), "root"
        elif session.on_disk is not None:
            is_mine, where = session.rank == min(session.local_ranks), session.on_disk.disk.location
            num_ranks, argument = len(session.local_ranks), "disk"
        else:
            return
        free = self._ops.free_space(nearest(where)) if is_mine else None
        if free is None:
            return
        num_kept = session.keep.last if session.keep is not None else 1
        each = nbytes * num_ranks
        needed = each * (num_kept + 1)
        released = self._released(num_ranks) if session.keep is not None else 0
        if free + released < needed:
            session.warn(
                "%s has %s bytes free. To keep %d snapshot(s) and write the next one takes %s: about %s "
                "each. Saves will fail once it is full: free space, lower keep=, or give another %s=",
                where, f"{free:,}", num_kept, f"{needed:,}", f"{each:,}", argument,
            )  # fmt: skip

    def _released(self, num_ranks: int) -> int:
        """Bytes of snapshots that are there already and that retention will replace."""
        session = self._session
        if session.own_catalog is not None:
            registers = session.own_catalog.committed()
            return sum(r.shards[rank].nbytes for r in registers for rank in r.ranks_here)
        assert session.on_disk is not None
        return num_ranks * sum(gist.nbytes for gist in session.on_disk.gists().values())
