"""Memory that is lent to a request is not touched after it was taken back."""

from __future__ import annotations

import pytest

from shardstore.tiers.remote.lent import Lent


def test_lent_memory_is_read_and_filled_in_pieces() -> None:
    memory = bytearray(b"0123456789")
    with Lent(memoryview(memory)[2:8]) as lent:
        assert lent.nbytes == 6
        assert lent.read(1, 3) == b"34"
        lent.write(4, b"xy")
    assert memory == b"012345xy89"


def test_what_does_not_fit_is_not_written() -> None:
    memory = bytearray(10)
    with Lent(memoryview(memory)[:4]) as lent, pytest.raises(ValueError):
        lent.write(3, b"xy")
    assert memory == bytes(10)


def test_who_comes_after_the_memory_was_taken_back_gets_nothing_of_it() -> None:
    memory = bytearray(b"0123456789")
    lent = Lent(memoryview(memory))
    lent.take_back()
    lent.take_back()
    memory.extend(b"!")  # a BufferError while a view of it is left
    with pytest.raises(ValueError, match="taken back"):
        lent.read(0, 1)
    with pytest.raises(ValueError, match="taken back"):
        lent.write(0, b"x")
    assert memory == b"0123456789!"
