"""Stored rows against live ones: every difference, in one readable error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardstore.errors import StateMismatchError, TopologyMismatchError
from shardstore.format.records import Mesh, Placement, ShardHeader, TensorPiece, TensorRow

_SHOWN = 20
_ELSEWHERE = (
    "shardstore.open_snapshot reads whole tensors out of any snapshot, and "
    "torch.distributed.checkpoint's HuggingFaceStorageReader loads its folder onto another topology"
)


@dataclass(slots=True)
class Differences:
    """What was found so far. Names in `missing` and `unexpected` are paths joined by dots."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    topology: list[str] = field(default_factory=list)
    meshes: dict[tuple[Mesh, Mesh | None], list[str]] = field(default_factory=dict)
    """(saved, live): the tensors on them. A live mesh of None: there is no equal one."""
    ranks: tuple[int, int, int, int] = (0, 1, 0, 1)
    """Rank and world size, saved and live."""

    def raise_if_any(self, *, names_may_differ: bool) -> None:
        """Raise one error with everything that counts as a difference.

        Raises:
            TopologyMismatchError: ranks, world sizes, meshes or coordinates differ (and maybe more).
            StateMismatchError: anything else does.
        """
        topology = [*self.topology, *self._mesh_lines()]
        missing = [] if names_may_differ else self.missing
        unexpected = [] if names_may_differ else self.unexpected
        count = len(topology) + len(missing) + len(unexpected) + len(self.mismatched)
        if not count:
            return
        lines = [
            f"the snapshot does not fit the live state, which is unchanged ({count} differences)"
        ]
        lines += topology
        lines += _listed("missing from the snapshot", missing)
        lines += _listed("unexpected: in the snapshot, not in the live state", unexpected)
        lines += _listed("mismatched", self.mismatched)
        if topology:
            lines.append(f"remedy: restore on the topology that saved it; {_ELSEWHERE}")
        elif missing or unexpected:
            lines.append(
                "remedy: give the state the names it was saved with; partial=True takes a part of the "
                "snapshot, strict=False lets names differ"
            )
        message = "\n  ".join(lines)
        if topology:
            raise TopologyMismatchError(
                message,
                saved=self._topology_line(saved=True),
                current=self._topology_line(saved=False),
                missing=missing,
                unexpected=unexpected,
                mismatched=[*topology, *self.mismatched],
            )
        raise StateMismatchError(
            message, missing=missing, unexpected=unexpected, mismatched=self.mismatched
        )

    def check_ranks(self, header: ShardHeader, rank: int, world_size: int) -> None:
        """Note another world size or rank than the file's."""
        self.ranks = (header.rank, header.world_size, rank, world_size)
        if header.world_size != world_size:
            self.topology.append(
                f"world size: saved by {header.world_size} ranks, restoring on {world_size} ranks"
            )
        if header.rank != rank:
            self.topology.append(
                f"rank: the file is of rank {header.rank} of {header.world_size}, "
                f"this process is rank {rank} of {world_size}"
            )

    def note_mesh(self, saved: Mesh, live: Mesh | None, name: str) -> None:
        """Note that a tensor's mesh differs; said once per pair of meshes."""
        self.meshes.setdefault((saved, live), []).append(name)

    def note_coordinate(
        self, mesh: Mesh, saved: tuple[int, ...] | None, live: tuple[int, ...] | None
    ) -> None:
        """Note that this rank sits elsewhere in an equal mesh; said once per mesh."""
        line = f"coordinate in mesh {mesh_text(mesh)}: saved {saved}, live {live}"
        if line not in self.topology:
            self.topology.append(line)

    def _mesh_lines(self) -> list[str]:
        lines: list[str] = []
        for (saved, live), names in self.meshes.items():
            of = names[0] if len(names) == 1 else f"{len(names)} tensors ({names[0]}, ...)"
            now = "no equal mesh in the live state" if live is None else f"live {mesh_text(live)}"
            lines.append(f"mesh of {of}: saved {mesh_text(saved)}, {now}")
        return lines

    def _topology_line(self, *, saved: bool) -> str:
        rank, world_size = self.ranks[:2] if saved else self.ranks[2:]
        meshes = {pair[0] if saved else pair[1]: None for pair in self.meshes}
        texts = [mesh_text(mesh) for mesh in meshes if mesh is not None]
        return ", ".join(
            [f"world size {world_size}", f"rank {rank}", *(f"mesh {t}" for t in texts)]
        )


def mesh_text(mesh: Mesh) -> str:
    """One line: shape, axis names, ranks."""
    names = "" if mesh.axis_names is None else f" named ({', '.join(mesh.axis_names)})"
    ranks = list(mesh.ranks)
    shown = str(ranks) if len(ranks) <= 16 else f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}]"
    return f"{mesh.shape}{names} of ranks {shown}"


def same_mesh(saved: Mesh, live: Mesh) -> bool:
    """Equal in shape, axis names and ranks; the device type may differ."""
    return (saved.shape, saved.axis_names, saved.ranks) == (
        live.shape,
        live.axis_names,
        live.ranks,
    )


def placements_text(placements: Sequence[Placement] | None) -> str:
    """As torch prints them, as `[Shard(0), Replicate]`; `plain` for no DTensor."""
    if placements is None:
        return "a plain tensor"
    texts: list[str] = []
    for placement in placements:
        inner = "" if placement.dim is None else f"({placement.dim})"
        if placement.split_factor is not None:
            inner = f"({placement.dim}, split_factor={placement.split_factor})"
        texts.append(placement.type + inner)
    return f"[{', '.join(texts)}]"


def tensor_differences(
    saved: TensorRow, saved_piece: TensorPiece, live: TensorRow, live_piece: TensorPiece
) -> list[str]:
    """How one tensor differs on this rank, its mesh aside."""
    found: list[str] = []
    if saved.dtype != live.dtype:
        found.append(f"dtype {saved.dtype} saved, {live.dtype} live")
    if saved.shape != live.shape:
        found.append(f"shape {saved.shape} saved, {live.shape} live")
    if saved.placements != live.placements:
        found.append(
            f"placement {placements_text(saved.placements)} saved, "
            f"{placements_text(live.placements)} live"
        )
    box, live_box = (
        (saved_piece.offsets, saved_piece.sizes),
        (live_piece.offsets, live_piece.sizes),
    )
    if not found and box != live_box:
        found.append(
            f"local piece at {box[0]} of size {box[1]} saved, "
            f"at {live_box[0]} of size {live_box[1]} live"
        )
    return found


def _listed(title: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    lines = [f"{title}:", *(f"  {name}" for name in names[:_SHOWN])]
    if len(names) > _SHOWN:
        lines.append(f"  ... and {len(names) - _SHOWN} more ({len(names)} in all)")
    return lines
