"""Real bug reports on shard shapes, memory layout and dtypes (C13 to C23)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.cases.bits import (
    Outcomes,
    assert_group_works,
    assert_refused,
    bits,
    local_of,
    refusal,
    soil,
)
from tests.faults.scenario import open_store
from tests.ranks import run_ranks


def _there_and_back(folder: str, state: dict[str, Any], **options: Any) -> bool:
    """Save, forget the memory copy, soil, restore; whether every byte came back."""
    saved = bits(state)
    store = open_store(folder, **options)
    store.save(state, step=1).wait(20)
    store.close()
    soil(state)
    store = open_store(folder, **options)
    store.restore(state)
    store.close()
    return bits(state) == saved


def _stored_nbytes(folder: str, rank: int) -> int:
    """Payload bytes of a rank's file."""
    data = next(Path(folder, "root").glob(f"step-*/rank-{rank:05d}.safetensors")).read_bytes()
    return len(data) - 8 - int.from_bytes(data[:8], "little")


def _fewer_rows_than_ranks(rank: int, folder: str) -> list[Any]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    found = []
    for size in (6, 5):
        own = Path(folder) / str(size)
        own.mkdir(exist_ok=True)
        tensor = distribute_tensor(torch.arange(size, dtype=torch.int32), mesh, [Shard(0)])
        equal = _there_and_back(str(own), {"w": tensor})
        local = local_of(tensor)
        found.append((local.tolist(), tuple(local.shape), local.dtype == torch.int32, equal))
    return found


def test_ranks_with_an_empty_piece_keep_its_shape_and_dtype(folder: str) -> None:
    """C13."""
    results = run_ranks(4, _fewer_rows_than_ranks, folder)
    assert [r[0][0] for r in results] == [[0, 1], [2, 3], [4, 5], []]
    assert [r[1][0] for r in results] == [[0, 1], [2, 3], [4], []]
    assert results[3][0][1] == results[3][1][1] == (0,)
    assert all(kept and equal for r in results for _, _, kept, equal in r)


