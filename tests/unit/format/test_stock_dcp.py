"""Stock PyTorch loads our files, and reshards them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import load

from shardstore.format.manifest import shard_file_name
from tests.unit.format.builders import sharded_file

READER = getattr(dcp, "HuggingFaceStorageReader", None)


@pytest.mark.skipif(READER is None, reason="this torch has no public safetensors reader")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_checkpoint_reader_assembles_the_shards_of_two_ranks(tmp_path: Path) -> None:
    parts = []
    for rank in (0, 1):
        file = sharded_file(rank)
        (tmp_path / shard_file_name(rank)).write_bytes(file.data)
        start, end = file.layout.spans[0]
        raw = torch.frombuffer(bytearray(file.data[start:end]), dtype=torch.bfloat16)
        parts.append(raw.reshape(-1, 3))
    weight, steps = torch.zeros(5, 3, dtype=torch.bfloat16), torch.zeros((), dtype=torch.int64)
    target = {"model": {"weight": weight, "steps": steps}}
    assert READER is not None
    load(target, storage_reader=READER(str(tmp_path)), no_dist=True)
    assert torch.equal(weight.view(torch.int16), torch.cat(parts).view(torch.int16))
    assert int(steps) == int.from_bytes(bytes(range(8)), "little")
