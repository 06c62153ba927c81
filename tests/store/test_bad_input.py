"""Arguments that make no sense: refused where they are given, with what would be right, and nothing half done."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardstore import (
    ShardStoreError,
    SnapshotStore,
    TierError,
    UnsupportedStateError,
    list_snapshots,
)
from shardstore.tiers.limits import parse_bytes

LOOP: list[Any] = []
LOOP.append(LOOP)
DEEP: list[Any] = []
for _ in range(5000):
    DEEP = [DEEP]


class Unprintable:
    """Its repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.fixture
def construct(folder: str) -> Iterator[Callable[..., SnapshotStore]]:
    """Construct a store as told; nothing may be left of one that is refused."""
    before = os.getcwd()
    made: list[SnapshotStore] = []
    (Path(folder) / "memory").mkdir()
    os.chdir(folder)

    def one(**given: Any) -> SnapshotStore:
        options: dict[str, Any] = {
            "root": Path(folder) / "root",
            "memory": "1MiB",
            "memory_dir": Path(folder) / "memory",
        } | given
        made.append(SnapshotStore(options.pop("root"), **options))
        return made[-1]

    yield one
    for store in made:
        store.take_leave("the test ends")
    os.chdir(before)


def _refused(
    construct: Callable[..., SnapshotStore],
    match: str,
    kind: type[Exception] = ValueError,
    **options: Any,
) -> None:
    with pytest.raises(kind, match=match) as caught:
        construct(**options)
    assert len(str(caught.value)) < 600
    assert sorted(os.listdir(".")) == ["memory"], "nothing is made"
    assert os.listdir("memory") == []


@pytest.mark.parametrize(
    "memory",
    [-1, "12 parsecs", math.nan, math.inf, 1e30, 5.0, True, "-1GiB", "", " ", None, [], {}, b"1GiB", 10**30,
     1 << 60, "1e3", "inf", "nan", "\uff11GiB", "0.1", "1GiB2", "1 G i B", "9" * 400 + "GiB", "GiB", "auto ",
     torch.tensor(1.5), np.float64(4096), "AUTO", Unprintable()],
    ids=lambda _: "",
)  # fmt: skip
def test_budgets(construct: Callable[..., SnapshotStore], memory: Any) -> None:
    _refused(construct, r"memory", memory=memory)


def test_budget_zero_needs_a_root(construct: Callable[..., SnapshotStore]) -> None:
    for zero in (0, "0", "0GiB"):
        _refused(construct, "needs a root", root=None, memory=zero)
        assert parse_bytes(zero, what="memory") == 0


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("24GiB", 24 << 30), ("24 gib", 24 << 30), ("500MB", 500 * 10**6), ("1.5k", 1500), ("7", 7), ("64Mi", 64 << 20),
     (np.int64(5), 5), (torch.tensor(5), 5), ((1 << 60) - 1, (1 << 60) - 1)],
)  # fmt: skip
def test_budgets_that_are_fine(text: Any, nbytes: int) -> None:
    assert parse_bytes(text, what="memory") == nbytes


@pytest.mark.parametrize(
    ("root", "match"),
    [("", "non-empty path"), (b"/tmp/x", "path"), ("a\0b", "path"), (3, "path"), (Unprintable(), "path"),
     ("nowhere://bucket/x", "no storage is known by"), ("s3://b/../x", "clients take for another")],
    ids=range(7),
)  # fmt: skip
def test_roots(construct: Callable[..., SnapshotStore], root: Any, match: str) -> None:
    _refused(construct, match, root=root)
    with pytest.raises(ValueError, match=match):
        list_snapshots(root)


@pytest.mark.parametrize("below", ["", "/below", "/deep/below"])
def test_a_root_or_memory_dir_that_is_a_file(folder: str, below: str) -> None:
    file = Path(folder) / "file"
    file.write_text("mine")
    given = f"{file}{below}"
    with pytest.raises(TierError, match=f"{file} is a file"):
        SnapshotStore(given, memory="1MiB", memory_dir=folder)
    with pytest.raises(TierError, match=f"{file} is a file"):
        SnapshotStore(Path(folder) / "root", memory="1MiB", memory_dir=given)
    assert file.read_text() == "mine"
    assert not (Path(folder) / "root").exists()
    with SnapshotStore(Path(folder) / "root", memory=0, memory_dir=given) as store:
        store.save({"w": torch.ones(1)}, step=1).wait(20)  # it is not used then


