"""Check every digest of a stored snapshot: manifest, then headers, then tensors, in bounded memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import msgspec

from shardstore.engine.attempts import manifest_problem
from shardstore.engine.catalog import Catalog
from shardstore.engine.holders import read_listed, rows_by_holder, spans_in
from shardstore.engine.sealed import SealedShard, check_identity, read_sealed_header
from shardstore.engine.spans import SpanDigests
from shardstore.engine.verify import check_listed, read_again
from shardstore.errors import CorruptSnapshotError, FormatError, FormatVersionError, TierError
from shardstore.format.manifest import MANIFEST_NAME, shard_file_name
from shardstore.format.records import Manifest, SnapshotId
from shardstore.tiers.base import ShardReader
from shardstore.tiers.transfer import Ring

_NUM_READERS: Final = 3
"""Files at a time: each has a ring of 64 MiB."""


class _StoppedError(Exception):
    """Another thread was interrupted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it was written."""

    problem: str
    rank: int | None = None
    file: str = MANIFEST_NAME
    """Name in the snapshot's folder."""
    tensor: str | None = None


@dataclass(slots=True)
class Audit:
    """What was checked of one snapshot, and what was found."""

    id: SnapshotId
    num_files: int = 0
    num_tensors: int = 0
    nbytes: int = 0
    """Bytes that were read and compared with a digest."""
    findings: list[Finding] = field(default_factory=list)
    is_gone: bool = False
    """It was deleted meanwhile: there is nothing to say of it."""
    proves_damage: bool = False
    """Something was read, and is not what was written: no fault that may pass."""


def audit_snapshot(
    catalog: Catalog, snapshot_id: SnapshotId, *, progress: Callable[[int], None]
) -> Audit:
    """Read a committed snapshot whole and compare every digest; all that is wrong is listed.

    Several files are read at a time; memory stays under 256 MiB whatever their size. Nothing is written.

    Args:
        catalog: Of the root.
        snapshot_id: Which.
        progress: Called with numbers of bytes that were read, from several threads.
    """
    audit = Audit(snapshot_id)
    try:
        entry = catalog.entry(snapshot_id)
    except TierError as error:
        audit.findings.append(Finding(str(error)))
        return audit
    if entry.manifest is None or entry.state != "committed":
        audit.proves_damage = entry.state == "damaged"
        problem = (
            manifest_problem(catalog, entry)
            or f"the attempt is {entry.state}: there is no committed snapshot"
        )
        audit.findings.append(Finding(problem))
        return audit
    manifest = entry.manifest
    audit.num_files = 1
    lock, stop, own = threading.Lock(), threading.Event(), threading.local()

    def advance(nbytes: int) -> None:
        if stop.is_set():
            raise _StoppedError
        progress(nbytes)

    def check(rank: int) -> None:
        part = _audit_file(catalog, manifest, rank, own, advance)
        with lock:
            audit.num_files += part.num_files
            audit.num_tensors += part.num_tensors
            audit.nbytes += part.nbytes
            audit.findings += part.findings
            audit.proves_damage |= part.proves_damage

    # Where a reader itself reads several ranges at a time, one after the other is enough.
    num_readers = 1 if catalog.tier.keeps_index else _NUM_READERS
    pool = ThreadPoolExecutor(num_readers, thread_name_prefix="shardstore-audit")
    try:
        for done in [pool.submit(check, rank) for rank in manifest.ranks_here]:
            done.result()
    except BaseException:  # an interrupt: nobody waits for the rest of large files
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
    audit.findings.sort(key=lambda f: (f.rank is not None, f.rank or 0))
    if audit.findings:
        audit.is_gone = _is_gone(catalog, snapshot_id)
    return audit


def _is_gone(catalog: Catalog, snapshot_id: SnapshotId) -> bool:
    """Whether somebody deletes it just now (P4: the register says so before the first byte goes)."""
    try:
        return catalog.entry(snapshot_id).state in ("aborted", "torn")
    except TierError:
        return False


