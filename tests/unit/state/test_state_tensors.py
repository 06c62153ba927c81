"""Single tensors: every dtype and layout bit-exact, live memory kept, refusals with path and remedy."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardstore.errors import StateMismatchError, UnsupportedStateError
from shardstore.state.flatten import flatten_state
from shardstore.state.staging import stage
from shardstore.state.tensors import TORCH_DTYPES
from tests.roundtrip import match, raw, restore, save

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def _random_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    itemsize = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(3)
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(0, high, (*shape, itemsize), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (0, 3)])
def test_random_bits_of_every_dtype_come_back(name: str, shape: tuple[int, ...]) -> None:
    tensor = _random_bytes(shape, TORCH_DTYPES[name])
    expected = raw(tensor)
    pointer = tensor.data_ptr()
    saved = save({"t": tensor})
    assert saved.header.table[0].dtype == name
    tensor.view(-1).view(torch.uint8).fill_(1)
    restore(saved, {"t": tensor})
    assert raw(tensor) == expected
    assert tensor.data_ptr() == pointer
    assert tuple(tensor.shape) == shape


@pytest.mark.parametrize(
    "name", ["float4_e2m1fn_x2", "bfloat16", "float8_e5m2", "complex32", "int16"]
)
def test_random_bits_survive_strided_memory(name: str) -> None:
    if name not in TORCH_DTYPES:
        pytest.skip("this torch lacks the dtype")
    tensor = _random_bytes((6, 8), TORCH_DTYPES[name])[::2, ::2].t()
    expected = raw(tensor)
    saved = save({"t": tensor})
    live = _random_bytes((8, 6), TORCH_DTYPES[name])[::2, 1::2]
    strides = live.stride()
    restore(saved, {"t": live})
    assert raw(live) == expected
    assert live.stride() == strides


def test_bfloat16_nan_payloads_survive() -> None:
    bits = torch.tensor([0x7FC1, 0x7F81, -0x7F, 0], dtype=torch.int16)
    live = torch.zeros(4, 2, dtype=torch.bfloat16)[:, 0]
    restore(save({"t": bits.view(torch.bfloat16)}), {"t": live})
    assert live.contiguous().view(torch.int16).tolist() == bits.tolist()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_conjugate_and_negative_views_are_stored_resolved(dtype: torch.dtype) -> None:
    base = torch.tensor([1 + 2j, 3 - 4j], dtype=dtype)
    state = {"conj": base.conj(), "neg": base.conj().imag, "base": base}
    assert state["conj"].is_conj()
    assert state["neg"].is_neg()
    saved = save(state)
    fresh = {n: torch.zeros_like(t.resolve_conj().resolve_neg()) for n, t in state.items()}
    restore(saved, fresh)
    assert fresh["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert fresh["neg"].tolist() == [-2.0, 4.0]
    base.zero_()
    restore(saved, {"conj": state["conj"]}, partial=True)
    assert base.tolist() == [1 + 2j, 3 - 4j]


def test_non_contiguous_and_channels_last_keep_the_live_strides() -> None:
    conv = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    turned = torch.arange(6).view(2, 3).t()
    saved = save({"conv": conv, "turned": turned})
    live = {"conv": torch.zeros(4, 3, 2, 2), "turned": torch.zeros(2, 3, dtype=torch.int64).t()}
    restore(saved, live)
    assert torch.equal(live["conv"], conv)
    assert live["conv"].is_contiguous()
    assert live["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert live["turned"].stride() == (1, 3)


def test_expanded_tensors_are_stored_whole_and_filled_where_equal() -> None:
    one = torch.tensor([7.0])
    saved = save({"t": one.expand(4)})
    one.zero_()
    restore(saved, {"t": one.expand(4)})
    assert one.item() == 7.0
    saved = save({"t": torch.arange(4.0)})
    plan = match(saved, {"t": one.expand(4)})
    with pytest.raises(StateMismatchError, match="expanded"):
        plan.prepare({0: torch.arange(4.0)})
    assert one.item() == 7.0


def test_overlapping_views_come_back_as_copies_that_agree() -> None:
    base = torch.arange(10.0)
    state = {"a": base[:6], "b": base[4:]}
    saved = save(state)
    assert all(row.alias_of is None for row in saved.header.table)
    base.zero_()
    restore(saved, state)
    assert base.tolist() == list(range(10))


def test_a_small_view_is_stored_without_its_storage() -> None:
    saved = save({"t": torch.zeros(1_000_000)[5:9]})
    assert saved.layout.nbytes - saved.layout.data_start == 16


def test_a_view_with_another_dtype_or_shape_is_no_alias() -> None:
    base = torch.arange(4.0)
    rows = flatten_state(
        {"a": base, "b": base.view(torch.int32), "c": base.view(2, 2), "d": base}, rank=0
    ).table
    assert [row.alias_of for row in rows] == [None, None, None, 0]


def test_inference_tensors_are_filled() -> None:
    with torch.inference_mode():
        live = torch.zeros(3)
    restore(save({"t": torch.ones(3)}), {"t": live})
    assert live.tolist() == [1, 1, 1]


def test_parameters_keep_identity_grad_flag_and_graph() -> None:
    live = nn.Parameter(torch.zeros(3))
    state = {"t": live}
    restore(save({"t": nn.Parameter(torch.ones(3))}), state)
    assert state["t"] is live
    assert live.requires_grad
    assert live.is_leaf
    assert live.tolist() == [1, 1, 1]


def test_staged_bytes_do_not_follow_the_live_tensor() -> None:
    tensor = torch.ones(1000)
    saved = save({"t": tensor})
    tensor.fill_(2)
    live = torch.zeros(1000)
    restore(saved, {"t": live})
    assert set(live.tolist()) == {1.0}


def test_staging_again_reuses_the_same_views() -> None:
    tensor = torch.ones(3)
    flat = flatten_state({"t": tensor, "u": tensor}, rank=0)
    view = torch.zeros(3)
    stage(flat, [view, torch.empty(0)])
    tensor.fill_(5)
    stage(flat, [view, torch.empty(0)])
    assert view.tolist() == [5, 5, 5]


class _Codes(torch.Tensor):
    pass


def _quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
        (lambda: torch.empty(2, device="meta"), "meta device"),
        (lambda: torch.ones(2).as_subclass(_Codes), "_Codes.*subclass"),
        (lambda: nn.Parameter(torch.ones(2).as_subclass(_Codes)), "_Codes.*subclass"),
        (lambda: nn.UninitializedParameter(), "uninitialized.*forward"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    ],
)
def test_tensors_without_plain_bytes_are_refused(
    make: Callable[[], torch.Tensor], text: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        tensor = make()
    with pytest.raises(UnsupportedStateError, match=f"'a.b'.*{text}") as caught:
        flatten_state({"a": {"b": tensor}}, rank=0)
    assert caught.value.path == "a.b"


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_are_refused_with_their_dtype() -> None:
    with pytest.raises(UnsupportedStateError, match=r"qint8.*int_repr"):
        flatten_state({"q": _quantized()}, rank=0)


@pytest.mark.parametrize(
    ("live", "text"),
    [
        (torch.full((1,), -1.0, dtype=torch.bfloat16), "w: dtype float32 saved, bfloat16 live"),
        (torch.full((2,), -1.0), r"w: shape \(1,\) saved, \(2,\) live"),
        (torch.full((), -1.0), r"w: shape \(1,\) saved, \(\) live"),
        (torch.empty(1, device="meta"), "w: the live tensor is on the meta device"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_another_dtype_or_shape_is_refused_and_the_live_tensor_kept(
    live: torch.Tensor, text: str, strict: bool
) -> None:
    saved = save({"w": torch.tensor([1.2345678])})
    with pytest.raises(StateMismatchError, match=text) as caught:
        match(saved, {"w": live}, strict=strict)
    assert len(caught.value.mismatched) == 1
    assert live.is_meta or bool((live == -1).all())


def test_keys_of_any_text_come_back_and_metadata_is_renamed() -> None:
    names = ["a/b", "../x", "层.权重", "x" * 300, "", "Case", "case", "__metadata__"]
    state = {"dict": {name: torch.full((2,), float(i)) for i, name in enumerate(names)}}
    saved = save({**state, "__metadata__": torch.ones(1)})
    assert "__metadata__@0" in [piece.key for piece in saved.header.pieces]
    live = {"dict": {name: torch.zeros(2) for name in names}, "__metadata__": torch.zeros(1)}
    restore(saved, live)
    for i, name in enumerate(names):
        assert live["dict"][name].tolist() == [i, i]  # type: ignore[index]


def test_two_paths_with_one_key_are_refused_with_both_names() -> None:
    state = {"x": {"a.b": torch.tensor(1.0), "a": {"b": torch.tensor(0.0)}}}
    with pytest.raises(UnsupportedStateError, match=r"\['x', 'a.b'\] and \['x', 'a', 'b'\]"):
        flatten_state(state, rank=0)
    with pytest.raises(UnsupportedStateError, match=r"two tensors have one name 'x.1@0'"):
        flatten_state({"x": {1: torch.ones(1), "1": torch.ones(1)}}, rank=0)


def test_names_that_are_not_text_are_refused() -> None:
    with pytest.raises(UnsupportedStateError, match="surrogate"):
        flatten_state({"x": {"\ud800": torch.ones(1)}}, rank=0)
    with pytest.raises(UnsupportedStateError, match="surrogate"):
        flatten_state({"\ud800": 1}, rank=0)
    with pytest.raises(UnsupportedStateError, match="names in the state are strings"):
        flatten_state({3: 1}, rank=0)  # type: ignore[dict-item]