def _empty_shard(rank: int, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    equal = _there_and_back(folder, {"model": model})
    shapes = [tuple(local_of(p).shape) for p in model.parameters()]
    return {"equal": equal, "shapes": shapes, "stored": _stored_nbytes(folder, rank)}


def _no_tensor_at_all(rank: int, folder: str) -> dict[str, Any]:
    state: dict[str, Any] = {"progress": {"epoch": 3 + rank}}
    if rank == 0:
        state["w"] = torch.arange(3.0)
    store = open_store(folder)
    store.save(state, step=1).wait(20)
    store.close()
    soil(state)
    state["progress"]["epoch"] = -1
    store = open_store(folder)
    store.restore(state)
    store.close()
    shard = next(Path(folder, "root").glob(f"step-*/rank-{rank:05d}.safetensors"))
    with safe_open(str(shard), "pt") as reader:
        keys = list(reader.keys())
    return {"keys": keys, "epoch": state["progress"]["epoch"]}


class _Coded(torch.Tensor):
    """A quantized tensor: int8 codes and a scale."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: type[_Coded], codes: torch.Tensor, scale: torch.Tensor) -> _Coded:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale = codes, scale
        coded: _Coded = made
        return coded

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def plain(x: Any) -> Any:
            return x.codes.float() * x.scale if isinstance(x, _Coded) else x

        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return _Coded(func(args[0].codes, *args[1:]), args[0].scale)
        return func(*[plain(a) for a in args], **(kwargs or {}))


def _coded() -> _Coded:
    return _Coded(torch.arange(4, dtype=torch.int8), torch.tensor(0.5))


def _quantized(rank: int, folder: str) -> list[Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    inside = DTensor.from_local(_coded(), mesh, [Shard(0)], run_check=False)
    assert type(inside._local_tensor) is _Coded
    states: list[dict[str, Any]] = [
        {"alone": _coded()},
        {"inside": inside},
        {"qint": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)},
    ]
    found = []
    for state in states:
        store = open_store(folder)
        found.append(refusal(lambda state=state, store=store: store.save(state, step=1)))  # type: ignore[misc]
        store.drain(20)  # every rank raised in its own save: nothing is left to tell
        assert store.snapshots() == []
        assert_group_works()
        store.close()
    return found


@pytest.fixture(scope="module")
def outcomes(shared_folder: str) -> Outcomes:
    return Outcomes(2, shared_folder, _empty_shard, _no_tensor_at_all, _quantized)


def test_an_empty_shard_under_fsdp_saves_and_restores(outcomes: Outcomes) -> None:
    """C14."""
    results = outcomes.of(_empty_shard)
    assert all(r["equal"] for r in results)
    assert [r["shapes"] for r in results] == [[(1, 5), (1,)], [(0, 5), (0,)]]
    assert results[0]["stored"] >= 24
    assert results[1]["stored"] == 0, "padding was written"


def test_a_rank_without_any_tensor_saves_and_restores(outcomes: Outcomes) -> None:
    """C15."""
    results = outcomes.of(_no_tensor_at_all)
    assert [r["epoch"] for r in results] == [3, 4]
    assert [len(r["keys"]) for r in results] == [1, 0]


def test_quantized_tensors_are_refused_with_class_and_key(outcomes: Outcomes) -> None:
    """C23."""
    results = outcomes.of(_quantized)
    for i, named in enumerate((("alone", "_Coded"), ("inside", "_Coded"), ("qint", "qint8"))):
        assert_refused([r[i] for r in results], *named, kind="UnsupportedStateError")


def test_tensors_without_dims_keep_their_shape(folder: str) -> None:
    """C16."""
    state: dict[str, Any] = {
        "step": torch.tensor(3.0),
        "flag": torch.tensor(True),
        "count": torch.tensor(2**40 + 1),
        "half": torch.tensor(1.5, dtype=torch.bfloat16),
    }
    assert _there_and_back(folder, state)
    assert all(tensor.shape == () for tensor in state.values())
    assert [t.item() for t in state.values()] == [3.0, True, 2**40 + 1, 1.5]


def test_tensors_that_are_not_contiguous_come_back_into_any_strides(folder: str) -> None:
    """C17."""
    conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    saved: dict[str, Any] = {
        "t": torch.arange(6).view(2, 3).t(),
        "conv": conv.weight.detach().clone(memory_format=torch.preserve_format),
        "wide": torch.tensor([2.5]).expand(4),
    }
    values = {name: tensor.tolist() for name, tensor in saved.items()}
    assert values["t"] == [[0, 3], [1, 4], [2, 5]]
    store = open_store(folder)
    store.save(saved, step=1).wait()
    plain = {name: torch.full(t.shape, -1, dtype=t.dtype) for name, t in saved.items()}
    store.restore(plain)
    assert {name: tensor.tolist() for name, tensor in plain.items()} == values
    live = {
        "t": torch.full((2, 3), -1).t(),
        "conv": torch.full_like(saved["conv"], -1),
        "wide": torch.full((4, 2), -1.0)[:, 0],
    }
    strides = {name: tensor.stride() for name, tensor in live.items()}
    pointers = {name: tensor.data_ptr() for name, tensor in live.items()}
    store.restore(live)
    store.close()
    assert {name: tensor.tolist() for name, tensor in live.items()} == values
    assert {name: tensor.stride() for name, tensor in live.items()} == strides
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == pointers


def test_overlapping_views_of_one_buffer_are_copies(folder: str) -> None:
    """C18."""
    base = torch.arange(10.0)
    store = open_store(folder)
    store.save({"a": base[:6], "b": base[4:]}, step=1).wait()
    live = {"a": torch.full((6,), -1.0), "b": torch.full((6,), -1.0)}
    store.restore(live)
    assert live["a"].tolist() == [0, 1, 2, 3, 4, 5]
    assert live["b"].tolist() == [4, 5, 6, 7, 8, 9]
    base.fill_(-1)
    store.restore({"a": base[:6], "b": base[4:]})
    assert base.tolist() == list(range(10))
    store.close()


def test_a_small_view_of_a_large_buffer_stores_the_view_alone(folder: str) -> None:
    """C19. (Two pages: data begin on a page of their own.)"""
    store = open_store(folder)
    store.save({"v": torch.zeros(1_000_000)[10:14]}, step=1).wait()
    files = list(Path(folder).rglob("rank-00000.safetensors"))
    assert len(files) == 2
    for path in files:
        data = path.read_bytes()
        assert len(data) - 8 - int.from_bytes(data[:8], "little") == 16
        assert len(data) <= 2 * 4096
    store.close()


def test_complex_tensors_come_back_bit_for_bit(folder: str) -> None:
    """C21."""
    rotary = torch.polar(torch.ones(6), torch.arange(6.0))
    assert _there_and_back(folder, {"rotary": rotary, "conjugate": rotary.conj().clone()})
    assert _there_and_back(folder, {"double": rotary.to(torch.complex128)}, root="double")


def test_newer_dtypes_and_odd_nans_come_back_byte_for_byte(folder: str) -> None:
    """C22."""
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    nans = torch.tensor([0x7FC1, 0x7F81, 0x0001], dtype=torch.int16)
    state: dict[str, Any] = {
        "e4m3": every.clone().view(torch.float8_e4m3fn),
        "e5m2": every.clone().view(torch.float8_e5m2),
        "e8m0": every.clone().view(torch.float8_e8m0fnu),
        "u16": torch.tensor([0, 65535], dtype=torch.uint16),
        "u32": torch.tensor([0, 2**32 - 1], dtype=torch.uint32),
        "flags": torch.tensor([True, False, True]),
        "bf16": nans.view(torch.bfloat16),
    }
    assert _there_and_back(folder, state)
    assert state["bf16"].view(torch.int16).tolist() == [0x7FC1, 0x7F81, 0x0001]
