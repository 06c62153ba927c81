"""save(overlap=True): parameters and optimizer state are copied behind training, and steps wait for it."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from shardstore import SaveFailedError, SnapshotStore
from shardstore.tiers.fileops import use_ops
from tests.faults.breaking_ops import WatchedOps, hold_at, raise_at
from tests.store.conftest import OpenStore


def is_over(call: Future[Any]) -> bool:
    """Whether a call ends within the time that one which waits for nothing takes many times over."""
    return call in wait([call], timeout=0.3).done


class Held:
    """A store whose late copies wait for `go`."""

    def __init__(self, open_store: OpenStore, **options: Any) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        ops = WatchedOps(hold_at("point:late copy", self.reached, self.go))
        with use_ops(ops):
            self.store: SnapshotStore = open_store(**options)
        ops.arm()


@pytest.fixture
def hold(open_store: OpenStore) -> Iterator[Callable[..., Held]]:
    made: list[Held] = []

    def one(**options: Any) -> Held:
        made.append(Held(open_store, **options))
        return made[-1]

    yield one
    for held in made:
        held.go.set()


@pytest.fixture
def behind() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def trained(**options: Any) -> dict[str, Any]:
    """A model and an optimizer that have stepped once, and gradients for the next step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    for _ in range(2):
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def values(state: dict[str, Any]) -> list[torch.Tensor]:
    """All parameters and moments, copied."""
    moments = [t for entry in state["optimizer"].state.values() for t in entry.values()]
    return [t.detach().clone() for t in (*state["model"].state_dict().values(), *moments)]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_step_waits_and_the_snapshot_has_the_values_of_the_save(
    hold: Callable[..., Held], behind: ThreadPoolExecutor
) -> None:
    held, state = hold(), trained()
    before = values(state)
    snapshot = held.store.save(state, step=1, overlap=True)
    assert held.reached.wait(20)
    assert not snapshot.staged.done()
    step = behind.submit(state["optimizer"].step)
    assert not is_over(step)
    assert same(values(state), before)
    held.go.set()
    step.result(20)
    assert snapshot.staged.result(20) is None
    assert not same(values(state), before)
    assert snapshot.wait(20) is not None
    held.store.restore(state)
    assert same(values(state), before)


def test_what_others_than_optimizers_write_to_is_copied_before_save_returns(
    hold: Callable[..., Held],
) -> None:
    held = hold()
    state = trained() | {
        "plain": torch.ones(3),
        "average": nn.Linear(2, 2),
        "leaves": {"epoch": 1, "list": [1.0]},
    }
    state["lr"] = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=torch.tensor(0.5))
    wanted = copy.deepcopy(state)
    held.store.save(state, step=1, overlap=True)
    assert held.reached.wait(20)
    with torch.no_grad():
        state["model"][1].running_mean.fill_(9)
        state["plain"].fill_(9)
        state["average"].weight.fill_(9)
        state["lr"].param_groups[0]["lr"].fill_(9)
    state["leaves"]["epoch"] = 9
    state["leaves"]["list"][0] = 9.0
    held.go.set()
    held.store.restore(state)
    assert torch.equal(state["model"][1].running_mean, wanted["model"][1].running_mean)
    assert state["plain"].tolist() == [1, 1, 1]
    assert torch.equal(state["average"].weight, wanted["average"].weight)
    assert float(state["lr"].param_groups[0]["lr"]) == 0.5
    assert state["leaves"] == {"epoch": 1, "list": [1.0]}


def test_parameters_that_are_moved_meanwhile_are_stored_as_they_were(
    hold: Callable[..., Held],
) -> None:
    held, state = hold(), trained()
    before = values(state)
    held.store.save(state, step=0)  # the next one remembers the structure
    held.store.save(state, step=1, overlap=True)
    assert held.reached.wait(20)
    for parameter in state["model"].parameters():
        parameter.data = torch.zeros_like(parameter)
    for entry in state["optimizer"].state.values():
        for key, value in entry.items():
            entry[key] = torch.zeros_like(value)
    held.go.set()
    held.store.restore(state)
    assert same(values(state), before)


