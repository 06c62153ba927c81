"""Save and restore a state without the engine: flatten, stage into a buffer, match, apply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch

from shardstore.format.layout import ShardLayout, plan_layout
from shardstore.format.records import ShardHeader
from shardstore.state.flatten import FlatState, flatten_state
from shardstore.state.restore import RestorePlan, match_state
from shardstore.state.staging import stage, views


@dataclass
class Saved:
    """One rank's snapshot in memory."""

    header: ShardHeader
    layout: ShardLayout
    buffer: bytearray
    flat: FlatState


def save(state: Mapping[str, object], *, rank: int = 0, world_size: int = 1) -> Saved:
    """Flatten and stage a state; the header goes through JSON as in a file."""
    flat = flatten_state(state, rank=rank)
    header = ShardHeader(
        format=1,
        step=1,
        run=1,
        count=1,
        nonce="00000000",
        rank=rank,
        world_size=world_size,
        created=0.0,
        host="here",
        persist=True,
        meshes=flat.meshes,
        coordinates=flat.coordinates,
        table=flat.table,
        table_digest="",
        pieces=flat.pieces,
        leaves=flat.leaves,
        metadata=None,
        writer={},
    )
    layout = plan_layout(flat.table, flat.pieces, 4096)
    buffer = bytearray(layout.nbytes)
    stage(flat, views(memoryview(buffer), layout, flat.table, flat.pieces))
    decoded = msgspec.json.decode(msgspec.json.encode(header), type=ShardHeader)
    return Saved(decoded, layout, buffer, flat)


def match(
    saved: Saved,
    state: Mapping[str, object],
    *,
    rank: int = 0,
    world_size: int = 1,
    strict: bool = True,
    partial: bool = False,
) -> RestorePlan:
    """Compare only."""
    return match_state(
        state, saved.header, rank=rank, world_size=world_size, strict=strict, partial=partial
    )


def restore(
    saved: Saved,
    state: Mapping[str, object],
    *,
    rank: int = 0,
    world_size: int = 1,
    strict: bool = True,
    partial: bool = False,
) -> RestorePlan:
    """Match, prepare, apply; afterwards the buffer is overwritten, so nothing live may alias it."""
    plan = match(saved, state, rank=rank, world_size=world_size, strict=strict, partial=partial)
    copy = bytearray(saved.buffer)
    typed = views(memoryview(copy), saved.layout, saved.header.table, saved.header.pieces)
    plan.prepare({index: typed[index] for index in plan.needed})
    plan.apply()
    copy[:] = b"\xa5" * len(copy)
    return plan


def raw(tensor: torch.Tensor) -> bytes:
    """Bytes of a tensor's elements, lazy bits resolved."""
    resolved = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return resolved.reshape(-1).view(torch.uint8).numpy().tobytes()
