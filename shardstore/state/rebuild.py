"""Build stored values anew: containers with exact types, leaves, tensors; live tensors are reused."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

import torch
from torch.distributed.tensor import DTensor

from shardstore.errors import StateMismatchError
from shardstore.state import dtensor
from shardstore.state.kinds import element
from shardstore.state.leaves import Blob, decode_blob
from shardstore.state.matcher import Actions, Builder, Matcher
from shardstore.state.nodes import (
    ContainerNode,
    LeafNode,
    ModuleNode,
    Node,
    OptimizerNode,
    StatefulNode,
    TensorNode,
    describe_node,
)
from shardstore.state.staging import copy_exact
from shardstore.state.tensors import TORCH_DTYPES

ABSENT: Final = object()
"""No live counterpart."""


@dataclass(frozen=True, slots=True)
class Placing:
    """Where fresh tensors go, and what a differing live tensor means."""

    parameter: torch.Tensor | None = None
    """Optimizer state sits with its parameter."""
    saved_device: str = ""
    """Device type of the parameter when it was saved."""
    step_on_device: bool = False
    """Capturable and fused optimizers keep `step` on the device."""
    must_equal: bool = False
    """A live tensor that differs is an error rather than replaced."""
    shared: dict[int, torch.Tensor] | None = field(default_factory=dict)
    """Fresh tensors by the row of their bytes: tied ones stay tied. None: always copies."""


def rebuild(
    matcher: Matcher, path: tuple[str, ...], live: object, node: Node, placing: Placing
) -> Builder:
    """Return the builder of a stored value. A live tensor at the same place is reused and filled.

    Differences are noted in the matcher; nothing live is touched.
    """
    match node:
        case LeafNode(Blob() as blob):
            source = matcher.use(blob.row)
            return lambda actions: decode_blob(blob, actions.views[source])
        case LeafNode(value):
            return lambda _: value
        case TensorNode(row):
            return _tensor(matcher, path, live, row, placing)
        case ContainerNode():
            return _container(matcher, path, live, node, placing)
        case ModuleNode() | StatefulNode() | OptimizerNode():
            matcher.differences.unexpected.append(
                f"{'.'.join(path)} ({describe_node(node)} is filled, never built: put it there)"
            )
            return lambda _: None


def _container(
    matcher: Matcher, path: tuple[str, ...], live: object, node: ContainerNode, placing: Placing
) -> Builder:
    builders = [
        (key, rebuild(matcher, (*path, element(key)), child_of(live, key), child, placing))
        for key, child in node.items
    ]
    cls = node.type
    if issubclass(cls, dict):
        # module.state_dict() carries versions in this attribute, and load_state_dict asks for it
        versions = getattr(live, "_metadata", None) if cls is OrderedDict else None

        def build_dict(actions: Actions) -> object:
            built: dict[object, object] = cls()
            for key, build in builders:
                built[key] = build(actions)
            if versions is not None:
                built._metadata = versions  # type: ignore[attr-defined]  # noqa: SLF001
            return built

        return build_dict
    if cls is tuple:
        return lambda actions: tuple(build(actions) for _, build in builders)
    return lambda actions: [build(actions) for _, build in builders]


def child_of(live: object, key: object) -> object:
    """The live value under a key, or ABSENT."""
    if isinstance(live, dict):
        return live.get(key, ABSENT)
    if isinstance(live, list | tuple) and isinstance(key, int) and key < len(live):
        return live[key]
    return ABSENT


def _tensor(
    matcher: Matcher, path: tuple[str, ...], live: object, row: int, placing: Placing
) -> Builder:
    if isinstance(live, torch.Tensor):
        slot = matcher.fill_if_equal(path, live, row, must_equal=placing.must_equal)
        if slot is not None:
            return slot.build
    return _fresh(matcher, path, row, placing)


def _fresh(matcher: Matcher, path: tuple[str, ...], row: int, placing: Placing) -> Builder:
    header = matcher.header
    saved, piece = header.table[row], header.pieces[row]
    source = matcher.use(row)
    if saved.dtype not in TORCH_DTYPES:
        matcher.differences.mismatched.append(
            f"{'.'.join(path)}: dtype {saved.dtype} saved, which torch {torch.__version__} lacks"
        )
    mesh = None
    if saved.mesh is not None:
        record = header.meshes[saved.mesh]
        mesh = matcher.find_mesh(record, placing.parameter)
        if mesh is None:
            matcher.differences.note_mesh(record, None, ".".join(path))
            return lambda _: None
    device = _device(placing, path[-1], piece.device, saved.shape)

    def build(actions: Actions) -> object:
        known = None if placing.shared is None else placing.shared.get(source)
        if known is not None and known.shape == saved.shape:
            return known
        view = actions.views[source]
        local = torch.empty(piece.sizes, dtype=view.dtype, device=device)
        copy_exact(local, view)
        built: torch.Tensor = local
        if mesh is not None:
            if dtensor.coordinate_of(mesh) is None:
                local = local.new_empty(0)
            built = dtensor.build_dtensor(
                local, mesh, saved.placements or (), saved.shape, placing.parameter
            )
            _check_piece(built, path, (piece.offsets, piece.sizes))
        if placing.shared is not None:
            placing.shared[source] = built
        return built

    return build


def _device(placing: Placing, key: str, saved_device: str, shape: tuple[int, ...]) -> torch.device:
    """With the parameter if it was beside it, or has its shape; else as saved, where possible."""
    parameter = placing.parameter
    if parameter is None:
        if saved_device == "cpu":
            return torch.device("cpu")
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return torch.device("cpu" if here is None or here.type != saved_device else saved_device)
    local = dtensor.local_of(parameter) if isinstance(parameter, DTensor) else parameter
    if key == "step" and not shape and not placing.step_on_device and saved_device == "cpu":
        return torch.device("cpu")
    beside = saved_device == placing.saved_device or shape == tuple(parameter.shape)
    if beside or (key == "step" and placing.step_on_device):
        return local.device
    return torch.device("cpu")


def _check_piece(
    built: torch.Tensor,
    path: tuple[str, ...],
    saved: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    """This torch must cut the tensor as the one that saved it did."""
    chunk = dtensor.chunk_of(built) if isinstance(built, DTensor) else saved
    if chunk != saved:
        line = f"{'.'.join(path)}: local piece {saved} saved, this torch cuts {chunk}"
        raise StateMismatchError(
            f"the snapshot does not fit the live state, which is unchanged\n  {line}",
            mismatched=[line],
        )
