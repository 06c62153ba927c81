"""Lives of a job one after the other, each with another fate; what is found between them is looked at."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardstore import SnapshotInfo, list_snapshots
from tests.faults.soak.life import TIMEOUT_S, Plan, live, reference
from tests.ranks import RanksFailedError, run_ranks

WORLD_SIZE = 2
_MEMORY: tuple[int | str, ...] = ("1MiB", "1MiB", "auto", 0)


@dataclasses.dataclass
class Tally:
    """What a soak went through."""

    lives: int = 0
    killed: int = 0
    ended_by_error: int = 0
    stopped: int = 0
    """By SIGTERM, at one step, with a snapshot of it."""
    damaged: int = 0
    steps: int = 0
    saves: int = 0
    broken_ids: set[str] = dataclasses.field(default_factory=set)
    """Snapshots on the root that were damaged: listed until somebody has read them."""


def soak(folder: Path, disk: Path, *, seed: int, duration_s: float) -> Tally:
    """Run lives for so long. Whatever is not as it should be is an AssertionError that names the seed."""
    (folder / "memory").mkdir()
    (folder / "disk").symlink_to(disk)
    chance = random.Random(seed)
    tally = Tally()
    deadline = time.monotonic() + duration_s
    try:
        least = 0
        while time.monotonic() < deadline or tally.lives < 3:
            _one_life(folder, _plan(chance), tally)
            _check_restored(folder, tally.lives, least)
            _check_stopped(folder, tally)
            least = _damage(folder, chance, tally)
            tally.lives += 1
        _last_life(folder, tally, least)
        _compare(folder, tally)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, life {tally.lives}, {tally}: {error}") from error
    return tally


def _plan(chance: random.Random) -> Plan:
    kind = chance.choice(
        ["one", "all", "all", "all", "faults", "faults", "both", "quiet", "warned", "warned"]
    )
    victims: tuple[int, ...] = ()
    if kind in ("one", "both"):
        victims = (chance.randrange(WORLD_SIZE),)
    elif kind == "all":
        victims = tuple(chance.sample(range(WORLD_SIZE), WORLD_SIZE))
    is_faulty = kind in ("faults", "both")
    return Plan(
        seed=chance.randrange(2**32),
        num_steps=chance.choice([12, 30, 60]),
        save_every=chance.choice([1, 2, 3]),
        memory=_MEMORY[chance.randrange(len(_MEMORY))],
        has_disk=chance.random() < 0.3,
        overlap=chance.random() < 0.3,
        victims=victims,
        kill_at=chance.randrange(5, 400) if victims else 0,
        warned=tuple(chance.sample(range(WORLD_SIZE), chance.randint(1, WORLD_SIZE)))
        if kind == "warned"
        else (),
        warn_at=chance.randrange(1, 300),
        broken_rank=chance.randrange(WORLD_SIZE) if is_faulty else -1,
        fault_chance=chance.choice([0.003, 0.03]) if is_faulty else 0.0,
        error=chance.choice([errno.EIO, errno.ENOSPC]),
        on_error="raise" if chance.random() < 0.5 else "warn",
    )


def _one_life(folder: Path, plan: Plan, tally: Tally) -> None:
    try:
        run_ranks(
            WORLD_SIZE, live, str(folder), tally.lives, plan,
            timeout_s=90.0, grace_s=4 * TIMEOUT_S,
        )  # fmt: skip
    except RanksFailedError as error:
        text = str(error)
        if plan.victims and "exit code -9" in text:
            tally.killed += 1
        elif plan.broken_rank >= 0:
            tally.ended_by_error += 1
            assert "ShardStoreError" in text or "shardstore.errors" in text, text
        else:
            raise AssertionError(f"a quiet life failed: {text}") from error
        assert "deadline" not in text, f"a rank hung: {text}"


def _lines(folder: Path, rank: int) -> Iterator[dict[str, Any]]:
    path = folder / f"log-{rank}"
    if path.exists():
        for line in path.read_text().splitlines():
            yield json.loads(line)


def _committed(folder: Path, tally: Tally) -> list[SnapshotInfo]:
    """Snapshots on the root that every rank's restart may count on, oldest first."""
    return [info for info in list_snapshots(folder / "root") if info.id not in tally.broken_ids]


