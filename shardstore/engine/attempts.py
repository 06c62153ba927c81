"""What a root holds of every attempt, committed or not, and what is wrong with it: registers, names, sizes.

Nothing is digested here but registers and the headers of torn attempts: see `audit` for the bytes.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from shardstore.engine.catalog import Catalog, RootEntry
from shardstore.engine.overview import Overview, State
from shardstore.engine.sealed import SealedShard
from shardstore.errors import CorruptSnapshotError, FormatError, TierError
from shardstore.format.manifest import MANIFEST_NAME, shard_file_name
from shardstore.format.marks import MARKS, Mark
from shardstore.format.records import Manifest, SnapshotId
from shardstore.format.register import Register
from shardstore.tiers.base import RootTier
from shardstore.tiers.marks import marks_among

_FILE: Final = re.compile(r"rank-(\d{5,})\.safetensors(\.tmp)?")
_MAX_SHOWN: Final = 8
_WHY_MARKED: Final = {False: "", True: "marked: a restore or verify found it damaged"}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt as a listing shows it."""

    id: SnapshotId
    state: State
    register: Register | None = None
    """None where there is none that can be read, or it is `aborted`."""
    why: str = ""
    """Why it is no snapshot to rely on, or that only a part of it is here; empty for a good one."""
    marks: frozenset[Mark] = frozenset()
    """Beside it: `pinned`; `damaged` if a restore or `verify` found it so."""


@dataclass(frozen=True, slots=True)
class RankFile:
    """One rank's file in the folder of an attempt."""

    rank: int
    nbytes: int | None
    """None: it is not there."""
    expected_bytes: int | None
    """What the manifest says, None without one."""
    host: str
    """Where its rank ran; where hosts share no root, a file that is not here is there."""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Examination:
    """One attempt in full."""

    id: SnapshotId
    state: State
    manifest: Manifest | None
    """Of a committed or aborted one."""
    shards: Mapping[int, SealedShard]
    """Headers of the files of an attempt without a manifest; else empty."""
    world_size: int | None
    """None if neither manifest nor any header tells."""
    files: tuple[RankFile, ...]
    marks: frozenset[Mark]
    others: tuple[str, ...]
    """Further names in its folder, which are not ours."""
    problems: tuple[str, ...]
    """Everything that keeps it from being whole; empty if it is."""


def find_attempts(catalog: Catalog) -> list[Attempt]:
    """Every attempt on the root, oldest first; one that cannot be read is `damaged`.

    Raises:
        TierError: The root itself cannot be listed.
    """
    overview = catalog.overview()
    return [_attempt(catalog, overview, snapshot_id) for snapshot_id in overview.ids]


def _attempt(catalog: Catalog, overview: Overview, snapshot_id: SnapshotId) -> Attempt:
    ranks, marks = overview.ranks(snapshot_id), overview.marks(snapshot_id)
    register = overview.registers.get(snapshot_id)
    if register is None:
        if snapshot_id not in overview.problems:
            return Attempt(snapshot_id, "torn", why=f"no manifest; {_files_of(ranks)}")
        why = _bare(catalog, snapshot_id, overview.problems[snapshot_id])
        return Attempt(snapshot_id, "damaged", why=why, marks=marks)
    if register.state == "aborted":
        return Attempt(snapshot_id, "aborted", why=register.reason)
    missing = sorted(overview.needed(register) - {*ranks})
    if missing:
        return Attempt(snapshot_id, "damaged", register, missing_files(missing), marks)
    why = _WHY_MARKED["damaged" in marks] or part_here(register, ranks)
    return Attempt(snapshot_id, "committed", register, why, marks)


def manifest_problem(catalog: Catalog, entry: RootEntry) -> str:
    """What is wrong with a manifest, for whoever knows which one it is."""
    return _bare(catalog, entry.id, entry.problem)


def _bare(catalog: Catalog, snapshot_id: SnapshotId, problem: str) -> str:
    path = os.path.join(catalog.tier.location, snapshot_id.name, MANIFEST_NAME)
    return problem.removeprefix(f"{catalog.tier.name}: {path}: ")


def _files_of(ranks: Iterable[int]) -> str:
    shown = list_ranks(ranks)
    return f"files of {shown}" if shown else "no files of any rank"


def list_ranks(ranks: Iterable[int]) -> str:
    """Ranks as people read them: `ranks 0-3, 7`; empty for none."""
    ordered = sorted(set(ranks))
    spans: list[tuple[int, int]] = []
    for rank in ordered:
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    if not spans:
        return ""
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in spans[:_MAX_SHOWN]]
    rest = f" and more, {len(ordered)} in all" if spans[_MAX_SHOWN:] else ""
    return f"rank{'s' if ordered[1:] else ''} {', '.join(texts)}{rest}"


def part_here(manifest: Manifest | Register, ranks: Collection[int]) -> str:
    """Where hosts share no root: which part of a snapshot is on this one, and who has the rest; else empty.

    Args:
        manifest: Of a committed one.
        ranks: Whose files are here.
    """
    others = sorted({*range(manifest.world_size)} - {*ranks})
    if manifest.here is msgspec.UNSET or not others:
        return ""
    hosts = sorted({manifest.shards[rank].host for rank in others})
    return (
        f"complete as far as this root goes: {list_ranks(manifest.here)} of {manifest.world_size}; "
        f"{list_ranks(others)} on host{'s' if hosts[1:] else ''} {', '.join(hosts[:_MAX_SHOWN])}"
    )


