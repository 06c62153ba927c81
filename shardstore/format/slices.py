"""Boxes of a tensor in global element coordinates. Integers only: no torch, no bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A half-open box: elements `offsets[d] <= i < offsets[d] + sizes[d]` in every dim d.

    Both tuples have one number per dim; a 0-d tensor is the box `((), ())` with one element. A size may
    be 0, then the box is empty.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"{len(self.offsets)} offsets for {len(self.sizes)} sizes")
        if any(number < 0 for number in (*self.offsets, *self.sizes)):
            raise ValueError(f"negative number in box {self.offsets} + {self.sizes}")

    @property
    def num_elements(self) -> int:
        """Product of the sizes."""
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index, per dim."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))


def whole(shape: Iterable[int]) -> TensorSlice:
    """Return the box that is all of a tensor of this shape."""
    sizes = tuple(shape)
    return TensorSlice((0,) * len(sizes), sizes)


def overlap(a: TensorSlice, b: TensorSlice) -> TensorSlice | None:
    """Return the box of the elements that both hold, None if there are none.

    Raises:
        ValueError: They have different numbers of dims.
    """
    starts = tuple(max(x, y) for x, y in zip(a.offsets, b.offsets, strict=True))
    ends = tuple(min(x, y) for x, y in zip(a.ends, b.ends, strict=True))
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return None
    return TensorSlice(starts, tuple(e - s for s, e in zip(starts, ends, strict=True)))


def contains(outer: TensorSlice, inner: TensorSlice) -> bool:
    """Tell whether every element of `inner` is in `outer`. An empty box is in every box.

    Raises:
        ValueError: They have different numbers of dims.
    """
    bounds = zip(outer.offsets, outer.ends, inner.offsets, inner.ends, strict=True)
    inside = all(low <= start and end <= high for low, high, start, end in bounds)
    return inside or inner.num_elements == 0