def _audit_file(
    catalog: Catalog,
    manifest: Manifest,
    rank: int,
    own: threading.local,
    progress: Callable[[int], None],
) -> Audit:
    part = Audit(manifest.id)
    name = shard_file_name(rank)
    expected = manifest.shards[rank].nbytes
    read = 0

    def count(nbytes: int) -> None:
        nonlocal read
        read += nbytes
        progress(nbytes)

    try:
        with catalog.tier.open_shard(manifest.id, rank) as reader:
            sealed = read_sealed_header(reader)
            check_identity(sealed.header, manifest.id, rank, source=reader.source)
            check_listed(manifest, sealed, reader)
            assert sealed.layout is not None
            part.num_files = 1
            count(sealed.layout.data_start)
            part.findings += _audit_tensors(sealed, reader, _ring_of(own, reader), count)
            part.proves_damage = bool(part.findings)
            part.num_tensors = sum(1 for piece in sealed.header.pieces if piece.key)
            part.findings += _audit_holders(catalog, manifest, sealed)
    except (CorruptSnapshotError, FormatError, TierError) as error:
        tensor = error.tensor if isinstance(error, CorruptSnapshotError) else None
        path = os.path.join(catalog.tier.location, manifest.id.name, name)
        text = str(error).removeprefix(f"{path}: ")
        if isinstance(error.__cause__, FileNotFoundError):
            text = "the file is missing"
        twin = manifest.shards[rank].twin
        if twin is not msgspec.UNSET:
            text += f" (a restore does without it: the file of rank {twin} says the same)"
        part.findings.append(Finding(text, rank, name, tensor))
        is_proof = not isinstance(error, TierError | FormatVersionError)
        part.proves_damage |= is_proof and twin is msgspec.UNSET
    part.nbytes = read
    progress(max(0, expected - read))  # what could not be read is done with as well
    return part


def _audit_holders(catalog: Catalog, manifest: Manifest, sealed: SealedShard) -> list[Finding]:
    """Whether the files of replicas hold what this one leaves to them, as far as headers tell."""
    header = sealed.header
    if header.sharing is msgspec.UNSET:
        return []
    findings = []
    rows_of = rows_by_holder(header, range(len(header.table)), file_rank=header.rank)
    for holder in sorted(rows_of.keys() - {header.rank}):
        try:
            with catalog.tier.open_shard(manifest.id, holder) as reader:
                found = read_listed(reader, manifest, manifest.id, holder)
        except (CorruptSnapshotError, FormatError, TierError):
            continue  # that is told of the holder's own file
        name = shard_file_name(holder)
        try:
            spans_in(found, header, rows_of[holder], source=name, tier=reader.tier)
        except CorruptSnapshotError as error:
            text = str(error).removeprefix(f"{name}: ")
            findings.append(Finding(text, holder, name, error.tensor))
    return findings


def _ring_of(own: threading.local, reader: ShardReader) -> Ring:
    """Of this thread, as large as its readers need."""
    if not hasattr(own, "ring"):
        own.ring = Ring(reader.num_places, reader.chunk_bytes)
    ring: Ring = own.ring
    return ring


def _audit_tensors(
    sealed: SealedShard, reader: ShardReader, ring: Ring, count: Callable[[int], None]
) -> list[Finding]:
    header, layout = sealed.header, sealed.layout
    assert layout is not None
    name = shard_file_name(header.rank)
    findings: list[Finding] = []

    def compare(row: int, actual: str) -> None:
        saved = header.pieces[row].digest
        if actual != saved and reader.may_differ_again:
            actual = read_again(reader, *layout.spans[row])
        if actual != saved:
            tensor = ".".join(header.table[row].path)
            text = f"its bytes have digest {actual}, {saved} were saved"
            findings.append(Finding(text, header.rank, name, tensor))

    stored = [i for i, piece in enumerate(header.pieces) if piece.key]
    digests = SpanDigests(layout.spans, stored, compare, count)
    end = reader.stream(layout.data_start, layout.nbytes, ring.place, digests.feed)
    row = digests.finish()
    if row is not None:
        tensor = ".".join(header.table[row].path)
        text = f"the file ends at byte {end:,} of {layout.nbytes:,}, inside this tensor"
        findings.append(Finding(text, header.rank, name, tensor))
    return findings
