"""Portions of a state are the bytes of its file, whatever their borders, strides and dtypes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from shardstore.format.layout import plan_layout
from shardstore.state.flatten import flatten_state
from shardstore.state.portions import PortionReader, PortionWriter, blocks
from shardstore.state.staging import stage, views


def _state(rng: random.Random) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tied = noise(7, 3)
    state = {
        "wide": noise(37, 11).double(),
        "half": noise(65).bfloat16(),
        "column": noise(9, 5).t(),
        "cube": noise(4, 6, 5, 2).permute(3, 0, 2, 1),
        "steps": noise(20, 30)[::3, 1::2],
        "expanded": noise(1, 5).expand(4, 5),
        "conj": torch.complex(noise(5, 4), noise(5, 4)).conj(),
        "neg": torch.complex(noise(5), noise(5)).conj().imag,
        "scalar": noise(1)[0],
        "empty": noise(0, 3),
        "flags": noise(33) > 0,
        "bytes": torch.arange(251, dtype=torch.uint8)[::2],
        "fp8": noise(19).to(torch.float8_e4m3fn),
        "tied": tied,
        "again": tied,
    }
    names = list(state)
    rng.shuffle(names)
    return {name: state[name] for name in names}


@pytest.mark.parametrize("seed", range(30))
def test_portions_are_the_bytes_that_staging_copies_and_fill_the_same_tensors(seed: int) -> None:
    rng = random.Random(seed)
    state = _state(rng)
    flat = flatten_state(state, rank=0)
    layout = plan_layout(flat.table, flat.pieces, 100)
    whole = bytearray(layout.nbytes)
    stage(flat, views(memoryview(whole), layout, flat.table, flat.pieces))

    borders = [layout.data_start]
    while borders[-1] < layout.nbytes:
        borders.append(min(borders[-1] + 16 * rng.randrange(1, 60), layout.nbytes))
    reader = PortionReader(flat, layout)
    got = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for start, stop in itertools.pairwise(borders):
        reader.copy(start, stop, got[start:stop])
    assert got.numpy().tobytes()[layout.data_start :] == bytes(whole[layout.data_start :])

    owners = [i for i, row in enumerate(flat.table) if row.alias_of is None]
    live = {
        i: [torch.zeros_like(flat.tensors[i].resolve_conj().resolve_neg())]
        for i in owners
        if flat.table[i].path != ("expanded",)
    }
    column = next(i for i in owners if flat.table[i].path == ("column",))
    live[column].append(torch.zeros(9, 5).t())
    writer = PortionWriter(live, layout)
    for start, stop in itertools.pairwise(borders):
        part = torch.frombuffer(bytearray(whole[start:stop]), dtype=torch.uint8)
        writer.copy(start, stop, part)
    for i, targets in live.items():
        for target in targets:
            want = flat.tensors[i].resolve_conj().resolve_neg().contiguous().reshape(-1)
            assert torch.equal(
                target.contiguous().reshape(-1).view(torch.uint8), want.view(torch.uint8)
            ), flat.table[i].path


@pytest.mark.parametrize("seed", range(20))
def test_blocks_cut_any_range_of_any_strides_and_copy_nothing(seed: int) -> None:
    rng = random.Random(seed)
    shape = [rng.randrange(1, 6) for _ in range(rng.randrange(1, 5))]
    base = torch.arange(4 * torch.Size(shape).numel())
    order = rng.sample(range(len(shape)), len(shape))
    tensor = base[: torch.Size(shape).numel()].view([shape[i] for i in order])
    tensor = tensor.permute([order.index(i) for i in range(len(shape))])
    flat = tensor.reshape(-1)
    start = rng.randrange(flat.numel())
    stop = rng.randrange(start, flat.numel()) + 1
    position = 0
    for block, at in blocks(tensor, start, stop):
        assert at == position
        assert block.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        assert block.reshape(-1).tolist() == flat[start + at : start + at + block.numel()].tolist()
        position += block.numel()
    assert position == stop - start
