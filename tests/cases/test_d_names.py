"""Real bug reports on names and paths (C35 to C42)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from shardstore import list_snapshots
from tests.cases.bits import Outcomes, Refusal, assert_refused, bits, refusal, soil
from tests.faults.scenario import open_store


def _plain(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def _ddp(model: Any) -> Any:
    return DistributedDataParallel(model)


def _compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


WRAPPERS: dict[str, Any] = {
    "plain": lambda m: m,
    "compile": _compiled,
    "data parallel": nn.DataParallel,
    "ddp": _ddp,
    "ddp(compile)": lambda m: _ddp(_compiled(m)),
    "compile(ddp)": lambda m: _compiled(_ddp(m)),
}


def _every_pair(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    store = open_store(folder)
    for step, (saved_as, wrap) in enumerate(WRAPPERS.items()):
        inner = _plain(seed=step)
        store.save({"model": wrap(inner)}, step=step).wait(20)
        for restored_as, wrap_live in WRAPPERS.items():
            live = _plain(seed=77)
            wrapped = {"model": wrap_live(live)}
            soil(live)
            try:
                store.restore(wrapped, step=step)
            except ValueError:
                found[f"{saved_as} -> {restored_as}"] = refusal(
                    lambda wrapped=wrapped, step=step: store.restore(wrapped, step=step),  # type: ignore[misc]
                    live,
                )
            else:
                equal = bits(live) == bits(inner)
                found[f"{saved_as} -> {restored_as}"] = "equal" if equal else "different"
    store.close()
    return found


class _Clash(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.DataParallel(nn.Linear(1, 1))
        self.part.register_parameter("weight", nn.Parameter(torch.ones(1)))


@pytest.fixture(scope="module")
def outcomes(shared_folder: str) -> Outcomes:
    return Outcomes(2, shared_folder, _every_pair)


def test_every_pair_of_wrappers_restores_or_is_refused_with_names(outcomes: Outcomes) -> None:
    """C36."""
    for found in outcomes.of(_every_pair):
        assert len(found) == len(WRAPPERS) ** 2
        for pair, result in found.items():
            if isinstance(result, Refusal):
                assert_refused([result], "weight")
            else:
                assert result == "equal", pair


def test_two_tensors_that_get_one_name_without_wrappers_are_refused(folder: str) -> None:
    """C36."""
    with open_store(folder) as store:
        found = refusal(lambda: store.save({"model": _Clash()}, step=1))
        assert_refused([found], "part.weight", kind="UnsupportedStateError")
        assert store.snapshots() == []


def test_a_checkpoint_wrapper_around_a_compiled_module_leaves_no_name(folder: str) -> None:
    """C35."""
    inner, live = _plain(0), _plain(1)
    wrapped: Any = nn.Sequential(checkpoint_wrapper(_compiled(inner[0])), inner[1])  # type: ignore[index]
    assert any("_orig_mod" in name for name in wrapped.state_dict())
    soil(live)
    with open_store(folder) as store:
        store.save({"model": wrapped}, step=1).wait()
        store.restore({"model": live})
    assert bits(live) == bits(inner)


def test_lists_that_were_empty_get_their_contents(folder: str) -> None:
    """C37."""
    live: dict[str, Any] = {"meta": [{"k": 1}, {"k": 2}]}
    with open_store(folder) as store:
        store.save(live, step=1).wait()
        live["meta"] = []
        store.restore(live)
    assert live["meta"] == [{"k": 1}, {"k": 2}]


def test_two_paths_with_one_dotted_name_are_refused(folder: str) -> None:
    """C37."""
    live: dict[str, Any] = {"a.b": torch.tensor([1.0]), "a": {"b": torch.tensor([0.0])}}
    with open_store(folder) as store:
        found = refusal(lambda: store.save(live, step=1))
        assert_refused([found], "a.b", kind="UnsupportedStateError")
        assert store.snapshots() == []


def test_odd_keys_come_back_and_every_file_stays_inside(folder: str) -> None:
    """C39."""
    keys = ["a/b", "../x", "层.权重", "k" * 300, "", "Case", "case", "__metadata__", "a b\n", ".."]
    state: dict[str, Any] = {key: torch.full((2,), float(i)) for i, key in enumerate(keys)}
    nested = {"in": {key: torch.full((2,), 50.0 + i) for i, key in enumerate(keys)}}
    saved = bits(state), bits(nested)
    store = open_store(folder)
    store.save({**state, **nested}, step=1).wait()
    files = [p for p in Path(folder).rglob("*") if p.is_file()]
    soil(state)
    soil(nested)
    store.restore({**state, **nested})
    store.close()
    assert (bits(state), bits(nested)) == saved
    assert all(len(path.name.encode()) <= 255 for path in files)
    assert {p.name for p in Path(folder).iterdir()} == {"root", "memory"}
    (snapshot,) = Path(folder, "root").glob("step-*")
    assert sorted(p.name for p in snapshot.iterdir()) == ["manifest.json", "rank-00000.safetensors"]


NAMES = ["with space", "a#b?c", "per%20cent", "p+lus", "ü", "trail/", "[glob]*", "exp::1", "exp::2"]


def test_legal_characters_of_a_root_are_taken_as_they_are(folder: str) -> None:
    """C41."""
    for value, name in enumerate(NAMES):
        with open_store(folder, root=name) as store:
            store.save({"w": torch.full((1,), float(value))}, step=value).wait()
    made = {path.name for path in Path(folder).iterdir()} - {"memory"}
    assert made == {name.rstrip("/") for name in NAMES}
    for value, name in enumerate(NAMES):
        live = {"w": torch.full((1,), -1.0)}
        assert [info.step for info in list_snapshots(Path(folder) / name)] == [value]
        with open_store(folder, root=name) as store:
            store.restore(live)
        assert live["w"].item() == value


def test_links_are_followed_at_the_root_and_nowhere_below(folder: str) -> None:
    """C42."""
    real, outside = Path(folder) / "real", Path(folder) / "outside"
    with open_store(folder, root="real") as store:
        store.save({"w": torch.full((1,), 1.0)}, step=1).wait()
    (snapshot,) = real.glob("step-*")
    shutil.move(snapshot, outside)
    snapshot.symlink_to(outside)
    precious = {p.name: p.read_bytes() for p in outside.iterdir()}
    (real / "latest").symlink_to(real / "nowhere")
    (Path(folder) / "root").symlink_to(real)
    store = open_store(folder, keep=1)
    for step in (2, 3):
        store.save({"w": torch.full((1,), float(step))}, step=step).wait()
    store.drain()
    assert [info.step for info in store.snapshots()] == [3]
    live = {"w": torch.zeros(1)}
    assert store.restore(live).step == 3
    store.close()
    assert {p.name: p.read_bytes() for p in outside.iterdir()} == precious
    assert (real / "latest").is_symlink()
