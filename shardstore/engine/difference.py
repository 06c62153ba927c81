"""How two stored snapshots differ: topology, tensors by name, shape, dtype and bytes, leaves, metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from shardstore.engine.bytediff import StoredPiece, count_differing, count_differing_in_overlap
from shardstore.engine.catalog import Catalog
from shardstore.engine.holders import StoredFiles
from shardstore.engine.treediff import ValueDifference, differing_json, differing_leaves
from shardstore.errors import CorruptSnapshotError
from shardstore.format.dtypes import DTYPES
from shardstore.format.records import Manifest, Mesh, SnapshotId, TensorRow
from shardstore.format.slices import TensorSlice, overlap

Kind = Literal["only_a", "only_b", "dtype", "shape", "bytes"]


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor that is not the same in both."""

    name: str
    kind: Kind
    a: str = ""
    """Its dtype and shape there."""
    b: str = ""
    differing_bytes: int = 0
    total_bytes: int = 0
    """Stored bytes that were compared, each rank's copy by itself."""
    ranks: tuple[int, ...] = ()
    """Whose pieces differ."""


@dataclass(slots=True)
class Difference:
    """All differences of two snapshots."""

    topology: list[str] = field(default_factory=list)
    tensors: list[TensorDifference] = field(default_factory=list)
    num_equal: int = 0
    """Tensors that are the same in both."""
    leaves: list[ValueDifference] = field(default_factory=list)
    metadata: list[ValueDifference] = field(default_factory=list)

    @property
    def is_none(self) -> bool:
        """Whether the two are the same."""
        return not (self.topology or self.tensors or self.leaves or self.metadata)


@dataclass(slots=True)
class _Tensor:
    """One tensor of one snapshot, on all ranks."""

    is_global: bool
    world_size: int
    rows: dict[int, TensorRow] = field(default_factory=dict)
    pieces: dict[int, StoredPiece] = field(default_factory=dict)

    def describe(self) -> str:
        texts = {f"{row.dtype} {list(row.shape)}" for row in self.rows.values()}
        return " or ".join(sorted(texts))


@dataclass(slots=True)
class _Side:
    manifest: Manifest
    tensors: dict[str, _Tensor]
    leaves: dict[int, object]


@dataclass(slots=True)
class _Comparison:
    """What has to be read for one tensor."""

    name: str
    texts: tuple[str, str]
    pairs: list[tuple[StoredPiece, StoredPiece]]
    total_bytes: int
    is_resharded: bool

    @property
    def read_bytes(self) -> int:
        return sum(a.nbytes for a, _ in self.pairs)


def compare_snapshots(
    a: tuple[Catalog, SnapshotId],
    b: tuple[Catalog, SnapshotId],
    *,
    begin: Callable[[int], None],
    progress: Callable[[int], None],
) -> Difference:
    """Compare two committed snapshots, of one root or of two. Only what has other digests is read.

    Args:
        a: Where the one is, and which.
        b: The other.
        begin: Called once, with how many bytes will be read of `a`.
        progress: Called with numbers of these bytes.

    Raises:
        CorruptSnapshotError, FormatError, TierError: One of them is damaged or cannot be read.
    """
    left, right = _read(*a), _read(*b)
    found = Difference(topology=_topology(left.manifest, right.manifest))
    found.metadata = differing_json(left.manifest.metadata, right.manifest.metadata)
    found.leaves = _leaves(left, right)
    work: list[_Comparison] = []
    for name in [*left.tensors, *(n for n in right.tensors if n not in left.tensors)]:
        _compare_rows(name, left.tensors.get(name), right.tensors.get(name), found, work)
    begin(sum(comparison.read_bytes for comparison in work))
    for comparison in work:
        _compare_bytes(comparison, found, progress)
    return found


def _read(catalog: Catalog, snapshot_id: SnapshotId) -> _Side:
    entry = catalog.entry(snapshot_id)
    if entry.manifest is None or entry.state != "committed":
        raise CorruptSnapshotError(
            f"{snapshot_id} is {entry.state}, not a committed snapshot. {entry.problem}".rstrip(),
            tier=catalog.tier.name, file="manifest.json",
        )  # fmt: skip
    tensors: dict[str, _Tensor] = {}
    leaves: dict[int, object] = {}
    files = StoredFiles(catalog.tier, entry.manifest)
    for rank in range(entry.manifest.world_size):
        header, places = files.read(rank)
        leaves[rank] = header.leaves
        for index, row in enumerate(header.table):
            stored = index if row.alias_of is None else row.alias_of
            piece, (holder, start, stop) = header.pieces[stored], places[stored]
            name = ".".join(row.path)
            tensor = tensors.setdefault(name, _Tensor(row.mesh is not None, header.world_size))
            tensor.rows[rank] = row
            tensor.pieces[rank] = StoredPiece(
                catalog.tier, snapshot_id, rank, start, stop,
                TensorSlice(piece.offsets, piece.sizes), DTYPES[row.dtype].itemsize, piece.digest, name,
                holder,
            )  # fmt: skip
    return _Side(entry.manifest, tensors, leaves)


def _topology(a: Manifest, b: Manifest) -> list[str]:
    found = []
    if a.world_size != b.world_size:
        found.append(f"world size is {a.world_size} in A and {b.world_size} in B")
    if set(a.meshes) != set(b.meshes):
        found.append(f"meshes are {_meshes(a.meshes)} in A and {_meshes(b.meshes)} in B")
    return found


