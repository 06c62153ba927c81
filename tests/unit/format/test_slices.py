from __future__ import annotations

import pytest

from shardstore.format.slices import TensorSlice, contains, overlap, whole


def test_a_box_counts_its_elements() -> None:
    assert TensorSlice((1, 0), (2, 3)).num_elements == 6
    assert TensorSlice((), ()).num_elements == 1
    assert TensorSlice((4,), (0,)).num_elements == 0
    assert TensorSlice((1, 2), (3, 4)).ends == (4, 6)


def test_boxes_overlap_in_the_elements_that_both_hold() -> None:
    a, b = TensorSlice((0, 0), (3, 4)), TensorSlice((2, 1), (5, 2))
    assert overlap(a, b) == overlap(b, a) == TensorSlice((2, 1), (1, 2))
    assert overlap(TensorSlice((), ()), TensorSlice((), ())) == TensorSlice((), ())


def test_touching_and_empty_boxes_do_not_overlap() -> None:
    assert overlap(TensorSlice((0,), (3,)), TensorSlice((3,), (2,))) is None
    assert overlap(TensorSlice((1,), (0,)), TensorSlice((0,), (3,))) is None


def test_a_box_contains_what_lies_inside_it() -> None:
    outer = whole((4, 4))
    assert contains(outer, TensorSlice((1, 0), (3, 4)))
    assert not contains(outer, TensorSlice((1, 0), (4, 4)))
    assert contains(outer, TensorSlice((9, 9), (0, 1)))


def test_numbers_that_make_no_box_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        TensorSlice((-1,), (2,))
    with pytest.raises(ValueError, match="2 offsets for 1 sizes"):
        TensorSlice((0, 0), (2,))
    with pytest.raises(ValueError):
        overlap(whole((1,)), whole((1, 1)))