def _check_restored(folder: Path, life: int, least: int) -> None:
    """Both ranks begin with one step, and with none that is older than the newest good one."""
    found = []
    for rank in range(WORLD_SIZE):
        found += [
            x["restored"] for x in _lines(folder, rank) if x["life"] == life and "restored" in x
        ]
    assert len(set(found)) <= 1, f"the ranks restored {found}"
    assert not found or found[0] >= least, f"restored {found[0]}, step {least} was committed"


def _check_stopped(folder: Path, tally: Tally) -> None:
    """Ranks that were warned end at one step, which is committed."""
    found = [
        [x["stopped"] for x in _lines(folder, rank) if x["life"] == tally.lives and "stopped" in x]
        for rank in range(WORLD_SIZE)
    ]
    assert len({*map(tuple, found)}) == 1, f"the ranks stopped at {found}"
    if found[0]:
        newest = list_snapshots(folder / "root")[-1].step
        assert newest == found[0][0], f"stopped at {found[0]}, and step {newest} is the newest"
        tally.stopped += 1


def _damage(folder: Path, chance: random.Random, tally: Tally) -> int:
    """Damage what a restart must do without; returns the step that it must at least find."""
    committed = _committed(folder, tally)
    least = committed[-1].step if committed else 0
    kind = chance.choice(["none", "none", "memory", "memory", "no memory", "disk", "newest"])
    if kind == "no memory":
        shutil.rmtree(folder / "memory")
        (folder / "memory").mkdir()
    elif kind in ("memory", "disk"):
        for path in sorted((folder / kind).resolve().rglob("*.safetensors")):
            if chance.random() < 0.5:
                _break(path, chance)
    elif kind == "newest" and len(committed) > 1:
        newest = committed[-1].id
        tally.broken_ids.add(newest)
        name = f"rank-{chance.randrange(WORLD_SIZE):05d}.safetensors"
        _break(folder / "root" / newest / name, chance)
        shutil.rmtree(folder / "memory")
        (folder / "memory").mkdir()
        for path in (folder / "disk").resolve().iterdir():
            shutil.rmtree(path)
        least = committed[-2].step
    tally.damaged += kind != "none"
    return least


def _break(path: Path, chance: random.Random) -> None:
    """Tear a file, or flip a bit of it."""
    nbytes = path.stat().st_size
    if nbytes == 0:
        return
    if chance.random() < 0.5:
        os.truncate(path, chance.randrange(nbytes))
        return
    with path.open("r+b") as file:
        at = chance.randrange(nbytes)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))


def _last_life(folder: Path, tally: Tally, least: int) -> None:
    """A long one in which nothing happens: nothing grows in it, and little is left of the others."""
    plan = Plan(
        seed=0, num_steps=460, save_every=4, memory="1MiB", has_disk=False, overlap=False,
        is_measured=True, on_error="raise",
    )  # fmt: skip
    try:
        results = run_ranks(WORLD_SIZE, live, str(folder), tally.lives, plan, timeout_s=100.0)
    except RanksFailedError as error:
        raise AssertionError(f"the last life failed: {error}") from error
    _check_restored(folder, tally.lives, least)
    for found in results:
        first, *rest = found["measured"]
        for later in rest:
            assert later["descriptors"] <= first["descriptors"] + 4, found
            assert later["threads"] <= first["threads"] + 2, found
            assert later["anonymous"] <= first["anonymous"] + (32 << 20), found
    committed = _committed(folder, tally)
    assert len(committed) == 2, f"keep=2 left {committed}"
    memory = [path for path in (folder / "memory").rglob("*") if path.is_file()]
    assert len(memory) <= 16, f"memory has {len(memory)} files: {memory}"


def _compare(folder: Path, tally: Tally) -> None:
    """Every step of every life, on every rank, against a run that nothing interrupted."""
    logs = [list(_lines(folder, rank)) for rank in range(WORLD_SIZE)]
    tally.steps = max(line["step"] for log in logs for line in log if "step" in line)
    tally.saves = sum("committed" in line for line in logs[0])
    expected = run_ranks(WORLD_SIZE, reference, tally.steps, timeout_s=300.0)
    for rank, log in enumerate(logs):
        for line in log:
            if "step" in line:
                want = expected[rank][line["step"] - 1]
                assert line["result"] == want, (
                    f"rank {rank}, {line}: an uninterrupted run has {want}"
                )
