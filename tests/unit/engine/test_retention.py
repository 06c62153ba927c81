"""Which snapshots a policy lets go, against an oracle that thinks of one snapshot at a time."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardstore import Keep
from shardstore.engine.retention import check_keep, plan_deletions
from shardstore.format.records import SnapshotId

_NONCES = ("00000001", "9f3c1d20", "ffffffff")


@st.composite
def _snapshots(draw: st.DrawFn) -> list[SnapshotId]:
    """Few distinct values, so that steps repeat, runs rewind, and two runs have one number."""
    ids = st.builds(
        SnapshotId,
        st.integers(0, 12),
        st.integers(1, 3),
        st.integers(1, 6),
        st.sampled_from(_NONCES),
    )
    return draw(st.lists(ids, unique_by=lambda i: i.order, max_size=14))


_keeps = st.builds(Keep, last=st.integers(1, 5), every_steps=st.none() | st.integers(1, 6))


def _is_kept_by(one: SnapshotId, among: Collection[SnapshotId], keep: Keep) -> bool:
    """The policy, said of one snapshot."""
    newer = [i for i in among if i.order > one.order]
    if len(newer) < keep.last:
        return True
    return (
        keep.every_steps is not None
        and one.step % keep.every_steps == 0
        and all(i.step != one.step for i in newer)
    )


@given(data=st.data(), ids=_snapshots(), keep=_keeps)
def test_what_goes_is_what_neither_reading_of_the_marks_keeps(
    data: st.DataObject, ids: list[SnapshotId], keep: Keep
) -> None:
    some = st.sets(st.sampled_from(ids)) if ids else st.just(set[SnapshotId]())
    pinned, damaged = data.draw(some), data.draw(some)
    shuffled = data.draw(st.permutations(ids))
    going = plan_deletions(shuffled, keep, pinned=pinned, damaged=damaged)
    good = [i for i in ids if i not in damaged]
    expected = [
        i
        for i in ids
        if i not in pinned
        and not _is_kept_by(i, ids, keep)
        and not (i in good and _is_kept_by(i, good, keep))
    ]
    assert going == sorted(expected, key=lambda i: i.order)


@given(data=st.data(), ids=_snapshots(), keep=_keeps)
def test_the_newest_good_one_never_goes_and_marks_only_add_to_what_is_kept(
    data: st.DataObject, ids: list[SnapshotId], keep: Keep
) -> None:
    damaged = data.draw(st.sets(st.sampled_from(ids))) if ids else set()
    going = set(plan_deletions(ids, keep, damaged=damaged))
    assert going <= set(plan_deletions(ids, keep))
    good = sorted((i for i in ids if i not in damaged), key=lambda i: i.order)
    assert not going & {*good[-keep.last :]}
    assert not ids or going < set(ids)


def test_without_a_policy_nothing_goes() -> None:
    assert plan_deletions([SnapshotId(i, 1, i, "00000001") for i in range(1, 9)], None) == []


def test_a_rewound_run_keeps_the_newest_of_a_step_and_the_newest_saves() -> None:
    old = [SnapshotId(step, 1, step, "00000001") for step in range(1, 7)]
    new = [SnapshotId(step, 2, step - 3, "00000002") for step in range(4, 7)]
    going = plan_deletions([*old, *new], Keep(last=1, every_steps=2))
    assert [(i.step, i.run) for i in going] == [(1, 1), (3, 1), (4, 1), (5, 1), (6, 1), (5, 2)]


@pytest.mark.parametrize("given_", [3, np.int64(3), torch.tensor(3), Keep(last=3)])
def test_a_count_is_the_newest_so_many(given_: object) -> None:
    assert check_keep(given_) == Keep(last=3)


def test_a_policy_shows_and_equals_by_what_it_says() -> None:
    assert repr(Keep(last=3)) == "Keep(last=3)"
    assert repr(Keep(last=3, every_steps=1000)) == "Keep(last=3, every_steps=1000)"
    assert Keep(last=np.int32(3)) == Keep(last=3)
    assert isinstance(Keep(last=np.int32(3)).last, int)
    with pytest.raises(AttributeError):
        Keep(last=3).last = 4  # type: ignore[misc]


@pytest.mark.parametrize("bad", [0, -1, 1.0, True, "3", 1 << 64, None])
def test_a_policy_that_is_no_count_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="last"):
        Keep(last=bad)  # type: ignore[arg-type]
    if bad is not None:
        with pytest.raises(ValueError, match="every_steps"):
            Keep(last=1, every_steps=bad)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="keep must be None"):
            check_keep(bad)
