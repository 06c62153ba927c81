"""Thousands of tensors in a process that may open few files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PROCESS = """
import json, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from shardstore import SnapshotStore

root, memory_dir, memory, saves = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] == "save"
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[5]}", rank=0, world_size=1)

class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.full((3,), -1.0)) for _ in range(5000)])

model = Many()
fully_shard(model, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
seen = lambda: [p.to_local().tolist() for p in model.parameters()]
most = [0]
store = SnapshotStore(root, memory=memory, memory_dir=memory_dir, timeout_s=60)
report = None
if saves:
    for step in (1, 2, 3):
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.to_local().fill_(i + step / 4)
        store.save({"model": model}, step=step)
        most[0] = max(most[0], len(os.listdir("/proc/self/fd")))
    store.drain()
    step = 3
else:
    report = store.restore({"model": model})
    step = report.step
most[0] = max(most[0], len(os.listdir("/proc/self/fd")))
same = seen() == [[i + step / 4] * 3 for i in range(5000)]
found = {"step": step, "same": same, "num_open": most[0], "tier": report and report.tier,
         "num_tensors": report and report.num_tensors, "limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}
store.close(keep_memory=True)
torch.distributed.destroy_process_group()
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["64MiB", "0"])
def test_five_thousand_tensors_need_a_handful_of_descriptors(
    disk_folder: Path, folder: str, memory: str
) -> None:
    """Saved in one process, restored in the next: from memory, then from the root; all below 256."""

    def run(memory: str, what: str) -> dict[str, object]:
        meeting = disk_folder / f"meeting-{what}-{memory}"
        done = subprocess.run(
            [sys.executable, "-c", _PROCESS, str(disk_folder / "root"), folder, memory, what, str(meeting)],
            capture_output=True, text=True, timeout=50, check=False, cwd=_ROOT,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        return found

    saved = run(memory, "save")
    restored = run(memory, "restore")
    from_root = run("0", "restore")
    for found in (saved, restored, from_root):
        assert (found["step"], found["same"], found["limit"]) == (3, True, 256)
        assert isinstance(found["num_open"], int)
        assert found["num_open"] < 64, found
    tier = "memory (1 rank)" if memory != "0" else "root (1 rank)"
    assert (restored["tier"], restored["num_tensors"]) == (tier, 5000)
    assert from_root["tier"] == "root (1 rank)"
