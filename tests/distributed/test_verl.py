"""verl's pair of functions, and the faults of the original that ours must not have."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardstore import (
    CoordinationError,
    StateMismatchError,
    TopologyMismatchError,
    UnsupportedStateError,
)
from shardstore.errors import CoordinationTimeoutError
from shardstore.integrations.verl import fsdp2_sharded_load_from_cpu as load
from shardstore.integrations.verl import fsdp2_sharded_save_to_cpu as save
from tests.distributed.training import local_of
from tests.ranks import run_ranks


def _fsdp(
    *, reshard: bool | None = True, mesh: DeviceMesh | None = None, axis: str = "dp"
) -> nn.Sequential:
    """Uneven sizes: over 4 ranks the last one has no rows of the head."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    if mesh is None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(axis,))
    fully_shard(model[0], mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model


def _reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _contents(model: nn.Module) -> list[torch.Tensor]:
    """Copies of what this rank holds."""
    _reshard(model)
    with torch.no_grad():
        return [local_of(t).clone() for t in (*model.parameters(), *model.buffers())]


def _fill(model: nn.Module, value: float) -> None:
    _reshard(model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            local_of(tensor).fill_(value)


def _equal(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _refused(call: Callable[[], object], expected: type[Exception]) -> Any:
    with pytest.raises(expected) as caught:
        call()
    return caught.value


# ------------------------------------------------------------- the trainers' use


def _cycles(rank: int, *, offloads: bool) -> list[bool]:
    """Per N: flipping to pi_old and back gave pi_old's output each time and changed no update."""
    torch.manual_seed(rank)
    data = torch.randn(4, 5)

    def move() -> None:
        if offloads:  # to other memory, as a move to the CPU and back does
            model._apply(lambda tensor: tensor.clone())  # type: ignore[no-untyped-call]

    outcomes = []
    for num_batches in (1, 2, 3, 4):
        plain, model = _fsdp(), _fsdp()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (plain, model)]
        kept: dict[int, Any] = {}
        good, before = True, _contents(model)
        for batch in range(1, num_batches + 1):
            if batch == 1:
                kept[1] = save(model)
            else:
                kept[batch] = save(model)
                move()
                load(model, *kept[1])
                good = good and _equal(before, _contents(model))
                move()
                load(model, *kept.pop(batch))
            for m, optimizer in zip((plain, model), optimizers, strict=True):
                optimizer.zero_grad()
                m(data).square().sum().backward()
                optimizer.step()
        outcomes.append(good and _equal(_contents(plain), _contents(model)))
    return outcomes


def _cycles_on_the_gpu_and_offloaded(rank: int) -> list[bool]:
    return [*_cycles(rank, offloads=False), *_cycles(rank, offloads=True)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_flipping_to_old_weights_and_back_changes_no_update(world_size: int) -> None:
    for good in run_ranks(world_size, _cycles_on_the_gpu_and_offloaded):
        assert good == [True] * 8


def _gathered(rank: int) -> list[str]:
    """Every setting, saved and loaded before and after a forward that may leave modules gathered."""
    wrong = []
    data = torch.ones(4, 5)
    for reshard in (None, True, False):
        for saves_after in (False, True):
            for loads_after in (False, True):
                model = _fsdp(reshard=reshard).eval()
                with torch.no_grad():
                    before: torch.Tensor = _fsdp().eval()(data)
                    if saves_after:
                        model(data)
                    pair = save(model)
                    _fill(model, 0.5)
                    changed: torch.Tensor = model(data) if loads_after else before + 1
                    load(model, *pair)
                    after: torch.Tensor = model(data)
                if torch.equal(before, changed) or not torch.equal(before, after):
                    wrong.append(f"{reshard=} {saves_after=} {loads_after=}")
    return wrong


def test_a_model_left_gathered_by_a_forward_is_really_saved_and_loaded() -> None:
    assert run_ranks(2, _gathered) == [[], []]


# ---------------------------------------------------------------- what is compared


class _Mixed(nn.Module):
    def __init__(self, *placements: tuple[Any, Any]) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for index, placement in enumerate(placements):
            whole = torch.arange(24.0).view(4, 6) + index
            parameter = nn.Parameter(distribute_tensor(whole, mesh, placement))
            self.register_parameter(f"p{index}", parameter)
        alone = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
        rows = distribute_tensor(torch.arange(5.0), alone, [Shard(0)])
        self.register_parameter("rows", nn.Parameter(rows))
        self.register_parameter("plain", nn.Parameter(torch.arange(3.0)))


def _layouts(rank: int) -> tuple[bool, bool, str]:
    first = _Mixed((Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(1), Replicate()))
    pair = save(first)
    before = _contents(first)
    _fill(first, -1)
    load(first, *pair)
    is_restored = _equal(before, _contents(first))
    swapped = _Mixed((Shard(0), Shard(1)), (Shard(0), Replicate()), (Shard(1), Replicate()))
    _fill(swapped, -1)
    before = _contents(swapped)
    error = _refused(lambda: load(swapped, *pair), StateMismatchError)
    return is_restored, _equal(before, _contents(swapped)), str(error)


def test_each_tensor_has_its_own_layout_and_live_placements_are_compared() -> None:
    for is_restored, is_unchanged, text in run_ranks(4, _layouts):
        assert is_restored
        assert is_unchanged
        assert "p1: placement [Replicate, Shard(0)] saved, [Shard(0), Replicate] live" in text
        assert "p0" not in text


def _tensor_parallel(rank: int) -> tuple[bool, set[str]]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: nn.Module = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 5))
    model = parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    state, spec = save(model)
    before = _contents(model)
    _fill(model, -1)
    load(model, state, spec)
    specs = [entry[1] for entry in state.values()]
    return _equal(before, _contents(model)), {p.type for s in specs if s for p in s.placements}


def test_tensor_parallel_models_under_fsdp2_are_restored() -> None:
    for is_restored, placements in run_ranks(4, _tensor_parallel):
        assert is_restored
        assert {"_StridedShard", "Shard", "Replicate"} >= placements > {"Shard"}


def _mismatches(rank: int) -> list[tuple[str, bool]]:
    def attempt(
        model: nn.Module, pair: Any, expected: type[Exception] = StateMismatchError
    ) -> tuple[str, bool]:
        before = _contents(model)
        error = _refused(lambda: load(model, *pair), expected)
        return str(error), _equal(before, _contents(model))

    pair = save(_fsdp())
    several = _fsdp()
    several.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    del several[1].running_mean
    several[1].bias = nn.Parameter(torch.zeros(1))
    only_one = _fsdp()
    if rank == 1:
        only_one.register_buffer("odd", torch.zeros(2))
    return [
        attempt(_fsdp(), save(_fsdp().bfloat16())),
        attempt(several, pair),
        attempt(_fsdp(axis="other"), pair, TopologyMismatchError),
        attempt(only_one, pair),
        attempt(_fsdp(), (pair[0], save(several)[1])),
    ]


def test_whatever_differs_is_refused_in_one_message_before_anything_is_touched() -> None:
    for outcomes in run_ranks(2, _mismatches):
        assert all(is_unchanged for _, is_unchanged in outcomes)
        rounded, several, renamed, only_one, other_spec = (text for text, _ in outcomes)
        assert "dtype bfloat16 saved, float32 live" in rounded
        for name in ("extra", "running_mean", "1.bias", "shape (7,) saved, (1,) live"):
            assert name in several
        assert "dp" in renamed
        assert "other" in renamed
        assert "rank 1: " in only_one
        assert "rank 0" not in only_one
        assert "odd" in only_one
        assert "target_spec" in other_spec


# --------------------------------------------------------------- ranks that fail


class _Extra(nn.Module):
    """Fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.get_fails_with: BaseException | None = None
        self.set_fails_with: BaseException | None = None

    def get_extra_state(self) -> Any:
        if self.get_fails_with is not None:
            raise self.get_fails_with
        return 1

    def set_extra_state(self, state: Any) -> None:
        if self.set_fails_with is not None:
            raise self.set_fails_with


def _one_fails(rank: int) -> tuple[list[tuple[str, str]], list[bool], float]:
    model = _Extra()
    pair = save(model)
    started = time.monotonic()
    texts, unchanged = [], []

    def attempt(*given: Any) -> None:
        _fill(model, 2.0)
        with pytest.raises(BaseException) as caught:
            load(model, *given)
        texts.append((caught.type.__name__, str(caught.value)))
        unchanged.append(_equal(_contents(model), [torch.full((3,), 2.0)]))

    attempt(*({}, None) if rank == 1 else pair)
    for error in (RuntimeError("broken"), KeyboardInterrupt()):
        model.get_fails_with = error if rank == 1 else None
        attempt(*pair)
    model.get_fails_with = None
    model.set_fails_with = RuntimeError("late") if rank == 1 else None
    attempt(*pair)
    model.set_fails_with = None
    load(model, *pair)
    assert not model.weight.any()
    return texts, unchanged, time.monotonic() - started


def test_one_failing_rank_makes_all_raise_at_once_and_touches_nothing() -> None:
    results = run_ranks(2, _one_fails)
    for rank, (texts, unchanged, took_s) in enumerate(results):
        assert unchanged == [True, True, True, False]
        assert took_s < 10
        assert [kind for kind, _ in texts] == [
            "StateMismatchError",
            "CoordinationError",
            "KeyboardInterrupt" if rank == 1 else "CoordinationError",
            "CoordinationError",
        ]
        (_, pair), (_, broken), (_, interrupted), (_, late) = texts
        assert "rank 1" in pair
        assert "pair" in pair
        assert "rank 1: RuntimeError: broken" in broken
        assert rank == 1 or "rank 1: KeyboardInterrupt" in interrupted
        assert "partly applied" in late
        assert "rank 1: RuntimeError: late" in late


def _absent(rank: int) -> str:
    model = _fsdp()
    pair = save(model)
    load(model, *pair)
    _fill(model, 2.0)
    before = _contents(model)
    if rank == 1:
        dist.barrier()  # rank 0 has given up
    started = time.monotonic()
    call = lambda: load(model, *pair, timeout_s=1.0)  # noqa: E731
    text = str(_refused(call, CoordinationTimeoutError))
    took_s = time.monotonic() - started
    assert took_s < (8 if rank == 0 else 1), "who comes late hears the answer at once"
    assert _equal(before, _contents(model))
    if rank == 0:
        dist.barrier()
    load(model, *pair)
    assert not _equal(before, _contents(model))
    return text


def test_a_rank_that_does_not_come_is_named_within_the_deadline() -> None:
    for text in run_ranks(2, _absent):
        assert "rank 1 made no progress for 1 s" in text


# ------------------------------------------------------------------------- groups


def _part_of_the_job(rank: int) -> str:
    """Ranks 1 and 2 of 3 have the model; rank 0 never takes part in their loads."""
    mesh = DeviceMesh("cpu", [1, 2], mesh_dim_names=("dp",))
    group = dist.new_group([1, 2])
    if rank == 0:
        outside = nn.Linear(2, 2)
        outside.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Replicate()]))
        pair = save(outside)
        return str(_refused(lambda: load(outside, *pair), CoordinationError))
    for given in (None, group):
        model = _fsdp(mesh=mesh)
        pair = save(model)
        before = _contents(model)
        _fill(model, 2.0)
        load(model, *pair, process_group=given, timeout_s=10)
        assert _equal(before, _contents(model))
    return ""


def test_a_model_on_some_ranks_is_loaded_by_these_alone() -> None:
    outside, *inside = run_ranks(3, _part_of_the_job)
    assert "not in the module's mesh of ranks [1, 2]" in outside
    assert inside == ["", ""]


def _connections() -> int:
    return sum(thread.name == "shardstore-keys" for thread in threading.enumerate())


def _many_loads(rank: int, folder: str) -> list[int]:
    counts = []
    for number in range(2):
        model = nn.Linear(2, 2)
        pair = save(model)
        for _ in range(50):
            load(model, *pair)
        counts.append(_connections())
        dist.barrier()
        dist.destroy_process_group()
        counts.append(_connections())
        if number == 0:
            store = dist.FileStore(f"{folder}/again", 2)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return counts


def test_many_loads_share_one_connection_that_ends_with_the_group(folder: str) -> None:
    for counts in run_ranks(2, _many_loads, folder):
        assert counts == [1, 0, 1, 0]


# -------------------------------------------------------------------- one process


def test_a_single_process_model_on_the_cpu_is_copied_not_aliased() -> None:
    model = nn.BatchNorm1d(3)
    _fill(model, 1.0)
    state, spec = save(model)
    assert set(state) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert all(entry_spec is None for _, entry_spec in state.values())
    assert state["num_batches_tracked"][0].dtype == torch.int64
    for value in (2.0, 3.0):
        _fill(model, value)
        assert all((tensor == 1).all() for tensor, _ in state.values())
        load(model, state, spec)
        assert all((tensor == 1).all() for tensor in _contents(model))


def test_a_copy_is_one_buffer() -> None:
    model = nn.Sequential(*(nn.Linear(50, 50) for _ in range(8)))
    state, _ = save(model)
    storages = {tensor.untyped_storage().data_ptr() for tensor, _ in state.values()}
    (first, _) = next(iter(state.values()))
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    assert len(storages) == 1
    assert first.untyped_storage().nbytes() <= nbytes + 8192
    assert repr(state) == f"CpuShardedState(16 tensors, {nbytes:,} bytes)"


def test_tied_parameters_stay_tied_and_are_copied_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    before = _contents(model)
    state, spec = save(model)
    assert set(state) == {"0.weight", "1.weight"}
    assert state["0.weight"][0].data_ptr() == state["1.weight"][0].data_ptr()
    _fill(model, 9.0)
    load(model, state, spec)
    assert model[0].weight is model[1].weight
    assert _equal(before, _contents(model))
    model[1].weight = nn.Parameter(torch.zeros(2, 2))
    assert "tied" in str(_refused(lambda: load(model, state, spec), StateMismatchError))


def test_nothing_is_saved_or_loaded_in_the_middle_of_a_forward() -> None:
    model = nn.Linear(2, 2)
    pair = save(model)
    for call in (lambda: save(model), lambda: load(model, *pair)):
        handle = model.register_forward_hook(lambda *_, call=call: call() and None)
        assert "forward" in str(_refused(lambda: model(torch.ones(2)), UnsupportedStateError))
        handle.remove()


def _pending_gather(rank: int) -> bool:
    model = _fsdp().eval()
    data = torch.ones(4, 5)
    with torch.no_grad():
        before: torch.Tensor = model(data)
        _reshard(model)
        pair = save(model)
        _fill(model, 0.5)
        model[0].unshard(async_op=True)  # type: ignore[operator]
        load(model, *pair)
        return torch.equal(model(data), before)


def test_a_gather_that_is_still_under_way_does_not_bring_old_weights_back() -> None:
    assert run_ranks(2, _pending_gather) == [True, True]
