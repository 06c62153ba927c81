"""What 10,000 tiny tensors cost beyond their bytes, and how large a manifest of many ranks is.

python -m benchmarks.bookkeeping
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from benchmarks.children import call
from benchmarks.table import Table
from shardstore import SnapshotStore
from shardstore.engine.catalog import Catalog
from shardstore.format.digests import table_digest
from shardstore.format.manifest import build_manifest, decode_manifest, encode_manifest
from shardstore.format.records import Mesh, Placement, ShardHeader, TensorRow
from shardstore.tiers.disk import DiskTier
from shardstore.tiers.fileops import FileOps

NUM_TENSORS = 10_000
NUM_RANKS = 4096
NUM_SNAPSHOTS = 1000


def plain() -> Mapping[str, object]:
    """Tensors in a dict."""
    return {f"t{i}": torch.full((1 + i % 3,), float(i)) for i in range(NUM_TENSORS)}


def trained() -> Mapping[str, object]:
    """A module and its optimizer, 10,000 tensors together."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(NUM_TENSORS // 4)])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model:
        parameter.grad = torch.zeros(3)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def measure(state: Mapping[str, object], folder: Path) -> dict[str, float]:
    """Seconds of the first save of a process and store, of a later one, and of a restore."""
    with SnapshotStore(folder, memory="64MiB", keep=2) as store:
        blocked, committed = [], []
        for step in range(6):
            started = time.perf_counter()
            snapshot = store.save(state, step=step)
            blocked.append(time.perf_counter() - started)
            snapshot.wait()
            committed.append(time.perf_counter() - started)
        restored_s = store.restore(state).duration_s
    return {
        "first save": blocked[0],
        "save": statistics.median(blocked[3:]),
        "until committed": statistics.median(committed[3:]),
        "restore": restored_s,
    }


def _measure_plain(folder: Path) -> dict[str, float]:
    return measure(plain(), folder)


def _measure_trained(folder: Path) -> dict[str, float]:
    return measure(trained(), folder)


def headers(num_ranks: int, num_tensors: int) -> dict[int, tuple[ShardHeader, int, str]]:
    """Headers of an FSDP job, as rank 0 has them at the commit."""
    mesh = Mesh((num_ranks,), ("fsdp",), "cuda", tuple(range(num_ranks)))
    table = tuple(
        TensorRow(("model", f"layers.{i}.weight"), "bfloat16", (num_ranks, 64), (Placement("Shard", 0),), 0)
        for i in range(num_tensors)
    )  # fmt: skip
    digest = table_digest(table)
    return {
        rank: (
            ShardHeader(
                format=1, step=1, run=1, count=1, nonce="00000000", rank=rank, world_size=num_ranks,
                created=0.0, host=f"host-{rank // 8}", persist=True, meshes=(mesh,),
                coordinates=((rank,),), table=table, table_digest=digest, pieces=(), leaves=None,
                metadata=None, writer={},
            ),
            1 << 30,
            f"{rank:032x}",
        )
        for rank in range(num_ranks)
    }  # fmt: skip


def many_ranks(table: Table, folder: Path, num_snapshots: int) -> None:
    """Add size and time of a manifest of many ranks, and the time of listing many snapshots."""
    whole = f"bookkeeping, manifest of {NUM_RANKS} ranks x {NUM_TENSORS} tensors"
    started = time.perf_counter()
    manifest = build_manifest(
        headers(NUM_RANKS, NUM_TENSORS), created=0.0, metadata=None, writer={}
    )
    data = encode_manifest(manifest)
    table.add(f"{whole}: built", (time.perf_counter() - started) * 1e3, "ms")
    started = time.perf_counter()
    assert decode_manifest(data, source="here", expect=None) == manifest
    table.add(f"{whole}: read and checked", (time.perf_counter() - started) * 1e3, "ms")
    table.add(whole, len(data) / 1e6, "MB")
    parts = 0
    for num_ranks, num_tensors in ((NUM_RANKS, 1), (1, NUM_TENSORS)):
        found = headers(num_ranks, num_tensors)
        part = build_manifest(found, created=0.0, metadata=None, writer={})
        parts += len(encode_manifest(part))
    table.add(f"bookkeeping, manifests of {NUM_RANKS} x 1 and 1 x {NUM_TENSORS}", parts / 1e6, "MB")
    root = folder / "many"
    with SnapshotStore(root, memory=0) as store:
        for step in range(num_snapshots):
            store.save({"w": torch.zeros(10)}, step=step).wait()
        catalog = Catalog(DiskTier(str(root), name="root", ops=FileOps()))
        started = time.perf_counter()
        assert len(catalog.committed()) == num_snapshots
        listed_s = time.perf_counter() - started
    table.add(f"bookkeeping, {num_snapshots} snapshots listed", listed_s * 1e3, "ms")


def bookkeeping(table: Table, folder: Path) -> None:
    """Fill all rows; each run of each state in a process of its own."""
    for run in range(table.runs):
        for label, of_state in (
            ("plain tensors", _measure_plain),
            ("module and AdamW", _measure_trained),
        ):
            for name, seconds in call(of_state, folder / f"{label}-{run}").items():
                table.add(f"bookkeeping, {label}: {name}", seconds / NUM_TENSORS * 1e6, "us")
    many_ranks(table, folder, NUM_SNAPSHOTS if table.runs > 1 else 20)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="shardstore-benchmark-"))
    table = Table(f"{NUM_TENSORS:,} tensors", 0, options.runs)
    try:
        bookkeeping(table, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, row in table.rows.items():
        print(f"{name:66} {statistics.median(row.values):8.2f} {row.unit}")


if __name__ == "__main__":
    main()