@pytest.mark.parametrize(
    "memory_dir", ["", b"/dev/shm", "a\0b", 3, None, "s3://x/y", "file:///dev/shm"], ids=str
)
def test_memory_dirs(construct: Callable[..., SnapshotStore], memory_dir: Any) -> None:
    _refused(construct, "memory_dir must be", memory_dir=memory_dir)


@pytest.mark.parametrize("name", ["", 3, b"x", "\ud800", ["x"], Unprintable()], ids=range(6))
def test_names(construct: Callable[..., SnapshotStore], name: Any) -> None:
    _refused(construct, "name must be", name=name)


@pytest.mark.parametrize("name", ["a/b", "..", ".", "a\0b", "x" * 5000, "\u00e9 \u4e16", "~"])
def test_odd_names_stay_in_their_folder(construct: Callable[..., SnapshotStore], name: str) -> None:
    store = construct(name=name)
    store.save({"w": torch.ones(1)}, step=1).wait(20)
    users = list(Path("memory").iterdir())
    assert len(users) == 1
    assert len(list(users[0].iterdir())) == 1


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("keep", [0, -1, 1.5, "3", True, 10**30, [], math.nan, torch.tensor(1.5)]),
        (
            "timeout_s",
            [0, -1, math.nan, math.inf, "3", True, None, 1e300, 10**400, b"", [], torch.ones(2)],
        ),
        ("on_full", [None, "x", 3, [], "WAIT", True]),
        ("on_error", [None, "x", 3, [], "RAISE", True]),
    ],
)
def test_other_arguments(
    construct: Callable[..., SnapshotStore], argument: str, values: list[Any]
) -> None:
    for value in values:
        _refused(construct, argument, **{argument: value})


def test_numbers_of_other_libraries_are_numbers(construct: Callable[..., SnapshotStore]) -> None:
    store = construct(keep=np.int64(2), timeout_s=np.float32(9), memory=np.int32(1 << 20))
    state = {"w": torch.ones(1)}
    steps: list[Any] = [np.int64(1), torch.tensor(2), np.uint8(3)]
    for step in steps:
        info = store.save(state, step=step).wait(20)
        assert info is not None
        assert type(info.step) is int
    assert [info.step for info in store.snapshots()] == [2, 3]


def test_a_root_on_a_tmpfs_is_told_once_at_construction(
    construct: Callable[..., SnapshotStore], caplog: pytest.LogCaptureFixture, disk_folder: Path
) -> None:
    with caplog.at_level(logging.WARNING, logger="shardstore"):
        construct()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    for named in (
        f"{os.getcwd()}/root",
        "on a tmpfs",
        "gone after a reboot",
        "twice",
        f"{os.getcwd()}/memory",
    ):
        assert named in told[0]
    caplog.clear()
    construct(memory=0)
    assert "twice" not in caplog.text
    assert "on a tmpfs" in caplog.text
    caplog.clear()
    if os.stat(disk_folder).st_dev != os.stat("/dev/shm").st_dev:
        construct(root=disk_folder / "root" / "run")
        assert caplog.text == ""


STEPS = [1.0, "1", b"1", True, None, -1, 2**63, 10**18, 10**400, -(10**400), math.nan, np.float32(1), np.True_,
         torch.tensor(4.0), torch.tensor([1, 2]), torch.tensor(True), [1], Unprintable()]  # fmt: skip


def _with(store: SnapshotStore, state: dict[str, Any]) -> None:
    """The store is as good as before."""
    state["w"].fill_(5)
    info = store.save(state, step=5).wait(20)
    assert info is not None
    state["w"].fill_(-1)
    assert store.restore(state).step == 5
    assert set(state["w"].tolist()) == {5}
    assert [i.step for i in store.snapshots()] == [5]
    store.delete(5)


@pytest.mark.parametrize("step", STEPS, ids=range(len(STEPS)))
def test_steps(construct: Callable[..., SnapshotStore], step: Any) -> None:
    store = construct(timeout_s=20.0)
    state = {"w": torch.ones(10)}
    calls: list[Callable[[], Any]] = [
        lambda: store.save(state, step=step),
        lambda: store.delete(step),
    ]
    if step is not None:
        calls += [
            lambda: store.restore(state, step=step),
            lambda: store.swapped(state, step=step).__enter__(),
        ]
    for call in calls:
        with pytest.raises(ValueError, match="step must be") as caught:
            call()
        assert len(str(caught.value)) < 200
        assert set(state["w"].tolist()) == {1}
    store.drain()  # what was raised is not raised again
    assert store.snapshots() == []
    _with(store, state)


