"""Gather tensors into table rows and this rank's pieces, finding aliases and clashing names."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardstore.errors import UnsupportedStateError
from shardstore.format.records import Mesh, TensorPiece, TensorRow
from shardstore.state import dtensor
from shardstore.state.tensors import LiveTensor, SpecCache, describe, refuse


class Collector:
    """Rows of one walk over live state, in the order they were met."""

    def __init__(self, rank: int) -> None:
        """`rank` makes the keys of private tensors unique."""
        self.rank = rank
        self.rows: list[TensorRow] = []
        self.pieces: list[TensorPiece] = []
        self.tensors: list[torch.Tensor] = []
        self.meshes: list[Mesh] = []
        self.coordinates: list[tuple[int, ...] | None] = []
        self.device_meshes: list[DeviceMesh] = []
        self.specs = SpecCache()
        self._paths: dict[str, tuple[str, ...]] = {}
        self._mesh_index: dict[int, int] = {}
        self._by_identity: dict[int, int] = {}
        self._by_storage: dict[object, int] = {}
        self._kept: list[torch.Tensor] = []  # so that an id is not met twice

    def add(self, path: tuple[str, ...], tensor: torch.Tensor, *, private: bool = False) -> int:
        """Add a tensor and return the index of its row. Call under no_grad.

        Raises:
            UnsupportedStateError: the tensor cannot be stored, or its key is taken.
        """
        live = describe(tensor, path, self.specs)
        mesh = None if live.mesh is None else self.mesh_index(live.mesh)
        alias_of = self._by_identity.get(id(tensor))
        if alias_of is None:
            storage = storage_key(live, mesh)
            if storage is not None:
                alias_of = self._by_storage.setdefault(storage, len(self.rows))
                if alias_of == len(self.rows):
                    alias_of = None
            if alias_of is None:
                self._by_identity[id(tensor)] = len(self.rows)
        self._kept.append(tensor)
        return self._append(path, live, mesh, private=private, alias_of=alias_of)

    def add_bytes(self, path: tuple[str, ...], data: torch.Tensor) -> int:
        """Add the bytes of a leaf as a private uint8 tensor; it never counts as an alias."""
        return self._append(
            path, describe(data, path, self.specs), None, private=True, alias_of=None
        )

    def mesh_index(self, mesh: DeviceMesh) -> int:
        """Index of a mesh in `meshes`; equal meshes share one."""
        index = self._mesh_index.get(id(mesh))
        if index is None:
            record = dtensor.mesh_record(mesh)
            if record in self.meshes:
                index = self.meshes.index(record)
            else:
                index = len(self.meshes)
                self.meshes.append(record)
                self.coordinates.append(dtensor.coordinate_of(mesh))
            self.device_meshes.append(mesh)
            self._mesh_index[id(mesh)] = index
        return index

    def _append(
        self,
        path: tuple[str, ...],
        live: LiveTensor,
        mesh: int | None,
        *,
        private: bool,
        alias_of: int | None,
    ) -> int:
        key = ".".join(path)
        if private:
            key = f"{key}@{self.rank}"
        elif key == "__metadata__":
            key = "__metadata__."
        if self._paths.setdefault(key, path) is not path:
            _refuse_clash(self._paths[key], path, key)
        if not key.isascii():
            _check_text(path, key)
        index = len(self.rows)
        self.rows.append(
            TensorRow(path, live.dtype, live.shape, live.placements, mesh, private, alias_of)
        )
        self.pieces.append(
            TensorPiece(
                "" if alias_of is not None else key,
                live.offsets,
                live.sizes,
                live.local.device.type,
                "",
            )
        )
        self.tensors.append(live.local)
        return index


def storage_key(live: LiveTensor, mesh: int | None) -> object | None:
    """What two views of the same memory as the same tensor have in common; None if it is empty."""
    local = live.local
    if local.numel() == 0:
        return None
    return (
        local.data_ptr(),
        live.sizes,
        local.stride(),
        live.dtype,
        local.device,
        local.is_conj(),
        local.is_neg(),
        live.shape,
        live.placements,
        mesh,
    )


def _refuse_clash(first: tuple[str, ...], second: tuple[str, ...], key: str) -> None:
    raise UnsupportedStateError(
        f"two tensors have one name {key!r}: {list(first)} and {list(second)}; rename one",
        path=".".join(second),
        type="Tensor",
    )


def _check_text(path: tuple[str, ...], key: str) -> None:
    try:
        key.encode()
    except UnicodeEncodeError:
        refuse(path, key, "its name holds a lone surrogate, which is not text: rename it")
