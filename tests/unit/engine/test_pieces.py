"""Pieces of a shard on their way: none waits for those before it."""

from __future__ import annotations

import threading

import pytest

from shardstore.engine.pieces import write_pieces


class Writer:
    """Takes pieces of 10 bytes."""

    piece_bytes = 10
    is_aligned = True
    is_in_order = False

    def __init__(self, num_parallel: int) -> None:
        self.num_parallel = num_parallel

    def write(self, data: memoryview, offset: int) -> None:
        raise NotImplementedError

    def publish(self) -> None:
        raise NotImplementedError

    def discard(self) -> None:
        raise NotImplementedError


def test_the_piece_with_the_header_goes_while_the_last_data_is_still_on_its_way() -> None:
    header_is_there = threading.Event()
    written = []

    def write(start: int, stop: int) -> None:
        if start == 0:
            header_is_there.set()
        else:
            assert header_is_there.wait(30)
        written.append((start, stop))

    write_pieces(Writer(3), [(10, 25), (0, 10)], write, lambda _start: None)
    assert sorted(written) == [(0, 10), (10, 20), (20, 25)]


@pytest.mark.parametrize("num_parallel", [1, 3])
def test_who_waits_before_a_piece_may_end_it_all(num_parallel: int) -> None:
    begun, written = [], []

    def before(start: int) -> None:
        begun.append(start)
        if start == 0:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        write_pieces(
            Writer(num_parallel),
            [(10, 30), (0, 10)],
            lambda start, _stop: written.append(start),
            before,
        )
    assert begun == [10, 20, 0]
    assert sorted(written) == [10, 20]