def missing_files(ranks: Iterable[int]) -> str:
    """Say which ranks' files are not there."""
    found = list(ranks)
    plural = "files of" if found[1:] else "file of"
    return f"the {plural} {list_ranks(found)} {'are' if found[1:] else 'is'} missing"


def examine(catalog: Catalog, snapshot_id: SnapshotId) -> Examination:
    """Look at one attempt: its register, its files by name and size, and headers where it has no register.

    What cannot be read is a problem of it, no error.
    """
    try:
        entry = catalog.entry(snapshot_id)
        sizes, temps, others = _files_in(catalog.tier, snapshot_id)
    except TierError as error:
        entry = RootEntry(snapshot_id, "damaged", problem=str(error))
        sizes, temps, others = {}, {}, ()
    problems = [manifest_problem(catalog, entry)] if entry.problem else []
    shards: dict[int, SealedShard] = {}
    manifest = entry.manifest
    if manifest is not None and entry.state == "committed":
        files = _listed(manifest, sizes)
        world_size: int | None = manifest.world_size
        problems += [
            f"{shard_file_name(f.rank)}: {f.problem}"
            for f in files
            if f.problem and manifest.shards[f.rank].twin is msgspec.UNSET
        ]
    else:
        bad: dict[int, str] = {}
        if entry.state != "aborted":
            shards, bad = _headers(catalog, snapshot_id, sizes)
        world_size = max((s.header.world_size for s in shards.values()), default=None)
        files = _unlisted(sizes, temps, shards, bad, world_size)
        if entry.state == "torn":
            problems.append("there is no manifest: the run died, or is still at work on it")
            problems += [f"rank {f.rank}: {f.problem}" for f in files if f.problem]
    if "damaged" in others:
        problems.append(_WHY_MARKED[True])
    state = "damaged" if problems and entry.state == "committed" else entry.state
    return Examination(
        snapshot_id,
        state,
        manifest,
        shards,
        world_size,
        files,
        marks_among(others),
        tuple(name for name in others if name not in (MANIFEST_NAME, *MARKS)),
        tuple(problems),
    )


def _files_in(
    tier: RootTier, snapshot_id: SnapshotId
) -> tuple[dict[int, int], dict[int, int], tuple[str, ...]]:
    """Sizes of final files and of files under temp names, by rank; and all other names.

    The size of what has a file's name, but is none, is -1.
    """
    sizes: dict[int, int] = {}
    temps: dict[int, int] = {}
    others: list[str] = []
    for name, nbytes in sorted(tier.list_names(snapshot_id.name)):
        match = _FILE.fullmatch(name)
        if match is None:
            others.append(name)
            continue
        path = os.path.join(tier.location, snapshot_id.name, name)
        is_file = stat.S_ISREG(os.lstat(path).st_mode) if os.path.lexists(path) else True
        (temps if match[2] else sizes)[int(match[1])] = nbytes if is_file else -1
    return sizes, temps, tuple(others)


def _listed(manifest: Manifest, sizes: Mapping[int, int]) -> tuple[RankFile, ...]:
    files, here = [], {*manifest.ranks_here}
    for shard in manifest.shards:
        found, problem = sizes.get(shard.rank), ""
        if found is None:
            problem = "missing" if shard.rank in here else ""
        elif found < 0:
            found, problem = None, "is no file: a link, a folder or a pipe"
        elif found != shard.nbytes:
            problem = f"has {found:,} bytes, the manifest says {shard.nbytes:,}"
        files.append(RankFile(shard.rank, found, shard.nbytes, shard.host, problem))
    return tuple(files)


def _headers(
    catalog: Catalog, snapshot_id: SnapshotId, ranks: Iterable[int]
) -> tuple[dict[int, SealedShard], dict[int, str]]:
    shards, bad = {}, {}
    for rank in sorted(ranks):
        try:
            shards[rank] = catalog.read_header(snapshot_id, rank)
        except (TierError, FormatError, CorruptSnapshotError) as error:
            bad[rank] = str(error)
    return shards, bad


def _unlisted(
    sizes: Mapping[int, int],
    temps: Mapping[int, int],
    shards: Mapping[int, SealedShard],
    bad: Mapping[int, str],
    world_size: int | None,
) -> tuple[RankFile, ...]:
    files = []
    for rank in sorted({*sizes, *temps, *_missing_of(world_size, sizes)}):
        problem = bad.get(rank, "")
        if rank not in sizes:
            problem = "its file is missing"
            if rank in temps:
                problem = (
                    f"its file was not finished ({temps[rank]:,} bytes under a temporary name)"
                )
        host = shards[rank].header.host if rank in shards else ""
        nbytes = sizes.get(rank)
        files.append(
            RankFile(rank, None if nbytes is None or nbytes < 0 else nbytes, None, host, problem)
        )
    return tuple(files)


def _missing_of(world_size: int | None, sizes: Mapping[int, int]) -> Iterable[int]:
    """Ranks without a file, a bounded number of them: a damaged header may claim any world."""
    found = 0
    for rank in range(world_size or 0):
        if rank not in sizes:
            yield rank
            found += 1
            if found == 1000:
                return
