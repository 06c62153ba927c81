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


def measure(label: str, state: Mapping[str, object], folder: Path, runs: int) -> None:
    """Print microseconds per tensor."""
    blocked, committed = [], []
    with SnapshotStore(folder / "root", memory="64MiB", keep=2) as store:
        for step in range(runs + 3):
            started = time.perf_counter()
            snapshot = store.save(state, step=step)
            blocked.append(time.perf_counter() - started)
            snapshot.wait()
            committed.append(time.perf_counter() - started)
        report = store.restore(state)
    figures = {
        "first save": blocked[0],
        "save": statistics.median(blocked[3:]),
        "until committed": statistics.median(committed[3:]),
        "restore": report.duration_s,
    }
    print(
        f"{label}: " + ", ".join(f"{k} {v / NUM_TENSORS * 1e6:.1f} us" for k, v in figures.items())
    )


def headers(num_ranks: int) -> dict[int, tuple[ShardHeader, int, str]]:
    """Headers of an FSDP job, as rank 0 has them at the commit."""
    mesh = Mesh((num_ranks,), ("fsdp",), "cuda", tuple(range(num_ranks)))
    table = tuple(
        TensorRow(("model", f"layers.{i}.weight"), "bfloat16", (num_ranks, 64), (Placement("Shard", 0),), 0)
        for i in range(NUM_TENSORS)
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


def many_ranks(folder: Path, num_snapshots: int) -> None:
    """Print size and time of a manifest, and the time of listing many."""
    found = headers(NUM_RANKS)
    started = time.perf_counter()
    manifest = build_manifest(found, created=0.0, metadata=None, writer={})
    data = encode_manifest(manifest)
    built_s = time.perf_counter() - started
    started = time.perf_counter()
    assert decode_manifest(data, source="here", expect=None) == manifest
    read_s = time.perf_counter() - started
    print(
        f"manifest of {NUM_RANKS} ranks x {NUM_TENSORS} tensors: {len(data) / 1e6:.1f} MB, "
        f"built in {built_s:.2f} s, read and checked in {read_s:.2f} s"
    )
    root = folder / "many"
    with SnapshotStore(root, memory=0) as store:
        for step in range(num_snapshots):
            store.save({"w": torch.zeros(10)}, step=step).wait()
        catalog = Catalog(DiskTier(str(root), name="root", ops=FileOps()))
        started = time.perf_counter()
        assert len(catalog.committed()) == num_snapshots
        print(f"listing {num_snapshots} snapshots: {time.perf_counter() - started:.2f} s")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, help="of no meaning here", default=0)
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="shardstore-benchmark-"))
    try:
        measure("plain tensors", plain(), folder / "plain", options.runs)
        measure("module and AdamW", trained(), folder / "trained", options.runs)
        many_ranks(folder, NUM_SNAPSHOTS if options.runs > 1 else 20)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
