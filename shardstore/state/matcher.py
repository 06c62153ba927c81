"""What one comparison of a stored state with a live one carries, down to single tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardstore.errors import StateMismatchError, UnsupportedStateError
from shardstore.format.records import Mesh, ShardHeader
from shardstore.state.collect import Collector
from shardstore.state.compare import Differences, same_mesh, tensor_differences
from shardstore.state.dtensor import mesh_record
from shardstore.state.staging import fits_expanded, is_expanded
from shardstore.state.survey import Survey


@dataclass(slots=True)
class Actions:
    """What apply does, in this order; filled by prepare."""

    views: Mapping[int, torch.Tensor]
    """Verified bytes by row, typed; owned by the engine."""
    fills: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """(live local tensor, row whose bytes it takes)."""
    assigns: list[Callable[[], object]] = field(default_factory=list)
    """Optimizer state, contents of containers, names rebound in the state."""
    loads: list[Callable[[], object]] = field(default_factory=list)
    """The caller's load_state_dict and set_extra_state."""
    random: list[Callable[[], object]] = field(default_factory=list)
    """RNGState, last of all."""


Builder: TypeAlias = Callable[[Actions], object]
"""Run by prepare: adds actions and returns the value that belongs in this place."""


class Slot(NamedTuple):
    """How one place of the live state is restored."""

    build: Builder
    rebinds: bool = False
    """The place gets another object than it holds now."""


