"""Damage at random places of whole snapshots, in every tier at once: never a wrong value, never a crash.

What must come back is what it was, or an older one, or a typed error that leaves live state alone; and a
snapshot whose files on the root are whole is never lost to what was done to others.
"""

from __future__ import annotations

import itertools
import logging
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardstore import ShardStoreError, list_snapshots
from tests.faults.threaded import Ranks, Stores, state_of, step_of

STEPS = (1, 2, 3)
NUMEL = 3000
_PARTS = ("root", "memory", "disk")
_serial = itertools.count()


def _open(at: Path, *, memory: str | int = "1MiB", has_disk: bool = True) -> Stores:
    options: dict[str, Any] = {"memory_dir": at / "memory", "name": "job", "memory": memory}
    if has_disk:
        options["disk"] = at / "disk"
    return Ranks().open(at / "root", **options)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What is captured of thousands of warnings would keep all that was refused alive."""
    logger = logging.getLogger("shardstore")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.fixture(scope="module")
def saved() -> Iterator[Path]:
    """On a tmpfs; the disk is a link to a folder elsewhere, since it may not be on the memory's tmpfs."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as near,
        tempfile.TemporaryDirectory() as far,
    ):
        at = Path(near) / "saved"
        (at / "memory").mkdir(parents=True)
        (Path(far) / "saved").mkdir()
        (at / "disk").symlink_to(Path(far) / "saved")
        stores = _open(at)
        for step in STEPS:
            assert stores.save(step, numel=NUMEL) == ["", ""]
        stores.drain()
        stores.each(lambda store, _: store.pin(1))
        stores.each(lambda store, rank: store.save(state_of(4, rank, NUMEL), step=4, persist=False).wait(20))  # fmt: skip
        stores.close(keep_memory=True)
        yield at


def _copy(saved: Path) -> Path:
    number = next(_serial)
    at = saved.parent / f"copy-{number}"
    disk = (saved / "disk").resolve()
    for part in ("root", "memory"):
        shutil.copytree(saved / part, at / part)
    far = disk.parent / f"copy-{number}"
    shutil.copytree(disk, far)
    (at / "disk").symlink_to(far)
    return at


def _remove(at: Path) -> None:
    shutil.rmtree((at / "disk").resolve())
    shutil.rmtree(at)


def _files(at: Path) -> list[Path]:
    found = [path for part in _PARTS for path in (at / part).rglob("*") if path.is_file()]
    return sorted(path for path in found if path.suffix != ".lock")


class Damage(NamedTuple):
    """What is done to which file is drawn from the seed: small numbers would all be headers."""

    kind: str
    seed: int


DAMAGES = st.builds(
    Damage,
    st.sampled_from(["flip", "flip", "zero", "noise", "truncate", "extend", "swap", "replace", "remove", "empty"]),
    st.integers(0, 2**32),
)  # fmt: skip


def _do(at: Path, damage: Damage) -> None:
    chance = random.Random(damage.seed)
    files = _files(at)
    shards = [path for path in files if path.suffix == ".safetensors"]
    path = chance.choice(shards if shards and chance.random() < 0.75 else files)
    data = bytearray(path.read_bytes())
    start = chance.randrange(len(data)) if data else 0
    nbytes = chance.choice([1, 2, 8, 100, 4096, 20_000])
    end = min(len(data), start + nbytes)
    if damage.kind == "flip" and data:
        for _ in range(chance.choice([1, 1, 8])):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif damage.kind == "zero" and data:
        start &= ~4095
        end = min(len(data), start + 4096)
        data[start:end] = bytes(end - start)
    elif damage.kind == "noise":
        data[start:end] = chance.randbytes(end - start)
    elif damage.kind == "truncate":
        del data[start:]
    elif damage.kind == "extend":
        data += bytes(nbytes)
    elif damage.kind in ("swap", "replace"):
        other = chance.choice(files)
        theirs = other.read_bytes()
        if damage.kind == "swap":
            other.write_bytes(data)
        data = bytearray(theirs)
    elif damage.kind == "remove":
        path.unlink()
        return
    else:
        data = bytearray()
    path.write_bytes(data)


def _whole_on_root(before: Path, after: Path) -> set[int]:
    """Steps of which every file on the root is as it was."""
    found = set()
    for folder in (before / "root").glob("step-*"):
        same = all(
            (after / "root" / folder.name / path.name).is_file()
            and (after / "root" / folder.name / path.name).read_bytes() == path.read_bytes()
            for path in folder.iterdir()
        )
        if same:
            found.add(int(folder.name[5:17]))
    return found


def _check(saved: Path, damages: list[Damage], memory: str | int, *, has_disk: bool) -> None:
    at = _copy(saved)
    try:
        for damage in damages:
            _do(at, damage)
        whole = _whole_on_root(saved, at)
        listed = [info.step for info in list_snapshots(at / "root")]
        assert set(listed) <= set(STEPS)
        assert whole <= set(listed)
        stores = _open(at, memory=memory, has_disk=has_disk)
        restored = _restore(stores)
        assert restored is not None or not whole, "a whole snapshot was not found"
        assert restored is None or restored >= max(whole, default=0)
        for step in STEPS:
            found = _restore(stores, step=step)
            assert found in (None, step)
            assert found == step or step not in whole
        assert stores.save(9, numel=NUMEL) == ["", ""]
        assert _restore(stores) == 9
        stores.close()
    finally:
        _remove(at)


def _restore(stores: Stores, **options: Any) -> int | None:
    """The step that every element has; None if every rank was refused and left alone."""

    def one(store: Any, rank: int) -> int | None:
        live = state_of(-7, rank, NUMEL)
        try:
            report = store.restore(live, **options)
        except ShardStoreError:
            assert step_of(live, rank) == -7, "a refused restore has changed live state"
            return None
        assert step_of(live, rank) == report.step
        return int(report.step)

    first, second = stores.each(one)
    assert first == second
    return first


_SETTINGS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
_LISTS = st.lists(DAMAGES, min_size=1, max_size=5)
_MEMORY = st.sampled_from(["1MiB", 0])


@given(damages=_LISTS, memory=_MEMORY, has_disk=st.booleans())
@settings(max_examples=40, **_SETTINGS)
def test_damage_anywhere_is_never_restored(
    saved: Path, damages: list[Damage], memory: str | int, has_disk: bool
) -> None:
    _check(saved, damages, memory, has_disk=has_disk)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@given(damages=_LISTS, memory=_MEMORY, has_disk=st.booleans())
@settings(max_examples=2000, **_SETTINGS)
def test_damage_anywhere_is_never_restored_at_length(
    saved: Path, damages: list[Damage], memory: str | int, has_disk: bool
) -> None:
    _check(saved, damages, memory, has_disk=has_disk)


def test_undamaged_copies_restore_from_every_tier(saved: Path) -> None:
    """So that the tests above begin with what they say."""
    names = [path.relative_to(saved).parts[0] for path in _files(saved)]
    assert {names.count(part) >= 6 for part in _PARTS} == {True}
    at = _copy(saved)
    stores = _open(at)
    assert _restore(stores) == 4
    assert stores.listed() == [1, 2, 3, 4]
    stores.close()
    _remove(at)
