"""Remember what the tensors of a state were, so that an unchanged structure is described only once.

Describing ten thousand tensors anew costs more than copying them. A structure is unchanged if each place
holds the same tensor object with the same memory, shape, strides and dtype; anything else is described
anew. Tensors are remembered weakly: nothing here keeps a model alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from shardstore.format.records import Mesh, TensorPiece, TensorRow
from shardstore.state import dtensor
from shardstore.state.collect import Collector

Fact: TypeAlias = "tuple[int, torch.Size, tuple[int, ...], torch.dtype, torch.device, bool]"


@dataclass(frozen=True, slots=True)
class Described:
    """The tensor part of a FlatState."""

    table: tuple[TensorRow, ...]
    pieces: tuple[TensorPiece, ...]
    meshes: tuple[Mesh, ...]
    coordinates: tuple[tuple[int, ...] | None, ...]
    has_aliases: bool


class Recorder:
    """Takes the tensors of one walk, in order; they are described when all have come."""

    def __init__(self) -> None:
        """Empty."""
        self.paths: list[tuple[str, ...]] = []
        self.tensors: list[torch.Tensor] = []
        self.private: list[bool | None] = []
        """Whether the tensor is private to the rank; None for the bytes of a leaf."""

    def __len__(self) -> int:
        return len(self.paths)

    def add(self, path: tuple[str, ...], tensor: torch.Tensor, *, private: bool = False) -> int:
        """Add a tensor and return the index of its row."""
        self.paths.append(path)
        self.tensors.append(tensor)
        self.private.append(private)
        return len(self.paths) - 1

    def add_bytes(self, path: tuple[str, ...], data: torch.Tensor) -> int:
        """Add the bytes of a leaf."""
        self.paths.append(path)
        self.tensors.append(data)
        self.private.append(None)
        return len(self.paths) - 1


class Memory:
    """The structure of the last state, and how its tensors were described."""

    def __init__(self) -> None:
        """Nothing is remembered."""
        self._paths: list[tuple[str, ...]] = []
        self._private: list[bool | None] = []
        self._refs: list[weakref.ref[torch.Tensor]] = []
        self._facts: list[Fact] = []
        self._specs: list[object] = []
        self._described: Described | None = None

    def describe(self, found: Recorder, rank: int) -> tuple[Described, Sequence[torch.Tensor]]:
        """Describe the tensors of a walk; returns their local memory, parallel to the table.

        Call under no_grad. An unchanged structure gives the very same `Described`.

        Raises:
            UnsupportedStateError: A tensor cannot be stored, or two have one name.
        """
        known = self._described
        if known is not None and self._holds_same_tensors(found):
            locals_ = [dtensor.peek_local(tensor) for tensor in found.tensors]
            if self._is_unchanged(found, locals_):
                return known, locals_
        self._described = None
        collector = Collector(rank)
        for path, tensor, private in zip(found.paths, found.tensors, found.private, strict=True):
            if private is None:
                collector.add_bytes(path, tensor)
            else:
                collector.add(path, tensor, private=private)
        described = Described(
            tuple(collector.rows),
            tuple(collector.pieces),
            tuple(collector.meshes),
            tuple(collector.coordinates),
            any(row.alias_of is not None for row in collector.rows),
        )
        self._remember(found, described, collector.tensors)
        return described, collector.tensors

    def _remember(
        self, found: Recorder, described: Described, tensors: Sequence[torch.Tensor]
    ) -> None:
        locals_ = [dtensor.peek_local(tensor) for tensor in found.tensors]
        facts = [_fact(local) for local in locals_]
        if facts != [_fact(tensor) for tensor in tensors]:
            return  # what is stored is not what is seen at a glance: a rank outside a mesh, say
        self._paths, self._private, self._facts = found.paths, found.private, facts
        self._refs = [weakref.ref(tensor) for tensor in found.tensors]
        self._specs = [dtensor.peek_spec(tensor) for tensor in found.tensors]
        self._described = described

    def _holds_same_tensors(self, found: Recorder) -> bool:
        if self._private != found.private or self._paths != found.paths:
            return False
        return all(
            private is None or ref() is tensor
            for private, ref, tensor in zip(found.private, self._refs, found.tensors, strict=True)
        )

    def _is_unchanged(self, found: Recorder, locals_: Sequence[torch.Tensor]) -> bool:
        for private, fact, local, spec, tensor in zip(
            found.private, self._facts, locals_, self._specs, found.tensors, strict=True
        ):
            if private is None:  # the bytes of a leaf are made anew: as many of them will do
                if local.shape != fact[1]:
                    return False
            elif _fact(local) != fact or dtensor.peek_spec(tensor) is not spec:
                return False
        return True


def _fact(local: torch.Tensor) -> Fact:
    return (
        local.data_ptr(), local.shape, local.stride(), local.dtype, local.device, local.is_conj()
    )  # fmt: skip
