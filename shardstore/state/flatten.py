"""State tree -> FlatState: tensors as table rows with this rank's memory, everything else as JSON.

The JSON tree (`leaves`) also records what each entry was, so that a restore can rebuild containers
with exact types and find optimizers and objects again. Its grammar is docs/format-leaves.md; the way
back is skeleton.py and restore.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from shardstore.format.records import Mesh, TensorPiece, TensorRow
from shardstore.state import optimizer as optimizers
from shardstore.state.dtensor import is_dtensor
from shardstore.state.kinds import (
    CONTAINERS,
    Kind,
    Stateful,
    check_state,
    element,
    items_of,
    kind_of,
    refuse_unsupported,
)
from shardstore.state.leaves import MAX_DEPTH, SCALAR_TYPES, encode_leaf, is_leaf
from shardstore.state.recorder import Memory, Recorder
from shardstore.state.survey import Survey, survey_state
from shardstore.state.tensors import refuse


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state as rows, this rank's pieces, and leaves. The parts of a shard header, and the memory."""

    table: tuple[TensorRow, ...]
    pieces: tuple[TensorPiece, ...]
    """Parallel to `table`, digests empty."""
    tensors: tuple[torch.Tensor, ...]
    """Parallel to `table`: this rank's local tensors, the live memory itself. Read under no_grad."""
    meshes: tuple[Mesh, ...]
    coordinates: tuple[tuple[int, ...] | None, ...]
    leaves: object
    """JSON-able tree."""
    uncovered: tuple[str, ...]
    """Names of non-persistent buffers: not stored."""
    has_aliases: bool
    """Some rows are other names for the memory of an earlier one."""


@dataclass(slots=True)
class Walk:
    """What one walk over a live state carries."""

    collector: Recorder
    survey: Survey
    uncovered: list[str] = field(default_factory=list)
    above: set[int] = field(default_factory=set)
    """Ids of the containers around the current value."""


def flatten_state(
    state: Mapping[str, object], *, rank: int, memory: Memory | None = None
) -> FlatState:
    """List everything in a state without copying tensors. Local to this rank.

    Runs the `state_dict()` of objects that have one and reshards FSDP2 modules left gathered.

    Args:
        state: Names to modules, optimizers, objects with state_dict and load_state_dict, tensors,
            leaves, and containers of these.
        rank: Global rank: makes names of rank-private tensors unique.
        memory: Of the last call for such a state: an unchanged structure gives the same `table` and
            `pieces` objects again, fast.

    Raises:
        UnsupportedStateError: naming what cannot be stored, and what to do instead.
    """
    entries = check_state(state)
    walk = Walk(Recorder(), survey_state(entries))
    with torch.no_grad():
        leaves = {name: encode(walk, (name,), value) for name, value in entries.items()}
        described, tensors = (memory or Memory()).describe(walk.collector, rank)
    return FlatState(
        table=described.table,
        pieces=described.pieces,
        tensors=tuple(tensors),
        meshes=described.meshes,
        coordinates=described.coordinates,
        leaves=leaves,
        uncovered=tuple(walk.uncovered),
        has_aliases=described.has_aliases,
    )


def encode(walk: Walk, path: tuple[str, ...], value: object) -> object:
    """Return the JSON node of any value of the state, adding its tensors to the walk."""
    kind = kind_of(value)
    if kind is Kind.LEAF:
        return encode_leaf(value, path, lambda data: walk.collector.add_bytes(path, data))
    if isinstance(value, nn.Module):
        return _encode_module(walk, path, value)
    if kind is Kind.OPTIMIZER and isinstance(value, torch.optim.Optimizer):
        return optimizers.encode_optimizer(
            walk.survey, path, value, _tree_encoder(walk, private=False)
        )
    if kind is Kind.STATEFUL and isinstance(value, Stateful):
        return ["stateful", encode_tree(walk, path, value.state_dict(), private=True)]
    if isinstance(value, torch.Tensor):
        return encode_tensor(walk, path, value, private=True)
    if kind is Kind.CONTAINER:
        return _encode_container(walk, path, value, None)
    return refuse_unsupported(path, value)


