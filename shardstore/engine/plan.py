"""Plan one shard file: header, layout and the room for the header, before anything is copied."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from shardstore.engine.ranks import meshes_in_group
from shardstore.engine.session import Session
from shardstore.errors import UnsupportedStateError, shown
from shardstore.format.numbers import whole_number
from shardstore.format.records import FORMAT_VERSION, Mesh, ShardHeader
from shardstore.format.shardfile import ShardLayout, header_nbytes, plan_layout, table_digest
from shardstore.state.flatten import FlatState

_WIDEST_RUN: Final = 0xFFFFFFFF
_MAX_STEP: Final = 10**18
_MAX_DEPTH: Final = 64
_MAX_PATH: Final = 200


class ShardPlanner:
    """Lays out this rank's files. What depends on the tensors only is planned once per structure."""

    def __init__(self, session: Session) -> None:
        """Nothing is planned yet."""
        self._session = session
        self._table: object = None
        self._pieces: object = None
        self._table_digest = ""
        self._meshes: tuple[Mesh, ...] = ()
        self._tensors_nbytes = 0
        self._layout: ShardLayout | None = None

    def plan(
        self,
        flat: FlatState,
        *,
        step: int = 0,
        count: int = 0,
        persist: bool = False,
        created: float = 0.0,
        metadata: object = None,
    ) -> tuple[ShardHeader, ShardLayout]:
        """Lay out one file. The run number and the digests come later; their width is planned.

        The room for the header is kept from file to file while it suffices, so that slots are reused;
        an unchanged structure gives the same layout object.

        Args:
            flat: What is to be stored.
            step: Step, checked.
            count: Save count.
            persist: Whether it goes beyond memory.
            created: Seconds since the epoch.
            metadata: JSON value, checked.
        """
        session = self._session
        is_known = flat.table is self._table and flat.pieces is self._pieces
        if not is_known:
            self._table_digest = table_digest(flat.table)
            self._meshes = meshes_in_group(flat.meshes, session.coordinator.group_ranks)
        header = plan_header(
            flat,
            rank=session.rank,
            world_size=session.world_size,
            step=step,
            count=count,
            persist=persist,
            created=created,
            metadata=metadata,
            nonce=session.nonce,
            host=session.host,
            writer=session.writer,
            digest=self._table_digest,
        )
        header = msgspec.structs.replace(header, meshes=self._meshes)
        rest_nbytes = header_nbytes(msgspec.structs.replace(header, table=(), pieces=()))
        if not is_known:
            # Escaped or not, the text of a record is as long as the texts of its parts.
            self._tensors_nbytes = header_nbytes(header) - rest_nbytes
            self._table, self._pieces = flat.table, flat.pieces
        nbytes = rest_nbytes + self._tensors_nbytes
        room = self._layout.data_start if self._layout is not None else 0
        if not is_known or self._layout is None or 8 + nbytes > room:
            self._layout = plan_layout(flat.table, flat.pieces, nbytes, room)
        return header, self._layout


def plan_header(
    flat: FlatState,
    *,
    rank: int,
    world_size: int,
    step: int = 0,
    count: int = 0,
    persist: bool = False,
    created: float = 0.0,
    metadata: object = None,
    nonce: str = "00000000",
    host: str = "",
    writer: dict[str, str] | None = None,
    digest: str | None = None,
) -> ShardHeader:
    """Describe `flat` as a shard file; the run has its widest number, digests are still empty."""
    return ShardHeader(
        format=FORMAT_VERSION,
        step=step,
        run=_WIDEST_RUN,
        count=count,
        nonce=nonce,
        rank=rank,
        world_size=world_size,
        created=created,
        host=host,
        persist=persist,
        meshes=flat.meshes,
        coordinates=flat.coordinates,
        table=flat.table,
        table_digest=digest or table_digest(flat.table),
        pieces=flat.pieces,
        leaves=flat.leaves,
        metadata=metadata,
        writer=writer or {},
    )


def check_step(step: object) -> int:
    """Validate a step.

    Raises:
        ValueError: Not an integer from 0 on.
    """
    number = whole_number(step)
    if number is None:
        raise ValueError(f"step must be an integer, got {shown(step)} ({type(step).__name__})")
    if not 0 <= number < _MAX_STEP:
        big = number if abs(number) < 1 << 64 else f"a number of {number.bit_length()} bits"
        raise ValueError(f"step must be at least 0 and below 10^18, got {big}")
    return number


def check_metadata(metadata: object) -> object:
    """Validate user metadata: what JSON can hold, exactly.

    Raises:
        UnsupportedStateError: Names the value that JSON cannot hold.
    """
    return _check_json(metadata, "metadata", 0)


def _check_json(value: object, path: str, depth: int) -> object:
    if value is None or isinstance(value, bool) or (isinstance(value, str) and _is_text(value)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
        return value
    if depth < _MAX_DEPTH and type(value) in (list, tuple):
        return [_check_json(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]  # type: ignore[var-annotated, arg-type]
    if (
        depth < _MAX_DEPTH
        and type(value) is dict
        and all(isinstance(key, str) and _is_text(key) for key in value)
    ):
        return {key: _check_json(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
    raise UnsupportedStateError(
        f"{path[:_MAX_PATH]} is {shown(value)} ({type(value).__name__}): metadata must be JSON, so finite "
        "numbers of at most 64 bits, strings, booleans, None, lists, and dicts with string keys, at most "
        f"{_MAX_DEPTH} deep. Write tensors as .item(), nan as a string.",
        path=path[:_MAX_PATH],
        type=type(value).__qualname__,
    )


def _is_text(value: str) -> bool:
    """Whether UTF-8 can hold it: a lone surrogate it cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