@dataclass(slots=True)
class Matcher:
    """State of one match: touches nothing live."""

    header: ShardHeader
    collector: Collector
    survey: Survey
    strict: bool
    differences: Differences = field(default_factory=Differences)
    uncovered: list[str] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    """Stored rows that are restored."""
    deferred: list[Callable[[], None]] = field(default_factory=list)
    """Optimizers and objects: matched after everything that is filled in place."""
    meshes: list[DeviceMesh] = field(default_factory=list)
    """Live meshes on which absent DTensors may be built."""
    _saved_of: dict[int, int] = field(default_factory=dict)
    _live_of: dict[int, int] = field(default_factory=dict)

    def use(self, row: int) -> int:
        """Mark a stored row as restored; returns the row that has its bytes."""
        self.used.add(row)
        return self.bytes_of(row)

    def bytes_of(self, row: int) -> int:
        """The row that has the bytes of a row: itself unless it is an alias."""
        alias_of = self.header.table[row].alias_of
        return row if alias_of is None else alias_of

    def fill(self, path: tuple[str, ...], live: torch.Tensor, row: int) -> Slot:
        """Fill a live tensor, which must equal the stored row in everything but bytes."""
        source = self.use(row)
        index = self._describe(path, live, row)
        if index is not None and self._agrees(path, row, index):
            self._check_tie(path, row, index)
            if self.collector.rows[index].alias_of is not None:
                return Slot(lambda _: live)  # its memory is filled under its first name
            return self._filling(path, live, index, source)
        return Slot(lambda _: live)

    def fill_if_equal(
        self, path: tuple[str, ...], live: torch.Tensor, row: int, *, must_equal: bool = False
    ) -> Slot | None:
        """Fill a live tensor if it equals the stored row and shares memory with nothing else.

        With `must_equal`, a live tensor that differs is noted as a difference; shared memory only
        means that a fresh tensor is needed.
        """
        saved = self.header.table[row]
        try:
            index = self.collector.add(path, live, private=saved.private)
        except UnsupportedStateError:
            return None
        if must_equal and not self._agrees(path, row, index):
            return Slot(lambda _: live)
        if self._tensor_differences(row, index) or self._mesh_differs(row, index):
            return None
        source, group = self.bytes_of(row), self._live_group(index)
        if self._saved_of.setdefault(group, source) != source:
            return None
        return self._filling(path, live, index, self.use(row))

    def find_mesh(self, saved: Mesh, preferred: torch.Tensor | None = None) -> DeviceMesh | None:
        """A live mesh equal to a stored one: the preferred tensor's, else any of the state."""
        if isinstance(preferred, DTensor) and same_mesh(saved, mesh_record(preferred.device_mesh)):
            return preferred.device_mesh
        for mesh in (*self.collector.device_meshes, *self.meshes):
            if same_mesh(saved, mesh_record(mesh)):
                return mesh
        return None

    def note_meshes(self, tensor: object) -> None:
        """Remember the mesh of a live tensor for DTensors that must be built."""
        if isinstance(tensor, DTensor) and all(m is not tensor.device_mesh for m in self.meshes):
            self.meshes.append(tensor.device_mesh)

    def _describe(self, path: tuple[str, ...], live: torch.Tensor, row: int) -> int | None:
        lazy = torch.nn.parameter.UninitializedParameter | torch.nn.parameter.UninitializedBuffer
        if isinstance(live, lazy) or live.is_meta:
            what = "uninitialized" if isinstance(live, lazy) else "on the meta device"
            self.differences.mismatched.append(
                f"{'.'.join(path)}: the live tensor is {what}: materialise it first"
            )
            return None
        try:
            return self.collector.add(path, live, private=self.header.table[row].private)
        except UnsupportedStateError as error:
            self.differences.mismatched.append(error.message)
            return None

    def _agrees(self, path: tuple[str, ...], row: int, index: int) -> bool:
        name = ".".join(path)
        found = self._tensor_differences(row, index, note_coordinates=True)
        mesh_differs = self._mesh_differs(row, index)
        if mesh_differs:
            saved, live = self._mesh_pair(row, index)
            assert saved is not None
            self.differences.note_mesh(saved, live, name)
            found = [line for line in found if not line.startswith("local piece")]
        if found:
            self.differences.mismatched.append(f"{name}: {'; '.join(found)}")
        return not found and not mesh_differs

    def _tensor_differences(
        self, row: int, index: int, *, note_coordinates: bool = False
    ) -> list[str]:
        header, live = self.header, self.collector
        saved_row, live_row = header.table[row], live.rows[index]
        if saved_row.mesh is not None and live_row.mesh is not None and note_coordinates:
            saved = header.coordinates[saved_row.mesh]
            now = live.coordinates[live_row.mesh]
            if saved != now and not self._mesh_differs(row, index):
                self.differences.note_coordinate(header.meshes[saved_row.mesh], saved, now)
        return tensor_differences(saved_row, header.pieces[row], live_row, live.pieces[index])

    def _mesh_pair(self, row: int, index: int) -> tuple[Mesh | None, Mesh | None]:
        saved, live = self.header.table[row].mesh, self.collector.rows[index].mesh
        return (
            None if saved is None else self.header.meshes[saved],
            None if live is None else self.collector.meshes[live],
        )

    def _mesh_differs(self, row: int, index: int) -> bool:
        """Both are DTensors, on different meshes."""
        saved, live = self._mesh_pair(row, index)
        return saved is not None and live is not None and not same_mesh(saved, live)

    def _live_group(self, index: int) -> int:
        alias_of = self.collector.rows[index].alias_of
        return index if alias_of is None else alias_of

    def _check_tie(self, path: tuple[str, ...], row: int, index: int) -> None:
        """Tensors tied in the snapshot must be tied live, and the other way round."""
        saved, live, name = self.bytes_of(row), self._live_group(index), ".".join(path)
        other = self._live_of.setdefault(saved, live)
        if other != live:
            twin = ".".join(self.collector.rows[other].path)
            self.differences.mismatched.append(
                f"{name}: tied to {twin} in the snapshot (one memory), separate in the live state"
            )
        elif (owner := self._saved_of.setdefault(live, saved)) != saved:
            twin = ".".join(self.header.table[owner].path)
            self.differences.mismatched.append(
                f"{name}: tied to {twin} in the live state (one memory), separate in the snapshot"
            )

    def _filling(self, path: tuple[str, ...], live: torch.Tensor, index: int, source: int) -> Slot:
        local = self.collector.tensors[index]
        expanded = is_expanded(local)

        def build(actions: Actions) -> object:
            if expanded:
                require_fit(path, local, actions.views[source])
            actions.fills.append((local, source))
            return live

        return Slot(build)


def require_fit(path: tuple[str, ...], local: torch.Tensor, source: torch.Tensor) -> None:
    """Check that an expanded live tensor can hold what was stored.

    Raises:
        StateMismatchError: it has one place in memory for elements that differ.
    """
    if not fits_expanded(local, source):
        name = ".".join(path)
        line = f"{name}: the live tensor is expanded (one memory for several elements that differ)"
        raise StateMismatchError(
            f"the snapshot does not fit the live state, which is unchanged\n  {line}",
            mismatched=[line],
        )