def test_optimizers_that_step_within_backward_wait(
    hold: Callable[..., Held], behind: ThreadPoolExecutor
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizers = {n: torch.optim.Adam([p], lr=0.1) for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():

        def step(_: torch.Tensor, own: torch.optim.Optimizer = optimizers[name]) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]

    def train() -> None:
        model(torch.ones(2, 3)).sum().backward()

    held = hold()  # the optimizers are older than the store, and newer than the hook below
    train()
    before = copy.deepcopy(model.state_dict())
    held.store.save({"model": model, "optimizers": optimizers}, step=1, overlap=True)
    assert held.reached.wait(20)
    backward = behind.submit(train)
    assert not is_over(backward)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    held.go.set()
    backward.result(20)
    assert not any(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    held.store.restore({"model": model}, partial=True)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


class Delegating(torch.optim.Optimizer):
    """As Accelerate's: an Optimizer by type only, which hands everything to the one inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


class Several(torch.optim.Optimizer):
    """As torchtitan's: initialised as an Optimizer, with the real ones in a list."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        params = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        super().__init__(params, {})

    def state_dict(self) -> dict[str, Any]:
        return {str(i): o.state_dict() for i, o in enumerate(self.optimizers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for i, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state_dict[str(i)])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()


@pytest.mark.parametrize("wrap", [Delegating, lambda inner: Several([inner])])
def test_the_step_of_a_wrapped_optimizer_waits(
    hold: Callable[..., Held], behind: ThreadPoolExecutor, wrap: Callable[..., Any]
) -> None:
    held, state = hold(), trained()
    wrapped = wrap(state["optimizer"])
    before = values(state)
    saved = {"model": state["model"], "optimizer": wrapped}
    snapshot = held.store.save(saved, step=1, overlap=True)
    assert held.reached.wait(20)
    assert not snapshot.staged.done()
    step = behind.submit(wrapped.step)
    assert not is_over(step)
    held.go.set()
    step.result(20)
    held.store.restore(saved)
    assert same(values(state), before)


def test_weights_tied_across_modules_are_late_once(hold: Callable[..., Held]) -> None:
    held, state = hold(), trained()
    head = nn.Linear(5, 7, bias=False)
    weight: Any = state["model"][0].weight
    head.weight = weight
    state["head"] = head
    before = values(state)
    held.store.save(state, step=1, overlap=True)
    assert held.reached.wait(20)
    held.go.set()
    with torch.no_grad():
        held.store.drain(20)
        weight.zero_()
    held.store.restore(state)
    assert same(values(state), before)


def test_a_parameter_whose_memory_has_another_name_is_copied_before_save_returns(
    hold: Callable[..., Held],
) -> None:
    held = hold()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD([model.weight])
    row = model.weight.detach()[1]
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "row": row}
    snapshot = held.store.save(state, step=1, overlap=True)
    assert snapshot.staged.done()
    wanted = model.weight.detach().clone()
    row.zero_()
    held.store.restore(state)
    assert torch.equal(model.weight, wanted)


def _restore(store: SnapshotStore, state: dict[str, Any]) -> None:
    store.restore(state)


def _save(store: SnapshotStore, state: dict[str, Any]) -> None:
    store.save(state, step=2).wait(20)


def _swap(store: SnapshotStore, state: dict[str, Any]) -> None:
    with store.swapped(state):
        pass


def _delete(store: SnapshotStore, state: dict[str, Any]) -> None:
    store.delete(1)


def _close(store: SnapshotStore, state: dict[str, Any]) -> None:
    store.close()


def _leave(store: SnapshotStore, state: dict[str, Any]) -> None:
    store.take_leave("the test says so")


@pytest.mark.parametrize("call", [_restore, _save, _swap, _delete, _close, _leave])
def test_other_calls_wait_for_the_late_copy(
    hold: Callable[..., Held], behind: ThreadPoolExecutor, call: Callable[..., None]
) -> None:
    held, state = hold(), trained()
    before = values(state)
    snapshot = held.store.save(state, step=1, overlap=True)
    assert held.reached.wait(20)
    other = behind.submit(call, held.store, state)
    assert not is_over(other)
    assert not snapshot.staged.done()
    held.go.set()
    other.result(20)
    assert snapshot.wait(20) is not None
    assert same(values(state), before)


def test_a_late_copy_that_was_left_by_an_exception_is_found_by_the_next_store(
    hold: Callable[..., Held], open_store: OpenStore
) -> None:
    held, state = hold(root=None, name="job"), trained()
    before = values(state)

    def save_and_fail() -> None:
        with held.store:
            held.store.save(state, step=1, overlap=True)
            assert held.reached.wait(20)
            held.go.set()
            raise KeyError

    with pytest.raises(KeyError):
        save_and_fail()
    state["optimizer"].step()
    store = open_store(root=None, name="job")
    store.restore(state)
    assert same(values(state), before)


def test_a_late_copy_that_fails_fails_the_save_and_not_the_step(open_store: OpenStore) -> None:
    ops = WatchedOps(raise_at("point:late copy", OSError("no more")))
    with use_ops(ops):
        store = open_store(memory=20_000)  # room for one
    state = trained()
    ops.arm()
    snapshot = store.save(state, step=1, overlap=True)
    assert snapshot.staged.result(20) is None
    state["optimizer"].step()
    with pytest.raises(SaveFailedError, match="no more"):
        snapshot.wait(20)
    with pytest.raises(SaveFailedError, match="no more"):
        store.drain(20)
    assert store.save(state, step=2, overlap=True).wait(20) is not None
    assert store.stats().num_streamed == 0
    assert [info.step for info in store.snapshots()] == [2]


def test_a_save_that_raises_once_its_late_copy_is_planned_never_makes_it(
    open_store: OpenStore,
) -> None:
    ops = WatchedOps(raise_at("point:staged", OSError(5, "broken")))
    with use_ops(ops):
        store = open_store()
    state = trained()
    store.save(state, step=1).wait(20)
    ops.arm()
    with pytest.raises(OSError, match="broken"):
        store.save(state, step=2, overlap=True)
    store.save(state, step=3).wait(20)  # into the slot that the second one gave back
    assert "point:late copy" not in ops.names
    assert [info.step for info in store.snapshots()] == [1, 3]
    store.drain()


def test_a_step_past_the_deadline_goes_on_and_its_snapshot_is_dropped(
    hold: Callable[..., Held],
) -> None:
    held, state = hold(timeout_s=2.0), trained()
    snapshot = held.store.save(state, step=1, overlap=True)
    assert held.reached.wait(20)
    state["optimizer"].step()
    held.go.set()
    with pytest.raises(SaveFailedError, match="may be of two steps"):
        snapshot.wait(20)
    assert held.store.snapshots() == []
    with pytest.raises(SaveFailedError):
        held.store.close()


def test_a_restore_past_the_deadline_goes_on_and_the_snapshot_is_dropped(
    hold: Callable[..., Held],
) -> None:
    held, state = hold(timeout_s=2.0), trained()
    held.store.save(state, step=1).wait(20)
    before = values(state)
    state["optimizer"].step()
    snapshot = held.store.save(state, step=2, overlap=True)
    assert held.reached.wait(20)
    held.store.restore(state, step=1)
    assert same(values(state), before)
    held.go.set()
    with pytest.raises(SaveFailedError, match="may be of two steps"):
        snapshot.wait(20)
    with pytest.raises(SaveFailedError):
        held.store.close()


@pytest.mark.parametrize("memory", [0, "64MiB"])
def test_a_state_that_is_streamed_or_has_no_optimizer_is_copied_before_save_returns(
    hold: Callable[..., Held], memory: int | str
) -> None:
    held, state = hold(memory=memory), trained()
    if memory:
        del state["optimizer"]
    assert held.store.save(state, step=1, overlap=True).staged.done()


def test_a_step_waits_for_every_store(
    hold: Callable[..., Held], behind: ThreadPoolExecutor
) -> None:
    first, second, state = hold(root="a"), hold(root="b"), trained()
    for held in (first, second):
        held.store.save(state, step=1, overlap=True)
        assert held.reached.wait(20)
    step = behind.submit(state["optimizer"].step)
    first.go.set()
    assert not is_over(step)
    second.go.set()
    step.result(20)


def test_the_hook_comes_with_the_first_late_copy_and_goes_with_the_store(
    open_store: OpenStore,
) -> None:
    hooks = torch_optimizer._global_optimizer_pre_hooks
    before, state = len(hooks), trained()
    store = open_store()
    store.save(state, step=1)
    assert len(hooks) == before
    for step in (2, 3):
        store.save(state, step=step, overlap=True)
        assert len(hooks) == before + 1
    store.close()
    assert len(hooks) == before


def test_every_byte_is_counted_once(open_store: OpenStore) -> None:
    store, state = open_store(), trained()
    store.save(state, step=1).wait(20)
    whole = store.stats().stage.nbytes
    store.save(state, step=2, overlap=True).wait(20)
    assert store.stats().stage.nbytes == 2 * whole


# Torch warns of itself while it traces its own optimizers; of the hook it must see nothing.
@pytest.mark.filterwarnings("ignore", "error:Dynamo does not know how to trace")
def test_an_optimizer_step_that_is_compiled_waits(
    hold: Callable[..., Held], behind: ThreadPoolExecutor
) -> None:
    held, state = hold(), trained()
    before = values(state)
    step = torch.compile(state["optimizer"].step, backend="eager")
    held.store.save(state, step=1, overlap=True)
    assert held.reached.wait(20)
    stepped = behind.submit(step)
    assert not is_over(stepped)
    held.go.set()
    stepped.result(60)
    held.store.restore(state)
    assert same(values(state), before)


_EXITING = """
    import sys, torch
    from shardstore import SnapshotStore
    model = torch.nn.Linear(1000, 1000)
    with torch.no_grad():
        model.weight.fill_(3)
    optimizer = torch.optim.SGD(model.parameters())
    store = SnapshotStore(sys.argv[1], memory="64MiB", memory_dir=sys.argv[2])
    store.save({"model": model, "optimizer": optimizer}, step=1, overlap=True)
"""


def test_the_interpreter_ends_after_the_late_copy(folder: str, open_store: OpenStore) -> None:
    (Path(folder) / "memory").mkdir()
    arguments = [str(Path(folder) / "root"), str(Path(folder) / "memory")]
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_EXITING), *arguments], check=True, timeout=60
    )
    model = nn.Linear(1000, 1000)
    open_store().restore({"model": model}, partial=True)
    assert bool((model.weight == 3).all())
