"""Snapshots of each format version, kept in git: what is written today must be readable for ever.

`python -m tests.compat.test_golden` writes the one of the current version anew; do that only together
with a new FORMAT_VERSION.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardstore import SnapshotStore, list_snapshots
from shardstore.format.records import FORMAT_VERSION

GOLDEN = Path(__file__).parent / "golden"


def _state() -> dict[str, Any]:
    """Every kind of thing that a file can hold, with values that need no random numbers."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    with torch.no_grad():
        for number, tensor in enumerate([*model.parameters(), *model.buffers()]):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 10 * number)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = {
        "bf16": torch.arange(3).to(torch.bfloat16),
        "fp8": torch.arange(3).float().to(torch.float8_e4m3fn),
        "c64": torch.tensor([1 + 2j, 3 - 4j]),
        "c128": torch.tensor([1 + 2j], dtype=torch.complex128),
        "scalar": torch.tensor(7),
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 4),
    }
    leaves = {
        "step": 3, "loss": 0.1, "name": "ü", "none": None, "inf": float("inf"), "raw": b"\x00\xff",
        "pair": (1, [2, {"k": 3}]), 5: "int key", "long": b"z" * 300, "big": 1 << 80,
    }  # fmt: skip
    return {"model": model, "optimizer": optimizer, "tensors": tensors, "leaves": leaves}


def _flat(state: dict[str, Any]) -> list[Any]:
    found: list[Any] = [
        t.detach() for t in [*state["model"].parameters(), *state["model"].buffers()]
    ]
    for parameter in state["model"].parameters():
        found += [state["optimizer"].state[parameter][k] for k in ("step", "exp_avg", "exp_avg_sq")]
    found += state["tensors"].values()
    return found


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_a_snapshot_of_every_format_version_restores_exactly(version: int, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(GOLDEN / f"v{version}", root)
    expected, live = _state(), _state()
    for tensor in _flat(live):
        tensor.view(torch.uint8).fill_(0) if tensor.is_complex() else tensor.zero_()
    live["leaves"].clear()
    with SnapshotStore(root, memory=0) as store:
        report = store.restore(live)
    assert (report.step, report.metadata) == (3, {"made": "golden"})
    for one, other in zip(_flat(expected), _flat(live), strict=True):
        assert one.dtype == other.dtype
        assert (
            one.reshape(-1).view(torch.uint8).tolist()
            == other.reshape(-1).view(torch.uint8).tolist()
        )
    assert live["leaves"] == expected["leaves"]
    assert [type(v) for v in live["leaves"].values()] == [
        type(v) for v in expected["leaves"].values()
    ]
    assert [info.step for info in list_snapshots(GOLDEN / f"v{version}")] == [3]


if __name__ == "__main__":
    target = GOLDEN / f"v{FORMAT_VERSION}"
    shutil.rmtree(target, ignore_errors=True)
    with SnapshotStore(target, memory=0) as golden:
        golden.save(_state(), step=3, metadata={"made": "golden"})
