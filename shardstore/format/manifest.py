"""The manifest of a snapshot: its commit register (protocol P4), written once and last.

Size grows with ranks plus tensors, never with their product: each distinct tensor table and mesh is
stored once. docs/format.md is the specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

import msgspec

from shardstore.errors import FormatError
from shardstore.format.canonical import MANIFEST_OPENING, read_canonical_manifest
from shardstore.format.checks import (
    check_coordinates,
    check_id,
    check_meshes,
    check_table,
    check_table_meshes,
)
from shardstore.format.digests import BLANK, digest_around, is_digest, table_digest
from shardstore.format.findings import MAX_INT, Findings, fields_of
from shardstore.format.parse import check_version
from shardstore.format.records import (
    FORMAT_VERSION,
    Manifest,
    Mesh,
    NearCopy,
    ShardEntry,
    ShardHeader,
    Sharing,
    SnapshotId,
    TensorRow,
)
from shardstore.format.register import is_part
from shardstore.format.sharing import check_near
from shardstore.format.strict_json import find_unencodable, quote
from shardstore.format.tables import check_tables, find_disagreements

__all__ = [
    "MANIFEST_NAME",
    "MANIFEST_OPENING",
    "MAX_MANIFEST_NBYTES",
    "build_manifest",
    "check_tables",
    "decode_manifest",
    "encode_manifest",
    "shard_file_name",
]

MANIFEST_NAME: Final = "manifest.json"

MAX_MANIFEST_NBYTES: Final = 128 << 20
"""Larger ones are neither written nor read. Half a million distinct rows fit."""

_BROKEN: Final = "the manifest breaks the format"
_WORTH_EXPLAINING_NBYTES: Final = 16 << 20
"""To list all that is wrong with a damaged text takes many times its memory."""


def shard_file_name(rank: int) -> str:
    """Return the name of a rank's file, as `rank-00003.safetensors`."""
    return f"rank-{rank:05d}.safetensors"


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the content of `manifest.json`, own digest included.

    Raises:
        FormatError: The metadata is no JSON, or there is more of it all than `MAX_MANIFEST_NBYTES`.
    """
    problems = find_unencodable(manifest.metadata)
    if problems:
        raise FormatError(f"cannot encode the manifest of {manifest.id}", problems=problems)
    try:
        record = msgspec.json.encode(manifest)
    except (UnicodeEncodeError, TypeError) as error:
        raise FormatError(f"cannot encode the manifest of {manifest.id}: {error}") from error
    if len(record) > MAX_MANIFEST_NBYTES - 1024:
        raise FormatError(
            f"the manifest of {manifest.id} takes {len(record):,} bytes, at most {MAX_MANIFEST_NBYTES:,} "
            "are possible: make the tensor tables of the ranks equal, or the metadata smaller"
        )
    data = bytearray(MANIFEST_OPENING + BLANK + b'",' + record[1:] + b"\n")
    at = len(MANIFEST_OPENING)
    data[at : at + len(BLANK)] = digest_around(data, at).encode()
    return bytes(data)


def decode_manifest(data: bytes, *, source: str, expect: SnapshotId | None) -> Manifest:
    """Read and check a manifest, trusting nothing in it.

    Args:
        data: Content of the file.
        source: Names the file in errors.
        expect: The id that the folder's name says, None if that is not known.

    Raises:
        CorruptSnapshotError: The digest is wrong, and otherwise it is a good manifest or no JSON at all.
        FormatVersionError: Written by a newer shardstore.
        FormatError: Anything else; all problems listed.
    """
    findings = Findings(source)
    if not data.startswith(MANIFEST_OPENING):
        findings.add("it does not begin as a manifest does")
    else:
        at = len(MANIFEST_OPENING)
        digest = digest_around(data, at)
        stored = data[at : at + len(BLANK)]
        if stored != digest.encode():
            shown = quote(stored.decode("ascii", "replace"))
            findings.damage.append(f"manifest digest is {digest}, stored is {shown}")
            if len(data) > _WORTH_EXPLAINING_NBYTES:
                findings.raise_any(_BROKEN)
    manifest = None if findings.damage else read_canonical_manifest(data)
    if manifest is not None:
        fields = fields_of(manifest)
    else:
        record = findings.read_object(data, "manifest")
        record.pop("digest", None)
        check_version(record, findings)
        fields = findings.read_record(record, Manifest)
    _check_fields(fields, expect, findings)
    findings.raise_any(_BROKEN)
    return manifest or Manifest(**fields)


def build_manifest(
    headers: Mapping[int, tuple[ShardHeader, int, str]],
    *,
    created: float,
    metadata: object,
    writer: Mapping[str, str],
    is_exclusive: bool = True,
    twins: Mapping[int, int] = MappingProxyType({}),
) -> Manifest:
    """Merge the sealed headers of all ranks into the manifest that commits them.

    Distinct meshes are stored once, and so are distinct tables. `pieces` and `leaves` are not looked at.

    Args:
        headers: Per rank: header, file size in bytes, and the header's digest.
        created: Seconds since the epoch.
        metadata: The user's JSON, rank 0's.
        writer: Library versions.
        is_exclusive: Whether the store honours exclusive create.
        twins: Ranks whose files have no bytes of tensors, each with a rank whose header says the same.

    Raises:
        FormatError: Ranks are missing, or belong to different snapshots.
    """
    if not headers:
        raise FormatError("a manifest needs at least one shard")
    first = headers[min(headers)][0]
    problems = [
        f"rank {rank}: header of rank {header.rank} of {header.world_size} in {header.id}, "
        f"not of {first.world_size} in {first.id}"
        for rank, (header, _, _) in headers.items()
        if (header.rank, header.world_size, header.id) != (rank, first.world_size, first.id)
    ]
    if len(headers) != first.world_size:
        problems.append(f"{len(headers)} shards for a world of {first.world_size}")
    if problems:
        raise FormatError(f"these shards are not one snapshot, {first.id}", problems=problems)

    meshes: dict[Mesh, int] = {}
    tables: dict[str, tuple[TensorRow, ...]] = {}
    shards: list[ShardEntry] = []
    for rank in sorted(headers):
        header, nbytes, digest = headers[rank]
        tables.setdefault(header.table_digest, header.table)
        shards.append(
            ShardEntry(
                rank=rank,
                file=shard_file_name(rank),
                nbytes=nbytes,
                table=header.table_digest,
                header_digest=digest,
                host=header.host,
                meshes=tuple(meshes.setdefault(mesh, len(meshes)) for mesh in header.meshes),
                coordinates=header.coordinates,
                near=header.sharing.near if isinstance(header.sharing, Sharing) else msgspec.UNSET,
                twin=twins.get(rank, msgspec.UNSET),
            )
        )
    is_shared = any(shard.near is not msgspec.UNSET for shard in shards)
    return Manifest(
        format=FORMAT_VERSION,
        state="committed",
        step=first.step,
        run=first.run,
        count=first.count,
        nonce=first.nonce,
        created=created,
        world_size=first.world_size,
        meshes=tuple(meshes),
        tables=tables,
        shards=tuple(shards),
        metadata=metadata,
        writer=dict(writer),
        persist=msgspec.UNSET if first.persist else False,
        exclusive=msgspec.UNSET if is_exclusive else False,
        replicas="once" if is_shared else msgspec.UNSET,
    )


def _check_fields(fields: Mapping[str, Any], expect: SnapshotId | None, findings: Findings) -> None:
    """Check whatever could be read: a fault in one field hides none in another."""
    add = findings.add
    has = fields.keys().__ge__
    is_aborted = fields.get("state") == "aborted"
    persist = fields.get("persist", msgspec.UNSET)
    if persist is True or (persist is False and is_aborted):
        add("only a committed snapshot has persist, and only as false")
    exclusive = fields.get("exclusive", msgspec.UNSET)
    if exclusive is True or (exclusive is False and is_aborted):
        add("only a committed snapshot has exclusive, and only as false")
    if has({"replicas"}) and has({"shards"}):
        _check_replicas(fields["replicas"], fields["shards"], findings)
    here = fields.get("here", msgspec.UNSET)
    if here is not msgspec.UNSET:
        if is_aborted:
            add("an aborted snapshot has here")
        elif has({"world_size"}) and not is_part(here, fields["world_size"]):
            add(
                f"here is {quote(here[:8])}: it must be some ranks of {quote(fields['world_size'])}, not all, "
                "in order"
            )
    if has({"state"}) and fields["state"] not in ("committed", "aborted"):
        add(f"unknown state {quote(fields['state'])}")
    if has({"step", "run", "count", "nonce", "world_size"}):
        identity = SnapshotId(*(fields[name] for name in ("step", "run", "count", "nonce")))
        is_unsaved = is_aborted and fields["world_size"] == 0
        check_id(identity, 1 if is_unsaved else fields["world_size"], add)
        if expect is not None and identity != expect:
            parts = (identity.step, identity.run, identity.count)
            add(f"it is of {quote(parts)}, nonce {quote(identity.nonce)}; its folder is {expect}")
    if is_aborted:
        for name in ("shards", "tables", "meshes"):
            if fields.get(name):
                add(f"an aborted snapshot has {name}")
        return
    if fields.get("reason"):
        add("a committed snapshot has a reason for being aborted")
    if has({"meshes", "world_size"}):
        check_meshes(fields["meshes"], fields["world_size"], add)
        if len(set(fields["meshes"])) != len(fields["meshes"]):
            add("a mesh is stored twice")
    if has({"tables"}):
        for digest, table in fields["tables"].items():
            name = f"tables[{quote(digest)}]"
            check_table(table, name, add)
            if table_digest(table) != digest:
                add(f"{name} is not stored under its own digest")
    if has({"shards", "world_size"}):
        _check_ranks(fields["shards"], fields["world_size"], findings)
    if has({"shards", "tables", "meshes"}):
        _check_references(fields, findings)


def _check_ranks(shards: tuple[ShardEntry, ...], world_size: int, findings: Findings) -> None:
    ranks: set[int] = set()
    files: set[str] = set()
    for index, shard in enumerate(shards):
        name = f"shards[{index}]"
        if not 0 <= shard.rank < world_size:
            findings.add(f"{name}: rank {quote(shard.rank)} of {quote(world_size)}")
        elif shard.file != shard_file_name(shard.rank):
            findings.add(
                f"{name}: file {quote(shard.file)} is not {shard_file_name(shard.rank)}, the only name"
                f" that rank {shard.rank} may have"
            )
        if shard.rank in ranks:
            findings.add(f"{name}: rank {quote(shard.rank)} appears twice")
        if shard.file in files:
            findings.add(f"{name}: file {quote(shard.file)} appears twice")
        ranks.add(shard.rank)
        files.add(shard.file)
        if not 8 < shard.nbytes <= MAX_INT:
            findings.add(f"{name}: no shard file has {quote(shard.nbytes)} bytes")
        if not is_digest(shard.header_digest):
            findings.add(f"{name}: header_digest {quote(shard.header_digest)} is no digest")
    missing: list[int] = []
    for rank in range(world_size):  # ends after as many steps as there are shards, and a few
        if rank not in ranks:
            missing.append(rank)
            if len(missing) == 8:
                break
    if missing:
        findings.add(f"no shards for ranks {missing} of {quote(world_size)}")
    elif any(a.rank >= b.rank for a, b in pairwise(shards)):
        findings.add("shards are not in rank order")


def _check_replicas(
    replicas: str | msgspec.UnsetType, shards: tuple[ShardEntry, ...], findings: Findings
) -> None:
    """Check what is said of files that leave pieces to replicas."""
    is_shared = any(isinstance(shard.near, NearCopy) for shard in shards)
    if replicas != ("once" if is_shared else msgspec.UNSET):
        findings.add(f"replicas is {quote(replicas)}: `once` exactly if shards say what is near")
    for index, shard in enumerate(shards):
        name = f"shards[{index}]"
        if isinstance(shard.near, NearCopy):
            check_near(shard.near, name, findings.add)
        if shard.twin is msgspec.UNSET:
            continue
        if shard.near is msgspec.UNSET or shard.twin == shard.rank:
            findings.add(f"{name}: it cannot have the twin {quote(shard.twin)}")
        elif not 0 <= shard.twin < len(shards) or shards[shard.twin].twin is not msgspec.UNSET:
            findings.add(f"{name}: its twin {quote(shard.twin)} is no rank, or has a twin itself")


def _check_references(fields: Mapping[str, Any], findings: Findings) -> None:
    """Check what shards say of tables and meshes, in time linear in ranks + distinct tables."""
    meshes: tuple[Mesh, ...] = fields["meshes"]
    tables: dict[str, tuple[TensorRow, ...]] = fields["tables"]
    seen: set[tuple[str, tuple[int, ...]]] = set()
    used_meshes: set[int] = set()
    num_before = len(findings.problems)
    for index, shard in enumerate(fields["shards"]):
        name = f"shards[{index}]"
        bad = [mesh for mesh in shard.meshes if not 0 <= mesh < len(meshes)]
        if bad:
            findings.add(f"{name}: meshes {quote(bad[:8])} of {len(meshes)}")
            continue
        used_meshes.update(shard.meshes)
        own = [meshes[mesh] for mesh in shard.meshes]
        check_coordinates(own, shard.coordinates, shard.rank, name, findings.add)
        if shard.table not in tables:
            findings.add(f"{name}: there is no table {quote(shard.table)}")
        elif (shard.table, shard.meshes) not in seen:
            seen.add((shard.table, shard.meshes))
            num_axes = [len(mesh.shape) for mesh in own]
            where = f"tables[{quote(shard.table)}]"
            check_table_meshes(tables[shard.table], num_axes, where, findings.add)
    for digest in sorted(tables.keys() - {shard.table for shard in fields["shards"]}):
        findings.add(f"no shard uses the table {quote(digest)}")
    if len(used_meshes) < len(meshes) and len(findings.problems) == num_before:
        findings.add("a mesh is used by no shard")
    if len(findings.problems) == num_before:
        shards = fields["shards"]
        for problem in find_disagreements(
            (s.rank, s.table, tables[s.table], tuple(meshes[mesh] for mesh in s.meshes))
            for s in shards
        ):
            findings.add(problem)
