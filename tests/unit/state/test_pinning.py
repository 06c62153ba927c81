"""Page-locking of slots, with a runtime that keeps account of what is registered."""

from __future__ import annotations

import ctypes
import logging
import mmap
from pathlib import Path

import pytest
import torch

from shardstore.state.pinning import PageLocks
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.slotfiles import SlotFiles

DEVICE = torch.device("cuda", 3)


class Accounts:
    """A runtime's book: what is registered, and whether it was still mapped when it was let go of."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.ranges: dict[int, int] = {}
        self.devices: list[torch.device] = []
        self.num_calls = self.num_cleared = 0

    def __call__(self, device: torch.device) -> Accounts:
        self.devices.append(device)
        return self

    def register(self, address: int, nbytes: int) -> int:
        self.num_calls += 1
        if self.code == 0:
            self.ranges[address] = nbytes
        return self.code

    def unregister(self, address: int) -> int:
        ctypes.string_at(address, self.ranges.pop(address))  # dies if it is not mapped any more
        return self.code

    def clear_error(self) -> None:
        self.num_cleared += 1


def _files(folder: str) -> SlotFiles:
    return SlotFiles(str(Path(folder) / "job"), rank=0, owner="0" * 8, ops=FileOps())


@pytest.mark.parametrize("nbytes", [1, 4096, 10_000])
def test_a_slot_is_registered_as_one_range_of_whole_pages(folder: str, nbytes: int) -> None:
    slot, accounts = _files(folder).allocate(nbytes), Accounts()
    assert slot is not None
    lock = PageLocks(accounts).lock(slot.view, DEVICE)
    assert lock is not None
    ((address, length),) = accounts.ranges.items()
    assert address % mmap.PAGESIZE == 0
    assert length % mmap.PAGESIZE == 0
    assert nbytes <= length < nbytes + mmap.PAGESIZE
    assert accounts.devices == [DEVICE]


@pytest.mark.parametrize("is_named", [True, False])
def test_memory_is_let_go_of_before_it_is_unmapped(folder: str, is_named: bool) -> None:
    files, accounts = _files(folder), Accounts()
    slot = files.allocate(10_000) if is_named else files.allocate_anonymous(10_000)
    assert slot is not None
    slot.views = PageLocks(accounts).lock(slot.view, DEVICE)
    assert accounts.ranges
    files.free(slot)
    assert not accounts.ranges
    assert slot.mapping.closed


def test_a_copy_under_way_keeps_memory_registered_and_mapped(folder: str) -> None:
    files, accounts = _files(folder), Accounts()
    slot = files.allocate(10_000)
    assert slot is not None
    slot.views = lock = PageLocks(accounts).lock(slot.view, DEVICE)
    files.free(slot)
    ((address, nbytes),) = accounts.ranges.items()
    ctypes.memset(address, 1, nbytes)
    del lock
    assert not accounts.ranges


def test_a_failure_is_said_once_cleared_and_not_tried_again(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    slot, accounts = _files(folder).allocate(10_000), Accounts(code=1)
    assert slot is not None
    locks = PageLocks(accounts)
    with caplog.at_level(logging.WARNING, "shardstore"):
        assert locks.lock(slot.view, DEVICE) is None
        assert locks.lock(slot.view, DEVICE) is None
    assert (accounts.num_calls, accounts.num_cleared) == (1, 1)
    (said,) = caplog.messages
    assert "10,000" not in said
    assert "12,288 bytes" in said
    assert "error 1" in said


def test_a_runtime_that_does_not_let_go_is_reported_and_nothing_raises(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    slot, accounts = _files(folder).allocate(4096), Accounts()
    assert slot is not None
    lock = PageLocks(accounts).lock(slot.view, DEVICE)
    accounts.code = 4
    with caplog.at_level(logging.WARNING, "shardstore"):
        del lock
    assert accounts.num_cleared == 1
    assert "error 4" in caplog.text


def test_nothing_is_nothing_to_register() -> None:
    accounts = Accounts()
    assert PageLocks(accounts).lock(memoryview(b""), DEVICE) is None
    assert accounts.num_calls == 0
