"""What one trainer process does with a store."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardstore import (
    CoordinationError,
    SaveFailedError,
    ShardStoreError,
    SnapshotNotFoundError,
    SnapshotStore,
    StateMismatchError,
    TierFullError,
    UnsupportedStateError,
    list_snapshots,
)
from shardstore.tiers.fileops import use_ops
from tests.faults.breaking_ops import WatchedOps, hold_at, raise_at
from tests.store.conftest import OpenStore


def _save_and_fail(store: SnapshotStore, state: dict[str, Any]) -> None:
    store.save(state, step=1).wait()
    raise ZeroDivisionError


def _spoil(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(77)
    raise KeyError("mine")


def _steps(store: SnapshotStore) -> list[int]:
    return [info.step for info in store.snapshots()]


def test_the_whole_use_of_a_store_without_a_name_or_root() -> None:
    model = nn.Linear(3, 2)
    before = set(os.listdir("/dev/shm"))
    with SnapshotStore(memory="8MiB") as store:
        weight = model.weight.detach().clone()
        store.save({"model": model}, step=1)
        with torch.no_grad():
            model.weight.zero_()
        assert store.restore({"model": model}).step == 1
        assert torch.equal(model.weight, weight)
        assert set(os.listdir("/dev/shm")) == before, "nothing may be left under a name"


def test_a_second_process_start_finds_memory_first_and_the_root_without_it(
    open_store: OpenStore,
) -> None:
    state = {"w": torch.arange(5.0)}
    store = open_store()
    store.save(state, step=3, metadata={"loss": 0.5, "tags": ["a", None, True]}).wait()
    store.close(keep_memory=True)
    store = open_store()
    state["w"].fill_(-1)
    report = store.restore(state)
    assert str(report).startswith("step 3 from memory (1 rank)")
    assert report.metadata == {"loss": 0.5, "tags": ["a", None, True]}
    assert state["w"].tolist() == [0, 1, 2, 3, 4]
    store.close()
    store = open_store()
    state["w"].fill_(-1)
    assert store.restore(state).tier == "root (1 rank)"
    assert state["w"].tolist() == [0, 1, 2, 3, 4]


def test_swapped_shows_another_step_and_returns_to_exactly_what_was(open_store: OpenStore) -> None:
    model = nn.BatchNorm1d(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    notes: dict[str, Any] = {"step": 1}
    state = {"model": model, "optimizer": optimizer, "notes": notes}
    store = open_store()
    store.save(state, step=1).wait()
    old = model.weight.detach().clone()
    optimizer.step()
    notes["step"] = 2
    now = [t.clone() for t in [*model.state_dict().values()]]
    pointers = [t.data_ptr() for t in model.parameters()]
    momentum = optimizer.state[model.weight]["momentum_buffer"].clone()

    with store.swapped(state, step=1) as report:
        assert report.step == 1
        assert torch.equal(model.weight, old)
        assert notes == {"step": 1}
        for call in (
            lambda: store.save(state, step=9),
            lambda: store.restore(state),
            lambda: store.delete(1),
            lambda: store.swapped(state).__enter__(),
            store.close,
        ):
            with pytest.raises(ShardStoreError, match="inside swapped"):
                call()
    with pytest.raises(KeyError, match="mine"), store.swapped({"model": model}, step=1):
        _spoil(model)

    assert all(torch.equal(a, b) for a, b in zip(now, model.state_dict().values(), strict=True))
    assert pointers == [t.data_ptr() for t in model.parameters()]
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], momentum)
    assert notes == {"step": 2}
    assert _steps(store) == [1], "the private copy is in no listing"
    with pytest.raises(SnapshotNotFoundError), store.swapped({"model": model}, step=5):
        pass
    store.save(state, step=2).wait()


def test_keep_deletes_older_ones_only_after_a_successor_is_committed(
    open_store: OpenStore, folder: str
) -> None:
    ops = WatchedOps(raise_at("link manifest.json", OSError(5, "broken")))
    with use_ops(ops):
        store = open_store(keep=1)
    state = {"w": torch.zeros(2)}
    store.save(state, step=1).wait()
    ops.arm()
    with pytest.raises(SaveFailedError, match="EIO"):
        store.save(state, step=2).wait()
    with pytest.raises(SaveFailedError):
        store.drain()
    assert _steps(store) == [1]
    store.save(state, step=3).wait()
    store.drain()
    assert _steps(store) == [3]
    assert [info.step for info in list_snapshots(Path(folder) / "root")] == [3]
    assert len(list(Path(folder, "root").iterdir())) == 2, "the run record and one snapshot"


def test_memory_only_snapshots_stay_until_deleted_and_do_not_count(open_store: OpenStore) -> None:
    store = open_store(keep=1)
    state = {"w": torch.zeros(2)}
    assert store.save(state, step=1, persist=False).wait().tiers == ("memory",)  # type: ignore[union-attr]
    for step in (2, 3):
        store.save(state, step=step).wait()
    store.drain()
    assert _steps(store) == [1, 3]
    store.close(keep_memory=True)
    store = open_store(keep=1)
    assert _steps(store) == [1, 3], "they survive a restart"
    store.delete(1)
    assert _steps(store) == [3]
    with pytest.raises(SnapshotNotFoundError):
        store.delete(1)


def test_a_deleted_step_does_not_come_back_after_a_restart(open_store: OpenStore) -> None:
    store = open_store()
    state = {"w": torch.zeros(2)}
    for step in (1, 2):
        store.save(state, step=step).wait()
    store.delete(2)
    assert store.restore(state).step == 1
    store.close(keep_memory=True)
    store = open_store()
    assert _steps(store) == [1]
    assert store.restore(state).step == 1


def test_the_same_step_saved_twice_restores_the_later_one(open_store: OpenStore) -> None:
    store = open_store()
    for value in (1.0, 2.0):
        store.save({"w": torch.full((2,), value)}, step=7).wait()
    live = {"w": torch.zeros(2)}
    store.restore(live, step=7)
    assert live["w"].tolist() == [2, 2]


def test_going_back_to_an_older_step_makes_the_next_save_the_newest(open_store: OpenStore) -> None:
    store = open_store()
    live = {"w": torch.zeros(1)}
    for step in (10, 20):
        live["w"].fill_(step)
        store.save(live, step=step).wait()
    store.restore(live, step=10)
    live["w"].fill_(12)
    store.save(live, step=12).wait()
    live["w"].fill_(0)
    assert store.restore(live).step == 12
    assert live["w"].item() == 12


def test_what_changes_after_save_returned_is_not_in_the_snapshot(open_store: OpenStore) -> None:
    reached, go = threading.Event(), threading.Event()
    ops = WatchedOps(hold_at("point:digest", reached, go))
    with use_ops(ops):
        store = open_store()
    model = nn.Linear(2, 2)
    plain, scalar, empty = torch.ones(3), torch.tensor(3), torch.empty(0, 4)
    view = torch.arange(6.0).view(2, 3).t()
    leaves: dict[str, Any] = {"list": [1, [2]], "bytes": b"x" * 1000, "dict": {"k": 1.5}}
    import numpy as np

    array = np.arange(400.0)
    state = {
        "model": model, "plain": plain, "scalar": scalar, "empty": empty, "view": view,
        "leaves": leaves, "array": {"a": array},
    }  # fmt: skip
    weight = model.weight.detach().clone()
    ops.arm()
    handle = store.save(state, step=1)
    assert handle.staged.done()
    assert reached.wait(10)
    with torch.no_grad():
        for tensor in (model.weight, plain, scalar, view):
            tensor.fill_(9)
    leaves["list"][1].append(5)
    leaves["dict"]["k"] = -1
    leaves["bytes"] = b""
    array.fill(0)
    go.set()
    handle.wait()
    store.restore(state)
    assert torch.equal(model.weight, weight)
    assert plain.tolist() == [1, 1, 1]
    assert scalar.item() == 3
    assert view.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert leaves == {"list": [1, [2]], "bytes": b"x" * 1000, "dict": {"k": 1.5}}
    assert (state["array"]["a"] == np.arange(400.0)).all()  # type: ignore[index]


def test_restored_tensors_do_not_alias_stored_memory(open_store: OpenStore) -> None:
    store = open_store(root=None, name="alias", keep=1)
    live: dict[str, Any] = {"w": torch.ones(8), "fresh": {}}
    store.save({"w": torch.ones(8), "fresh": {"t": torch.ones(8)}}, step=1).wait()
    store.restore(live)
    kept = live["fresh"]["t"]
    for step in range(2, 6):
        store.save({"w": torch.full((8,), step), "fresh": {"t": torch.full((8,), step)}}, step=step)
        store.drain()
    assert kept.tolist() == [1] * 8
    kept.fill_(50)
    check: dict[str, Any] = {"w": torch.zeros(8, dtype=torch.int64), "fresh": {}}
    store.restore(check)
    assert check["fresh"]["t"].tolist() == [5] * 8


def _quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


BAD_STATES: dict[str, tuple[Callable[[], Any], str]] = {
    "a bare module": (lambda: nn.Linear(1, 1), '"model": model'),
    "a bare tensor": (lambda: torch.ones(1), "must map names"),
    "sparse": (lambda: {"x": torch.eye(2).to_sparse()}, "sparse"),
    "meta": (lambda: {"x": torch.empty(2, device="meta")}, "meta"),
    "quantized": (lambda: {"x": _quantized()}, "x"),
    "an object": (lambda: {"a": {"b": object()}}, "a.b"),
    "a function": (lambda: {"f": len}, "f"),
    "a set": (lambda: {"s": {1}}, "s"),
    "two paths with one key": (lambda: {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, "a.b"),
    "a lazy module": (lambda: {"m": nn.LazyLinear(2)}, "m"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", BAD_STATES, ids=list(BAD_STATES))
def test_what_cannot_be_stored_is_refused_with_its_path_and_nothing_is_stored(
    open_store: OpenStore, folder: str, case: str
) -> None:
    store = open_store()
    make, named = BAD_STATES[case]
    state = make()
    with pytest.raises(UnsupportedStateError) as caught:
        store.save(state, step=1)
    assert named in str(caught.value)
    assert store.snapshots() == []
    store.save({"w": torch.ones(1)}, step=2).wait()
    store.drain()
    assert _steps(store) == [2]
    assert not list(Path(folder, "root").glob("step-000000000001*"))


@pytest.mark.parametrize("step", [-1, 1.5, True, "3", None, 10**18])
def test_a_step_that_is_none_is_a_value_error(open_store: OpenStore, step: Any) -> None:
    store = open_store()
    with pytest.raises(ValueError, match="step"):
        store.save({"w": torch.ones(1)}, step=step)
    store.save({"w": torch.ones(1)}, step=5).wait()
    assert _steps(store) == [5]


@pytest.mark.parametrize(
    "metadata", [{"loss": float("nan")}, {1: 2}, torch.ones(1), {"x": [object()]}, {"b": b"x"}]
)
def test_metadata_that_json_cannot_hold_is_refused(open_store: OpenStore, metadata: Any) -> None:
    with pytest.raises(UnsupportedStateError, match="metadata"):
        open_store().save({"w": torch.ones(1)}, step=1, metadata=metadata)


def test_save_from_inside_a_forward_is_refused(open_store: OpenStore) -> None:
    store = open_store()

    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            store.save({"model": self}, step=1)
            return self.inner(x)  # type: ignore[no-any-return]

    with pytest.raises(UnsupportedStateError, match="forward"):
        Saving()(torch.ones(1))
    assert store.snapshots() == []


def test_every_call_after_close_says_so(open_store: OpenStore) -> None:
    store = open_store()
    store.close()
    store.close()
    state = {"w": torch.ones(1)}
    for call in (
        lambda: store.save(state, step=1),
        lambda: store.restore(state),
        store.snapshots,
        store.drain,
        lambda: store.delete(1),
        lambda: store.warmup(state),
    ):
        with pytest.raises(ShardStoreError, match="closed"):
            call()


def test_a_store_left_by_an_exception_masks_nothing_and_keeps_memory(open_store: OpenStore) -> None:
    state = {"w": torch.arange(3.0)}
    with pytest.raises(ZeroDivisionError), open_store() as store:
        _save_and_fail(store, state)
    state["w"].zero_()
    assert open_store().restore(state).tier == "memory (1 rank)"
    assert state["w"].tolist() == [0, 1, 2]


def test_a_second_store_of_one_name_takes_over(open_store: OpenStore) -> None:
    state = {"w": torch.arange(3.0)}
    first = open_store()
    first.save(state, step=1)
    second = open_store()
    assert second.restore(state).step == 1
    with pytest.raises(ShardStoreError, match="took over"):
        first.save(state, step=2)
    assert second.save(state, step=2).wait() is not None


def test_a_save_that_is_interrupted_leaves_the_store_usable(open_store: OpenStore) -> None:
    store = open_store()

    class Interrupting:
        def state_dict(self) -> dict[str, Any]:
            raise KeyboardInterrupt

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(KeyboardInterrupt):
        store.save({"x": Interrupting()}, step=1)
    store.save({"w": torch.ones(1)}, step=2).wait()
    store.drain()
    assert _steps(store) == [2]


def test_memory_full_without_a_root_says_what_to_do(open_store: OpenStore) -> None:
    store = open_store(root=None, name="small", memory="300KiB")
    state = {"w": torch.zeros(25_000)}
    for step in (1, 2):
        store.save(state, step=step).wait()
    with pytest.raises(TierFullError, match="keep=") as caught:
        store.save(state, step=3)
    assert caught.value.needed_bytes > 100_000
    assert _steps(store) == [1, 2]
    store.delete(1)
    store.save(state, step=4).wait()
    assert _steps(store) == [2, 4]


def test_memory_stays_bounded_over_many_saves(open_store: OpenStore) -> None:
    threads = threading.active_count()
    store = open_store(keep=2)
    state = {"w": torch.zeros(500_000)}
    for step in range(5):
        store.save(state, step=step).wait()
    descriptors = len(os.listdir("/proc/self/fd"))
    used = store._session.memory.used_bytes
    for step in range(5, 40):
        state["w"].fill_(step)
        store.save(state, step=step).wait()
    store.drain()
    assert store._session.memory.used_bytes <= used
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2
    assert threading.active_count() < threads + 11


def test_restore_refuses_missing_and_unexpected_names_unless_asked(open_store: OpenStore) -> None:
    store = open_store()
    store.save({"a": torch.ones(1), "b": torch.ones(1)}, step=1).wait()
    with pytest.raises(StateMismatchError) as caught:
        store.restore({"a": torch.zeros(1)})
    assert caught.value.unexpected == ("b",)
    live = {"a": torch.zeros(1), "c": torch.full((1,), -5.0)}
    with pytest.raises(StateMismatchError) as caught:
        store.restore(live)
    assert caught.value.missing == ("c",)
    assert live["a"].item() == 0
    report = store.restore(live, strict=False)
    assert (report.missing, report.unexpected) == (("c",), ("b",))
    assert (live["a"].item(), live["c"].item()) == (1, -5)
    assert store.restore({"a": torch.zeros(1)}, partial=True).unexpected == ("b",)


def test_nothing_to_restore_is_an_error_or_none(open_store: OpenStore) -> None:
    store = open_store()
    with pytest.raises(SnapshotNotFoundError, match="required=False"):
        store.restore({"w": torch.ones(1)})
    assert store.restore({"w": torch.ones(1)}, required=False) is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"keep": 0}, "keep"),
        ({"memory": "much"}, "memory"),
        ({"memory": -1}, "memory"),
        ({"root": "nowhere://bucket/run"}, "nowhere://bucket/run"),
        ({"root": ""}, "root"),
        ({"name": ""}, "name"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"on_error": "ignore"}, "on_error"),
        ({"memory": 0}, "root"),
    ],
)
def test_a_bad_argument_is_a_value_error_that_names_it(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SnapshotStore(**options)


def test_many_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(CoordinationError, match="init_process_group"):
        SnapshotStore(memory="1MiB")


def test_listing_needs_no_torch(open_store: OpenStore, folder: str) -> None:
    store = open_store()
    store.save({"w": torch.ones(1)}, step=4, metadata={"k": 1}).wait()
    code = (
        "import sys, shardstore\n"
        f"infos = shardstore.list_snapshots({str(Path(folder) / 'root')!r})\n"
        "print([(i.step, i.metadata, i.tiers) for i in infos], 'torch' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.strip() == "[(4, {'k': 1}, ('root',))] False"


def test_interpreter_exit_without_close_commits_what_was_saved(folder: str) -> None:
    code = (
        "import torch, shardstore\n"
        f"store = shardstore.SnapshotStore({str(Path(folder) / 'root')!r}, memory_dir={folder!r})\n"
        "store.save({'w': torch.ones(1000)}, step=4)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert [info.step for info in list_snapshots(Path(folder) / "root")] == [4]


def test_handles_and_stores_describe_themselves(open_store: OpenStore) -> None:
    store = open_store()
    handle = store.save({"w": torch.ones(1)}, step=4)
    handle.wait()
    assert repr(handle) == "Snapshot(step=4, committed)"
    assert "rank 0 of 1" in repr(store)
    assert "newest in memory 4" in repr(store)


def test_a_restore_leaves_no_reference_to_live_objects(open_store: OpenStore) -> None:
    store = open_store()
    model = nn.Linear(2, 2)
    store.save({"model": model}, step=1).wait()
    gc.collect()
    before = sys.getrefcount(model.weight)
    for _ in range(3):
        store.restore({"model": model})
    after = sys.getrefcount(model.weight)
    assert after == before
