"""What the benchmarks say can be relied on: verdicts, refused peers, memory, slow-down."""

from __future__ import annotations

import mmap
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from benchmarks.children import ChildError, call, child
from benchmarks.memory import peak_of
from benchmarks.report import page
from benchmarks.single import usable
from benchmarks.slowdown import disturb
from benchmarks.systems import State, System
from benchmarks.table import Table, Target

MIB = 1 << 20


def test_a_target_is_met_not_met_or_not_measured() -> None:
    table = Table("some state", 10**9, 3)
    for ours, theirs in ((1.0, 2.0), (9.0, 3.0), (1.5, 3.5)):
        table.add("ours", ours)
        table.add("theirs", theirs)
    table.targets = [
        Target("half the seconds", "ours", "<= 0.50", "theirs"),
        Target("fewer than half", "ours", "<= 0.49", "theirs"),
        Target("twice the speed", "ours", ">= 2.00", "theirs", is_speed=True),
        Target("more than twice", "ours", ">= 2.01", "theirs", is_speed=True),
        Target("seconds", "ours", "<= 1.5"),
        Target("of a peer that does not run", "ours", "<= 1", "missing"),
    ]
    assert [verdict for _, _, verdict in table.verdicts()] == [
        "met", "NOT MET", "met", "NOT MET", "met", "not measured",
    ]  # fmt: skip
    again = Table.from_json(table.to_json())
    assert list(again.verdicts()) == list(table.verdicts())


class Good(System):
    name = "good"

    def save(self, state: State) -> tuple[float, float]:
        self.kept = {name: tensor.clone() for name, tensor in state.items()}
        return 0.1, 0.2

    def read(self, state: State) -> None:
        for name, tensor in state.items():
            tensor.copy_(self.kept[name])


class Forgetful(Good):
    name = "forgetful"

    def read(self, state: State) -> None:
        for tensor in state.values():
            tensor.zero_()


class Broken(Good):
    name = "broken"

    def save(self, state: State) -> tuple[float, float]:
        raise OSError("no room\nfor this")


class Absent(Good):
    name = "absent"

    @classmethod
    def why_not(cls) -> str | None:
        return "not installed"


def test_a_peer_that_fails_or_loads_other_values_is_told_and_the_state_is_put_back(
    tmp_path: Path,
) -> None:
    state = {"w": torch.arange(4.0)}
    copy = {"w": state["w"].clone()}
    table = Table("some state", 16, 1)
    found = usable((Forgetful, Broken, Absent, Good), table, tmp_path, state, copy)
    assert [system.name for system in found] == ["good"]
    assert torch.equal(state["w"], copy["w"])
    assert table.not_measured == {
        "forgetful": "AssertionError: forgetful loaded other values into w",
        "broken": "OSError: for this",
        "absent": "not installed",
    }
    for what, why in table.not_measured.items():
        assert f"- {what}: {why}" in page(
            [{"machine": {}, "command": "", "tables": [table.to_json()]}]
        )


def _grow(connection: Connection) -> None:
    connection.send("ready")
    connection.recv()
    private = bytearray(os.urandom(MIB)) * 24
    fd = os.memfd_create("grown")
    os.ftruncate(fd, 16 * MIB)
    with mmap.mmap(fd, 16 * MIB) as shared:
        for _ in range(16):
            shared.write(b"x" * MIB)
        connection.send("done")
        connection.recv()
    os.close(fd)
    del private


def test_peak_memory_counts_private_and_shared_pages_of_a_child() -> None:
    with child(_grow) as started:
        assert peak_of([started]) >= 39 * MIB


def _fail() -> None:
    raise ValueError("in the child")


def _exit() -> None:
    os._exit(3)


def test_a_child_that_fails_or_dies_is_told() -> None:
    with pytest.raises(ChildError, match="ValueError: in the child"):
        call(_fail)
    with pytest.raises(ChildError, match="exit code 3"):
        call(_exit)


class SlowsWork:
    """Pending for some calls of `done`; work takes four times as long until then."""

    def __init__(self, num_calls: int) -> None:
        self.left = num_calls

    def begin(self) -> SlowsWork:
        self.is_on = True
        return self

    is_on = False

    def done(self) -> bool:
        self.left -= 1
        self.is_on = self.left > 0
        return not self.is_on

    def result(self) -> None:
        assert not self.is_on

    def work(self) -> None:
        for _ in range(4000 if self.is_on else 1000):
            pass


def test_work_that_takes_longer_beside_a_save_is_seen() -> None:
    slows = SlowsWork(2000)
    slower, lost_s = disturb(slows.work, slows.begin, alone_s=0.1)
    assert slower > 0.5
    assert lost_s > 0