def _meshes(meshes: Iterable[Mesh]) -> str:
    return ", ".join(describe_mesh(mesh) for mesh in meshes) or "none"


def describe_mesh(mesh: Mesh) -> str:
    """One mesh in a few words: `dp 2 x tp 4 (cuda)`."""
    names = mesh.axis_names or ("",) * len(mesh.shape)
    axes = (f"{name} {size}".strip() for name, size in zip(names, mesh.shape, strict=False))
    return f"{' x '.join(axes)} ({mesh.device_type})"


def _leaves(left: _Side, right: _Side) -> list[ValueDifference]:
    """Differing leaves of the ranks that both have; what is equal on several ranks is said once."""
    ranks_of: dict[tuple[str, str | None, str | None], list[int]] = {}
    for rank in sorted(left.leaves.keys() & right.leaves.keys()):
        for one in differing_leaves(left.leaves[rank], right.leaves[rank]):
            ranks_of.setdefault((one.path, one.a, one.b), []).append(rank)
    return [ValueDifference(*key, ranks=tuple(ranks)) for key, ranks in ranks_of.items()]


def _compare_rows(
    name: str,
    left: _Tensor | None,
    right: _Tensor | None,
    found: Difference,
    work: list[_Comparison],
) -> None:
    """Compare what needs no bytes, and note what does."""
    if left is None or right is None:
        there = left or right
        assert there is not None
        _note_only(name, there, tuple(sorted(there.rows)), found, in_a=right is None)
        return
    is_global = left.is_global or right.is_global
    common = sorted(left.rows.keys() & right.rows.keys())
    if is_global:  # every rank says the same of it
        firsts = [(left.rows[min(left.rows)], right.rows[min(right.rows)], common)]
    else:
        firsts = [(left.rows[rank], right.rows[rank], [rank]) for rank in common]
    texts = left.describe(), right.describe()
    kinds: tuple[Kind, ...] = ("dtype", "shape")
    for kind in kinds:
        differing = [m for x, y, m in firsts if getattr(x, kind) != getattr(y, kind)]
        if differing:
            ranks = tuple(rank for members in differing for rank in members)
            found.tensors.append(TensorDifference(name, kind, *texts, ranks=ranks))
            return
    boxes = [{rank: piece.box for rank, piece in side.pieces.items()} for side in (left, right)]
    if is_global and boxes[0] != boxes[1]:
        pairs = _overlapping(_distinct(left), _distinct(right))
        total = sum(piece.nbytes for piece in _distinct(left))
    else:
        both = [(left.pieces[rank], right.pieces[rank]) for rank in common]
        pairs = [(x, y) for x, y in both if x.digest != y.digest]
        total = sum(x.nbytes for x, _ in both)
    if pairs:
        work.append(
            _Comparison(name, texts, pairs, total, is_resharded=boxes[0] != boxes[1] and is_global)
        )
    elif _is_on_other_ranks(name, left, right, found):
        return
    else:
        found.num_equal += 1


def _is_on_other_ranks(name: str, left: _Tensor, right: _Tensor, found: Difference) -> bool:
    """Note ranks of both jobs that have a plain tensor in one snapshot only."""
    if left.is_global or right.is_global:
        return False
    before = len(found.tensors)
    for there, other, in_a in ((left, right, True), (right, left, False)):
        ranks = tuple(r for r in sorted(there.rows) if r not in other.rows and r < other.world_size)
        if ranks:
            _note_only(name, there, ranks, found, in_a=in_a)
    return len(found.tensors) > before


def _note_only(
    name: str, tensor: _Tensor, ranks: tuple[int, ...], found: Difference, *, in_a: bool
) -> None:
    kind: Kind = "only_a" if in_a else "only_b"
    text = tensor.describe()
    texts = (text, "") if in_a else ("", text)
    found.tensors.append(TensorDifference(name, kind, *texts, ranks=ranks))


def _distinct(tensor: _Tensor) -> list[StoredPiece]:
    """One piece for each box and content: replicas are left out, unless they differ."""
    found: dict[tuple[TensorSlice, str], StoredPiece] = {}
    for _, piece in sorted(tensor.pieces.items()):
        found.setdefault((piece.box, piece.digest), piece)
    return [piece for piece in found.values() if piece.box.num_elements]


def _overlapping(
    left: list[StoredPiece], right: list[StoredPiece]
) -> list[tuple[StoredPiece, StoredPiece]]:
    return [(x, y) for x in left for y in right if overlap(x.box, y.box) is not None]


def _compare_bytes(
    comparison: _Comparison, found: Difference, progress: Callable[[int], None]
) -> None:
    differing, ranks = 0, []
    for a, b in comparison.pairs:
        if comparison.is_resharded:
            count = count_differing_in_overlap(a, b)
            progress(a.nbytes)
        else:
            count = count_differing(a, b, progress)
        differing += count
        if count:
            ranks.append(a.rank)
    if not differing:
        found.num_equal += 1
        return
    found.tensors.append(
        TensorDifference(
            comparison.name,
            "bytes",
            *comparison.texts,
            differing,
            comparison.total_bytes,
            tuple(sorted(set(ranks))),
        )
    )