@pytest.mark.parametrize("step", [0, 10**12 - 1, 10**12, 10**13, 10**18 - 1])
def test_steps_of_any_width_come_back_in_order(
    construct: Callable[..., SnapshotStore], step: int
) -> None:
    store = construct(timeout_s=20.0)
    state = {"w": torch.ones(10)}
    for number, at in enumerate((step, 7)):
        state["w"].fill_(number)
        store.save(state, step=at).wait(20)
    assert [info.step for info in store.snapshots()] == [step, 7], "in the order they were saved"
    assert store.restore(state, step=step).step == step
    assert set(state["w"].tolist()) == {0}
    store.close()
    assert [info.step for info in list_snapshots("root")] == [step, 7]


METADATA = [math.nan, math.inf, {"a": {1, 2}}, {1: 2}, {None: 1}, torch.tensor(1), b"x", LOOP, DEEP, {"a": [DEEP]}, "\ud800",
            {"\ud800": 1}, 2**64, -(2**63) - 1, object(), np.int64(3), np.float32(1), 1j, Unprintable(), lambda: 1]  # fmt: skip


@pytest.mark.parametrize("metadata", METADATA, ids=range(len(METADATA)))
def test_metadata_that_is_no_json(construct: Callable[..., SnapshotStore], metadata: Any) -> None:
    store = construct(timeout_s=20.0)
    state = {"w": torch.ones(10)}
    with pytest.raises(UnsupportedStateError, match=r"metadata.* must be JSON") as caught:
        store.save(state, step=1, metadata=metadata)
    assert len(str(caught.value)) < 600
    assert caught.value.path.startswith("metadata")
    _with(store, state)


def test_metadata_may_be_large_and_is_refused_when_no_header_can_hold_it(
    construct: Callable[..., SnapshotStore],
) -> None:
    store = construct(memory="64MiB", timeout_s=60.0)
    state = {"w": torch.ones(10)}
    large = {
        "text": "x" * 10_000_000,
        "deep": [[[{"a": None}]]],
        "int": 2**64 - 1,
        "least": -(2**63),
    }
    store.save(state, step=1, metadata=large).wait(60)
    assert store.restore(state).metadata == large
    with pytest.raises(ShardStoreError, match=r"header of .* bytes does not fit"):
        store.save(state, step=2, metadata="x" * 100_000_000)
    assert [info.step for info in store.snapshots()] == [1]
    store.delete(1)
    _with(store, state)


@pytest.mark.parametrize(
    "state",
    [[("w", torch.zeros(1))], None, nn.Linear(1, 1), 3, {1: torch.zeros(1)}, "w", {"w": object()}],
    ids=range(7),
)
def test_states_that_are_none(construct: Callable[..., SnapshotStore], state: Any) -> None:
    store = construct(timeout_s=20.0)
    with pytest.raises(UnsupportedStateError):
        store.save(state, step=1)
    good = {"w": torch.ones(10)}
    _with(store, good)
    store.save(good, step=6).wait(20)
    with pytest.raises(ShardStoreError):
        store.restore(state)


def test_persist_is_true_or_false(construct: Callable[..., SnapshotStore]) -> None:
    store = construct(timeout_s=20.0)
    state = {"w": torch.ones(10)}
    for persist in ("no", None, 1, np.True_):
        with pytest.raises(ValueError, match="persist must be True or False"):
            store.save(state, step=1, persist=persist)  # type: ignore[arg-type]
    _with(store, state)


@pytest.mark.parametrize("timeout_s", [math.nan, -1, 1e300, math.inf, "1", True, [], b"1"])
def test_patience(construct: Callable[..., SnapshotStore], timeout_s: Any) -> None:
    store = construct(timeout_s=20.0)
    state = {"w": torch.ones(10)}
    handle = store.save(state, step=1)
    for call in (handle.wait, store.drain):
        with pytest.raises(ValueError, match="timeout_s must be"):
            call(timeout_s)
    assert handle.wait(20) is not None
    assert handle.wait(0) is not None
    store.drain(20)
    store.delete(1)
    _with(store, state)
