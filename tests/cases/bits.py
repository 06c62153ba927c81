"""What the cases share: state as raw bytes, sentinels, refusals, and several cases in one start of ranks."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardstore import ShardStoreError
from tests.ranks import RanksFailedError, run_ranks
from tests.roundtrip import raw

Case = Callable[[int, str], Any]
"""Called with the rank and a folder of its own, the same on all ranks."""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory of a tensor, writable in place."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


class Facts(NamedTuple):
    """All that must be equal for BITEQ."""

    dtype: str
    local_shape: tuple[int, ...]
    shape: tuple[int, ...]
    placements: str
    mesh: str
    data: bytes


def facts(tensor: torch.Tensor) -> Facts:
    """Describe one tensor of this rank."""
    local, placements, mesh = local_of(tensor), "", ""
    if isinstance(tensor, DTensor):
        placements = str(tensor.placements)
        mesh = f"{tensor.device_mesh.mesh.tolist()} {tensor.device_mesh.mesh_dim_names}"
    return Facts(
        str(local.dtype), tuple(local.shape), tuple(tensor.shape), placements, mesh, raw(local)
    )


def tensors_of(value: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a state, by name; objects with state_dict give theirs."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, nn.Module):
        for fqn, parameter in value.named_parameters(remove_duplicate=False):
            yield f"{name}.{fqn}", parameter
        for fqn, buffer in value.named_buffers(remove_duplicate=False):
            yield f"{name}.{fqn}", buffer
    elif isinstance(value, torch.optim.Optimizer):
        parameters = [p for group in value.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            yield from tensors_of(value.state.get(parameter, {}), f"{name}.{index}")
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from tensors_of(child, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            yield from tensors_of(child, f"{name}.{index}")


def bits(state: object) -> dict[str, Facts]:
    """Every tensor of a state as facts."""
    return {name: facts(tensor) for name, tensor in tensors_of(state)}


def soil(state: object) -> None:
    """Overwrite every tensor with a sentinel that no test saves."""
    with torch.no_grad():
        for _, tensor in tensors_of(state):
            local = local_of(tensor)
            if local.dtype == torch.bool:
                local.logical_not_()
            elif local.is_contiguous() and local.numel():
                local.reshape(-1).view(torch.uint8).fill_(0xA5)
            elif local.numel():
                local.fill_(-1)


class Refusal(NamedTuple):
    """How a call was refused on this rank."""

    kind: str
    text: str
    unchanged: bool = True
    """Live tensors have the bytes that they had before."""


def refusal(call: Callable[[], object], state: object = ()) -> Refusal:
    """Make a call that must be refused with one of our errors."""
    before = bits(state)
    try:
        result = call()
    except ShardStoreError as error:
        return Refusal(type(error).__name__, str(error), unchanged=bits(state) == before)
    raise AssertionError(f"it was not refused, and gave {result!r}")


def assert_refused(found: list[Refusal], *named: str, kind: str | None = None) -> None:
    """All ranks were refused with one class, live state is unchanged, and the text names things."""
    assert len({refused.kind for refused in found}) == 1, found
    if kind is not None:
        assert found[0].kind == kind, found[0]
    for rank, refused in enumerate(found):
        assert refused.unchanged, f"rank {rank} changed: {refused.text}"
        for name in named:
            assert name in refused.text, f"rank {rank} does not name {name!r}: {refused.text}"


def assert_group_works() -> None:
    """The process group of the training still answers."""
    value = torch.ones(())
    dist.all_reduce(value)
    assert value.item() == dist.get_world_size()


class _Failed(NamedTuple):
    text: str


def _run_all(rank: int, folder: str, cases: tuple[Case, ...]) -> list[Any]:
    results: list[Any] = []
    for case in cases:
        own = Path(folder) / case.__name__.strip("_")
        own.mkdir(exist_ok=True)
        dist.barrier()
        try:
            results.append(case(rank, str(own)))
        except Exception:  # noqa: BLE001 - the test of this case raises it
            results.append(_Failed(traceback.format_exc()))
            Path(folder, f"failed-{rank}").write_text(f"{own.name}: {traceback.format_exc()}")
    return results


class Outcomes:
    """Results of several cases that ran one after the other in one start of the ranks."""

    def __init__(self, n: int, folder: str, *cases: Case, timeout_s: float = 45.0) -> None:
        """Run them."""
        try:
            by_rank = run_ranks(n, _run_all, folder, cases, timeout_s=timeout_s)
        except RanksFailedError as error:  # a rank may wait for ever for one whose case failed
            told = [path.read_text() for path in sorted(Path(folder).glob("failed-*"))]
            raise AssertionError("\n".join([str(error), *told])) from error
        self._found = dict(zip(cases, zip(*by_rank, strict=True), strict=True))

    def of(self, case: Case) -> list[Any]:
        """Results of one case by rank; raises what it raised."""
        found = list(self._found[case])
        failed = [f"--- rank {r} ---\n{v.text}" for r, v in enumerate(found) if type(v) is _Failed]
        assert not failed, "\n".join(failed)
        return found
