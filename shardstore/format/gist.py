"""The few facts of a shard header that a listing needs, without the tables, which may be large."""

from __future__ import annotations

import msgspec

from shardstore.format.canonical import OuterHeader
from shardstore.format.digests import Buffer
from shardstore.format.header import is_header_whole
from shardstore.format.records import FORMAT_VERSION, SnapshotId


class Gist(msgspec.Struct, frozen=True):
    """Who saved a shard file, when, and as part of what."""

    format: int
    step: int
    run: int
    count: int
    nonce: str
    rank: int
    world_size: int
    created: float
    persist: bool
    metadata: object
    nbytes: int = 0
    """Size of the file."""

    @property
    def id(self) -> SnapshotId:
        """Identity of the snapshot."""
        return SnapshotId(self.step, self.run, self.count, self.nonce)


def read_gist(prefix: Buffer, *, file_nbytes: int) -> Gist | None:
    """Read the gist of a file of `file_nbytes` from its first bytes, up to the end of the header's JSON.

    Returns:
        None if the header does not have the digest that it was sealed with, or is of another version.
    """
    if not is_header_whole(prefix):
        return None
    try:
        outer = msgspec.json.decode(memoryview(prefix)[8:], type=OuterHeader)
        gist = msgspec.json.decode(outer.metadata.shardstore, type=Gist)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if gist.format != FORMAT_VERSION:
        return None
    return msgspec.structs.replace(gist, nbytes=file_nbytes)
