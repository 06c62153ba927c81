"""Digests are checked whatever the portions in which a file comes."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch

from shardstore.engine.sealed import SealedShard, read_sealed_header
from shardstore.engine.verify import Verifier
from shardstore.errors import CorruptSnapshotError
from shardstore.tiers.base import ShardReader


class FileInMemory:
    """A shard file as bytes."""

    tier = "root"
    source = "rank-00000.safetensors"
    may_differ_again = False
    chunk_bytes = 30_000

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.nbytes = len(data)

    def read(self, start: int, stop: int) -> bytes:
        return self.data[start:stop]


@pytest.fixture
def shard(tmp_path: Any) -> tuple[SealedShard, ShardReader, bytes]:
    """A real file with large, small, empty and shared tensors."""
    from shardstore import SnapshotStore

    shared = torch.arange(500.0)
    state = {
        "large": torch.arange(70_000, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "byte": torch.tensor([1], dtype=torch.uint8),
        "shared": shared,
        "again": shared,
        **{f"t{i}": torch.full((i,), float(i)) for i in range(40)},
    }
    with SnapshotStore(tmp_path / "root", memory=0) as store:
        store.save(state, step=1).wait()
    data = next((tmp_path / "root").rglob("*.safetensors")).read_bytes()
    reader: Any = FileInMemory(data)
    return read_sealed_header(reader), reader, data


def _owners(sealed: SealedShard) -> list[int]:
    return [i for i, row in enumerate(sealed.header.table) if row.alias_of is None]


def _feed(verifier: Verifier, data: memoryview, portion: int) -> None:
    for position in range(0, len(data), portion):
        verifier.feed(data[position : position + portion], position)


@pytest.mark.parametrize("seed", range(8))
def test_any_portions_verify_and_report_each_byte_once(
    shard: tuple[SealedShard, ShardReader, bytes], seed: int
) -> None:
    sealed, reader, data = shard
    rng = random.Random(seed)
    needed = [i for i in _owners(sealed) if rng.random() < 0.7] if seed else _owners(sealed)
    assert sealed.layout is not None
    done: list[int] = []
    verifier = Verifier(sealed, needed, reader, done.append)
    position = rng.choice([0, sealed.layout.data_start])
    while position < len(data):
        end = min(len(data), position + rng.choice([1, 7, 4096, 100_000, len(data)]) * 3)
        verifier.feed(memoryview(data)[position:end], position)
        position = end
    verifier.finish()
    spans = sealed.layout.spans
    assert sum(done) == sum(spans[i][1] - spans[i][0] for i in needed)


@pytest.mark.parametrize("portion", [10_000, 1 << 30])
def test_one_wrong_bit_in_any_tensor_is_found_and_named(
    shard: tuple[SealedShard, ShardReader, bytes], portion: int
) -> None:
    sealed, reader, data = shard
    assert sealed.layout is not None
    for index in _owners(sealed):
        start, stop = sealed.layout.spans[index]
        if start == stop:
            continue
        broken = bytearray(data)
        broken[(start + stop) // 2] ^= 1
        verifier = Verifier(sealed, _owners(sealed), reader, lambda _: None)
        name = ".".join(sealed.header.table[index].path)
        with pytest.raises(CorruptSnapshotError, match=f"tensor {name} of rank 0 is damaged"):
            _feed(verifier, memoryview(broken), portion)


def test_a_file_that_ends_early_is_truncated(
    shard: tuple[SealedShard, ShardReader, bytes],
) -> None:
    sealed, reader, data = shard
    verifier = Verifier(sealed, _owners(sealed), reader, lambda _: None)
    _feed(verifier, memoryview(data)[:-1], 4096)
    with pytest.raises(CorruptSnapshotError, match="is truncated: tensor byte is not whole"):
        verifier.finish()


@pytest.mark.parametrize("is_bad_again", [False, True])
def test_bytes_that_came_damaged_from_afar_are_read_once_more(
    shard: tuple[SealedShard, ShardReader, bytes], is_bad_again: bool
) -> None:
    sealed, _, data = shard
    assert sealed.layout is not None
    spans = sealed.layout.spans
    start, stop = max((spans[i] for i in _owners(sealed)), key=lambda span: span[1] - span[0])
    broken = bytearray(data)
    broken[(start + stop) // 2] ^= 1
    reader: Any = FileInMemory(bytes(broken) if is_bad_again else data)
    reader.may_differ_again = True
    arrived = bytearray(broken)
    replaced: list[int] = []

    def replace(part: memoryview, at: int) -> None:
        arrived[at : at + len(part)] = part
        replaced.append(len(part))

    verifier = Verifier(sealed, _owners(sealed), reader, lambda _: None, replace)
    if is_bad_again:
        with pytest.raises(CorruptSnapshotError, match="is damaged"):
            _feed(verifier, memoryview(broken), 10_000)
    else:
        _feed(verifier, memoryview(broken), 10_000)
        verifier.finish()
        assert bytes(arrived) == data
    assert sum(replaced) == stop - start


def test_what_is_verified_is_let_go_of_at_once(
    shard: tuple[SealedShard, ShardReader, bytes],
) -> None:
    sealed, reader, data = shard

    class Target:
        """Stands for live state."""

        def fill(self, _part: memoryview, _at: int) -> None:
            pass

    target = Target()
    gone = weakref.ref(target)
    verifier = Verifier(sealed, _owners(sealed), reader, lambda _: None, target.fill)
    _feed(verifier, memoryview(data), 10_000)
    verifier.finish()
    gc.disable()
    try:
        del verifier, target
        assert gone() is None
    finally:
        gc.enable()
