"""What the numbers in a header or manifest must satisfy. Nothing is allocated by them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from shardstore.format.digests import is_digest
from shardstore.format.dtypes import DTYPES
from shardstore.format.findings import MAX_INT
from shardstore.format.records import Mesh, Placement, SnapshotId, TensorPiece, TensorRow
from shardstore.format.strict_json import quote

Report = Callable[[str], None]


class _RowName(NamedTuple):
    """Names a row in a message. Text is made only where there is something to say: rows are many."""

    where: str
    position: int
    row: TensorRow

    def __str__(self) -> str:
        return f"{self.where}[{self.position}] {quote('.'.join(self.row.path[:32]))}"

    def __format__(self, spec: str) -> str:
        return str(self)


def bounded_product(numbers: Sequence[int], limit: int = MAX_INT) -> int | None:
    """Multiply non-negative numbers; None once the product of the non-zero ones passes `limit`."""
    product, is_zero = 1, False
    for number in numbers:
        if number == 0:
            is_zero = True
        else:
            product *= number
            if product > limit:
                return None
    return 0 if is_zero else product


def check_id(identity: SnapshotId, world_size: int, report: Report) -> None:
    """Check the parts of a snapshot id and the world size."""
    parts = (identity.step, identity.run, identity.count)
    if not all(0 <= part <= MAX_INT for part in parts) or (
        SnapshotId.parse(identity.name) != identity
    ):
        report(f"no snapshot has the id {quote(parts)}, nonce {quote(identity.nonce)}")
    if not 1 <= world_size <= 2**31:
        report(f"world_size is {quote(world_size)}")


def check_meshes(meshes: Sequence[Mesh], world_size: int, report: Report) -> None:
    """Check each mesh by itself."""
    for index, mesh in enumerate(meshes):
        name = f"meshes[{index}]"
        if not mesh.shape or min(mesh.shape) < 1:
            report(f"{name}: no mesh has the shape {quote(mesh.shape)}")
        elif bounded_product(mesh.shape) != len(mesh.ranks):
            report(f"{name}: shape {quote(mesh.shape)} does not hold {len(mesh.ranks)} ranks")
        if mesh.axis_names is not None and len(mesh.axis_names) != len(mesh.shape):
            report(f"{name}: {len(mesh.axis_names)} axis names for {len(mesh.shape)} axes")
        if not mesh.device_type:
            report(f"{name}: device_type is empty")
        if len(set(mesh.ranks)) != len(mesh.ranks):
            report(f"{name}: a rank appears twice")
        outside = [rank for rank in mesh.ranks if not 0 <= rank < world_size]
        if outside:
            report(f"{name}: ranks {quote(outside[:8])} outside a world of {quote(world_size)}")


def check_coordinates(
    meshes: Sequence[Mesh],
    coordinates: Sequence[tuple[int, ...] | None],
    rank: int,
    where: str,
    report: Report,
) -> None:
    """Check that `coordinates` say where in each mesh `rank` is, None where it is not."""
    if len(coordinates) != len(meshes):
        report(f"{where}: {len(coordinates)} coordinates for {len(meshes)} meshes")
        return
    for index, (mesh, coordinate) in enumerate(zip(meshes, coordinates, strict=True)):
        name = f"{where}: coordinates[{index}]"
        if coordinate is None:
            if rank in mesh.ranks:
                report(f"{name} is null, but rank {rank} is in the mesh")
            continue
        is_inside = len(coordinate) == len(mesh.shape) and all(
            0 <= c < size for c, size in zip(coordinate, mesh.shape, strict=True)
        )
        position = 0
        if is_inside:
            for c, size in zip(coordinate, mesh.shape, strict=True):
                position = position * size + c
        if not is_inside or position >= len(mesh.ranks):
            report(f"{name} {quote(coordinate)} is outside the mesh {quote(mesh.shape)}")
        elif mesh.ranks[position] != rank:
            report(f"{name} {quote(coordinate)} is rank {mesh.ranks[position]}, not {quote(rank)}")


def check_table(table: Sequence[TensorRow], where: str, report: Report) -> None:
    """Check the rows of a tensor table without its meshes."""
    paths: set[tuple[str, ...]] = set()
    for index, row in enumerate(table):
        name = _RowName(where, index, row)
        if not row.path:
            report(f"{name}: the path is empty")
        if row.path in paths:
            report(f"{name}: the path appears twice")
        paths.add(row.path)
        dtype = DTYPES.get(row.dtype)
        if dtype is None:
            report(f"{name}: unknown dtype {quote(row.dtype)}")
        if row.shape and min(row.shape) < 0:
            report(f"{name}: negative number in shape {quote(row.shape)}")
        elif bounded_product(row.shape, MAX_INT // (dtype.itemsize if dtype else 1)) is None:
            report(f"{name}: no tensor can have the shape {quote(row.shape)}")
        if (row.placements is None) != (row.mesh is None):
            report(f"{name}: placements and mesh go together")
        for placement in row.placements or ():
            _check_placement(placement, len(row.shape), name, report)
        if row.private and row.placements is not None:
            report(f"{name}: a private tensor has no placements")
        if row.alias_of is not None:
            _check_alias(table, index, name, report)


def check_table_meshes(
    table: Sequence[TensorRow], num_axes: Sequence[int], where: str, report: Report
) -> None:
    """Check that rows refer to meshes that exist: `num_axes` has the number of axes of each."""
    for index, row in enumerate(table):
        if row.mesh is None:
            continue
        name = _RowName(where, index, row)
        if not 0 <= row.mesh < len(num_axes):
            report(f"{name}: mesh {quote(row.mesh)} of {len(num_axes)} meshes")
        elif row.placements is not None and len(row.placements) != num_axes[row.mesh]:
            report(f"{name}: {len(row.placements)} placements on {num_axes[row.mesh]} mesh axes")


def check_pieces(
    table: Sequence[TensorRow],
    pieces: Sequence[TensorPiece],
    report: Report,
    elsewhere: Collection[int] = (),
) -> None:
    """Check that each piece is a box inside its tensor, with a key of its own and a digest.

    Those of the rows `elsewhere` are in other files, and have no key.
    """
    if len(pieces) != len(table):
        report(f"{len(pieces)} pieces for {len(table)} tensors")
        return
    keys: set[str] = set()
    for index, (row, piece) in enumerate(zip(table, pieces, strict=True)):
        name = _RowName("pieces", index, row)
        if not len(piece.offsets) == len(piece.sizes) == len(row.shape):
            report(f"{name}: offsets, sizes and shape differ in length")
        else:
            for offset, size, extent in zip(piece.offsets, piece.sizes, row.shape, strict=True):
                if offset < 0 or size < 0 or offset + size > extent:
                    report(
                        f"{name}: offsets {quote(piece.offsets)} and sizes {quote(piece.sizes)}"
                        f" are not inside shape {quote(row.shape)}"
                    )
                    break
            if row.placements is None and row.alias_of is None and piece.sizes != row.shape:
                report(f"{name}: a plain tensor is stored whole, not {quote(piece.sizes)} of it")
        if not piece.device:
            report(f"{name}: device is empty")
        if row.alias_of is not None:
            if piece.key or piece.digest:
                report(f"{name}: an alias has neither key nor digest")
            continue
        if index in elsewhere:
            if piece.key:
                report(f"{name}: it is in another file and has a key in this one")
        else:
            if piece.key in ("", "__metadata__"):
                report(f"{name}: the key {quote(piece.key)} is reserved")
            if piece.key in keys:
                report(f"{name}: the key appears twice")
            keys.add(piece.key)
        if not is_digest(piece.digest):
            report(f"{name}: {quote(piece.digest)} is no digest")


def _check_placement(placement: Placement, num_dims: int, name: _RowName, report: Report) -> None:
    dim, factor = placement.dim, placement.split_factor
    if placement.type == "Replicate":
        is_good = dim is None and factor is None
    elif placement.type == "Shard":
        is_good = dim is not None and 0 <= dim < num_dims and factor is None
    elif placement.type == "_StridedShard":
        is_good = dim is not None and 0 <= dim < num_dims and factor is not None
        is_good = is_good and factor is not None and 1 <= factor <= MAX_INT
    else:
        report(f"{name}: unknown placement kind {quote(placement.type)}")
        return
    if not is_good:
        shown = f"{placement.type}(dim={dim}, split_factor={factor})"
        report(f"{name}: {quote(shown)} cannot place a tensor of {num_dims} dims")


def _check_alias(table: Sequence[TensorRow], index: int, name: _RowName, report: Report) -> None:
    row = table[index]
    if row.alias_of is None or not 0 <= row.alias_of < index:
        report(f"{name}: alias of row {quote(row.alias_of)}, which is no earlier row")
        return
    owner = table[row.alias_of]
    if owner.alias_of is not None:
        report(f"{name}: alias of row {row.alias_of}, which is an alias itself")
    facts = (owner.dtype, owner.shape, owner.placements, owner.mesh)
    if facts != (row.dtype, row.shape, row.placements, row.mesh):
        report(f"{name}: alias of row {row.alias_of}, which is another kind of tensor")