def encode_tree(walk: Walk, path: tuple[str, ...], value: object, *, private: bool) -> object:
    """Return the JSON node of what a state_dict() gave: leaves, tensors, containers, nothing else."""
    if type(value) in SCALAR_TYPES or is_leaf(value):
        return encode_leaf(value, path, lambda data: walk.collector.add_bytes(path, data))
    if type(value) in CONTAINERS:
        return _encode_container(walk, path, value, private)
    if isinstance(value, torch.Tensor):
        return encode_tensor(walk, path, value, private=private)
    if kind_of(value) is not Kind.UNSUPPORTED:
        refuse(path, value, "inside a state_dict only tensors and plain values are stored")
    return refuse_unsupported(path, value)


def encode_tensor(
    walk: Walk, path: tuple[str, ...], tensor: torch.Tensor, *, private: bool
) -> object:
    """Return the JSON node of a tensor. Only plain tensors can be private to a rank."""
    private = private and not is_dtensor(tensor)
    return ["tensor", walk.collector.add(path, tensor, private=private)]


def _tree_encoder(walk: Walk, *, private: bool) -> optimizers.TreeEncoder:
    return lambda path, value: encode_tree(walk, path, value, private=private)


def _encode_module(walk: Walk, path: tuple[str, ...], module: nn.Module) -> object:
    contents = walk.survey.read(module, path)
    first = len(walk.collector)
    add = walk.collector.add
    for fqn, tensor in contents.tensors.items():
        add((*path, fqn), tensor)
    walk.uncovered.extend(".".join((*path, fqn)) for fqn in contents.uncovered)
    extras = {
        fqn: encode_tree(walk, (*path, fqn), owner.get_extra_state(), private=True)
        for fqn, owner in contents.extras.items()
    }
    return ["module", first, len(contents.tensors), extras]


def _encode_container(
    walk: Walk, path: tuple[str, ...], container: object, tree_private: bool | None
) -> object:
    """Encode a container; `tree_private` None allows modules and the like inside."""
    if id(container) in walk.above:
        refuse(path, container, "it contains itself: break the cycle")
    if len(walk.above) >= MAX_DEPTH:
        refuse(path, container, f"containers nest deeper than {MAX_DEPTH} levels: flatten it")
    walk.above.add(id(container))
    tag = CONTAINERS[type(container)]
    nodes: list[object] = []
    for key, value in items_of(container):
        below = (*path, element(key))
        if tree_private is None:
            nodes.append(encode(walk, below, value))
        else:
            nodes.append(encode_tree(walk, below, value, private=tree_private))
    walk.above.discard(id(container))
    if isinstance(container, dict):
        return _keyed(tag, list(container), nodes, path)
    return [tag, *nodes]


def _keyed(tag: str, keys: list[object], nodes: list[object], path: tuple[str, ...]) -> object:
    encoded = [encode_key(key, path) for key in keys]
    if tag == "dict" and all(type(key) is str for key in encoded):
        return dict(zip(map(str, encoded), nodes, strict=True))
    return [tag, *([key, node] for key, node in zip(encoded, nodes, strict=True))]


def encode_key(key: object, path: tuple[str, ...], depth: int = 0) -> object:
    """Return the JSON node of a dict key: a leaf, or a tuple of leaves, always inline."""
    if type(key) is tuple:
        if depth >= MAX_DEPTH:
            refuse(path, key, f"a key nests deeper than {MAX_DEPTH} levels")
        return ["tuple", *(encode_key(item, path, depth + 1) for item in key)]
    if not is_leaf(key):
        refuse(
            (*path, element(key)), key, "keys are strings, numbers, bytes, None or tuples of them"
        )
    return encode_leaf(key, path, None)
