"""Which snapshots are committed on the root: publish, abort, list, delete, claim a run (P1, P4)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from shardstore.engine.liveness import RunRecord, decode_record
from shardstore.engine.overview import (
    KnownRegisters,
    Overview,
    State,
    is_cut,
    older_indexes,
)
from shardstore.engine.sealed import SealedShard, check_identity, read_sealed_header
from shardstore.engine.several import at_once
from shardstore.errors import (
    CorruptSnapshotError,
    FormatError,
    SnapshotNotFoundError,
    TierError,
)
from shardstore.format.manifest import (
    MANIFEST_NAME,
    decode_manifest,
    encode_manifest,
    shard_file_name,
)
from shardstore.format.records import FORMAT_VERSION, Manifest, SnapshotId
from shardstore.format.register import Register, read_register
from shardstore.tiers.base import RootTier

_LOG: Final = logging.getLogger("shardstore")
_PEEK_NBYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class RootEntry:
    """What the root holds of one attempt."""

    id: SnapshotId
    state: State
    manifest: Manifest | None = None
    problem: str = ""
    """Why a damaged register cannot be read."""


class Catalog:
    """The root's registers. Reading is for every rank; writing for the ranks that P4 names."""

    def __init__(self, tier: RootTier, *, spans_hosts: bool = False) -> None:
        """Wrap a root tier; nothing is read or written yet.

        Args:
            tier: Of the root.
            spans_hosts: It shows the roots of all hosts, where each has its own (`jointroot`).
        """
        self.tier = tier
        self._known = KnownRegisters()
        self._keeps_index = False
        self._was_exclusive = True
        self.spans_hosts = spans_hosts
        self._root_names: tuple[str, ...] | None = None
        """As the last overview showed them."""
        self._records: dict[int, RunRecord] = {}

    # ------------------------------------------------------------------- reads

    def ids(self) -> list[SnapshotId]:
        """Every attempt in any state, oldest first."""
        return sorted(self.tier.list_ids(), key=lambda i: i.order)

    def entry(self, snapshot_id: SnapshotId) -> RootEntry:
        """Read one register whole. One that cannot be read is damaged: the others are what they are."""
        try:
            data = self.tier.read_manifest(snapshot_id)
        except TierError as error:
            return RootEntry(snapshot_id, "damaged", problem=str(error))
        if data is None:
            return RootEntry(snapshot_id, "torn")
        return self._judge_twice(snapshot_id, data)

    def _judge_twice(self, snapshot_id: SnapshotId, data: bytes) -> RootEntry:
        """Read it once more where bytes may have become wrong on the way."""
        found = self._judge(snapshot_id, data)
        if found.state != "damaged" or not self.tier.keeps_index:
            return found
        try:
            again = self.tier.read_manifest(snapshot_id)
        except TierError:
            again = None
        return found if again in (None, data) else self._judge(snapshot_id, again)

    def _judge(self, snapshot_id: SnapshotId, data: bytes) -> RootEntry:
        source = f"{self.tier.name}: {self.tier.location}/{snapshot_id.name}/manifest.json"
        try:
            manifest = decode_manifest(data, source=source, expect=snapshot_id)
        except (FormatError, CorruptSnapshotError) as error:
            return RootEntry(snapshot_id, "damaged", problem=str(error))
        if manifest.state == "aborted":
            return RootEntry(snapshot_id, "aborted", manifest)
        return RootEntry(snapshot_id, "committed", manifest)

    def state(self, snapshot_id: SnapshotId) -> State:
        """State of one register, whatever the size of its tables; damaged if it cannot be read."""
        register = self._register_or_damaged(snapshot_id)
        return register if isinstance(register, str) else register.state

    def settled_state(self, snapshot_id: SnapshotId) -> State:
        """State of one register, where nothing may be taken for another answer.

        Raises:
            TierError: It cannot be read.
        """
        register = self._register(snapshot_id)
        return register if isinstance(register, str) else register.state

    def state_of(self, snapshot_id: SnapshotId, data: bytes | None) -> State:
        """State of one whose register holds `data`; None: there is no register."""
        register = self._register_in(snapshot_id, data)
        return register if isinstance(register, str) else register.state

    def _register_or_damaged(self, snapshot_id: SnapshotId) -> Register | State:
        try:
            return self._register(snapshot_id)
        except TierError:
            return "damaged"

    def _register(self, snapshot_id: SnapshotId) -> Register | State:
        return self._register_in(snapshot_id, self.tier.read_manifest(snapshot_id))

    def _register_in(self, snapshot_id: SnapshotId, data: bytes | None) -> Register | State:
        if data is None:
            return "torn"
        return read_register(data, expect=snapshot_id) or self._judge_twice(snapshot_id, data).state

    def overview(self) -> Overview:
        """All attempts, their files and registers, in as few looks as the tier allows.

        Raises:
            TierError: The root cannot be listed. A single register that cannot be read is a problem of it.
        """
        survey = self.tier.survey()
        registers, bad, unread = self._known.read(self.tier, survey)
        problems = {i: self._judge(i, data).problem for i, data in bad.items()}
        problems |= {i: str(error) for i, error in unread.items()}
        self._root_names = survey.names
        return Overview(
            survey.attempts, registers, problems, unread, survey.names, self.spans_hosts
        )

    def keep_index(self, run: int, added: SnapshotId, dropped: Collection[SnapshotId] = ()) -> None:
        """Write down what is known of all registers, for those who list the root without having read them.

        Args:
            run: Number of this run.
            added: What was committed just now.
            dropped: What was deleted since the last time.

        Raises:
            TierError: The root cannot be read, or written to.
        """
        if not self.tier.keeps_index:
            return
        if not self._keeps_index:
            self._keeps_index = True
            if self._root_names is None or self._known.lacks(added):
                self.overview()  # what earlier runs knew is in this one's index from now on
            self._known.drop(dropped)
            self._known.save(self.tier, run)
            for name in older_indexes(self._root_names or (), run):
                self.tier.remove_small(name)
            return
        self._known.drop(dropped)
        # In this order: what is replaced in between goes under the tag that no listing shows any more.
        tag, data = self.tier.register_tag(added), self.tier.read_manifest(added)
        register = None if data is None else read_register(data, expect=added)
        if register is not None:
            self._known.put(register, tag)
        self._known.save(self.tier, run)

    def committed(self) -> list[Register]:
        """Registers of all committed snapshots, oldest first.

        Passed over are those with a damaged manifest, or without the file of a rank that belongs here and
        has no twin.
        """
        return self.overview().committed()

    def is_cut(self, register: Register, overview: Overview | None = None) -> bool:
        """Whether a file has not the size that the register says, as in a copy that did not end.

        Raises:
            TierError: The folder cannot be listed.
        """
        sizes = overview.sizes(register.id) if overview is not None else None
        names = sizes or dict(self.tier.list_names(register.id.name))
        return is_cut(register, names, spans_hosts=self.spans_hosts)

    def read_header(self, snapshot_id: SnapshotId, rank: int) -> SealedShard:
        """Read and check the header of one shard file.

        Raises:
            TierError, FormatError, CorruptSnapshotError: It cannot be read, or is damaged.
        """
        with self.tier.open_shard(snapshot_id, rank) as reader:
            sealed = read_sealed_header(reader)
        check_identity(sealed.header, snapshot_id, rank, source=shard_file_name(rank))
        return sealed

    # ---------------------------------------------------------------- register

    def publish(self, manifest: Manifest) -> bool:
        """Commit; False if it was aborted, whether or not the register still says so: that stands."""
        data = encode_manifest(manifest)
        ranks = {shard.rank: shard.nbytes for shard in manifest.shards}
        stored = self.tier.create_manifest(manifest.id, data, make_folder=False, ranks=ranks)
        if stored is None:
            return False
        return self._read_back(manifest.id, stored).state == "committed"

    def abort(self, snapshot_id: SnapshotId, *, reason: str, writer: Mapping[str, str]) -> bool:
        """Close the register of a failed attempt; False if it was committed, and that stands."""
        record = aborted_manifest(snapshot_id, reason=reason, writer=writer)
        data = encode_manifest(record)
        stored = self.tier.create_manifest(snapshot_id, data, make_folder=True)
        assert stored is not None
        return self._read_back(snapshot_id, stored).state == "aborted"

    def _read_back(self, snapshot_id: SnapshotId, stored: bytes) -> Manifest:
        return decode_manifest(
            stored, source=f"{self.tier.location}/{snapshot_id.name}", expect=snapshot_id
        )

    def unlist(self, snapshot_id: SnapshotId, *, reason: str, writer: Mapping[str, str]) -> None:
        """Take a snapshot off the list, by one atomic replacement; its bytes are still there.

        That it is gone altogether is fine: another process deletes here as well.

        Raises:
            TierError: It could not be replaced, or that is in doubt.
        """
        if self.state(snapshot_id) == "aborted":
            return
        record = aborted_manifest(snapshot_id, reason=reason, writer=writer)
        try:
            self.tier.replace_manifest(snapshot_id, encode_manifest(record))
        except TierError as error:
            vanished = isinstance(error.__cause__, FileNotFoundError)
            if not vanished or snapshot_id in self.tier.list_ids():
                raise

    def remove_aborted(self, *, spare_runs: Collection[int] = ()) -> set[SnapshotId]:
        """Remove the bytes of what is off the list; what could not be removed, which is told."""
        for name in self.tier.list_deleted():
            try:
                self.tier.remove_deleted(name)
            except TierError as error:
                _LOG.warning("%s (it is no snapshot any more; removal is tried again)", error)
        overview = self.overview()
        closed_before = time.time() - self.tier.keep_closed_s

        def has_to_go(snapshot_id: SnapshotId) -> bool:
            if snapshot_id.run in spare_runs or overview.state(snapshot_id) != "aborted":
                return False
            is_kept = overview.registers[snapshot_id].created >= closed_before
            return not is_kept or overview.names[snapshot_id].keys() != {MANIFEST_NAME}

        due = [*filter(has_to_go, overview.ids)]
        removed = at_once(self.tier, self.try_remove, due)
        return {i for i, is_gone in zip(due, removed, strict=True) if not is_gone}

    def try_remove(self, snapshot_id: SnapshotId) -> bool:
        """Remove the bytes of an aborted attempt; whether it worked. A failure is told and tried next time.

        Of a part of an attempt the register stays: the next run on all hosts learns from it.
        """
        try:
            if self.is_part(snapshot_id):
                for rank in self.tier.list_ranks(snapshot_id):
                    self.tier.remove_shard(snapshot_id, rank)
            else:
                self.tier.remove(snapshot_id)
        except TierError as error:
            _LOG.warning("%s (%s is no longer listed; removal is tried again)", error, snapshot_id)
            return False
        return True

    # ------------------------------------------------------------------- marks

    def pin(self, snapshot_id: SnapshotId) -> None:
        """Exempt a snapshot from retention until it is unpinned or deleted, by a mark beside it.

        On return the pin is durable. Pinning again is fine. Any process may pin.

        Raises:
            SnapshotNotFoundError: It is not on the root, or no longer (pinned while it was deleted).
            TierError: The root cannot be written to.
        """
        self._check_listed(snapshot_id)
        try:
            self.tier.put_mark(snapshot_id, "pinned")
        except TierError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                self._check_listed(snapshot_id)
            raise
        self._check_listed(snapshot_id)

    def unpin(self, snapshot_id: SnapshotId) -> None:
        """Leave a snapshot to retention again. That it is not pinned is fine.

        Raises:
            SnapshotNotFoundError: It is not on the root.
            TierError: The root cannot be written to.
        """
        self._check_listed(snapshot_id)
        self.tier.drop_mark(snapshot_id, "pinned")

    def pinned(self) -> set[SnapshotId]:
        """All pinned snapshots, whoever pinned them. A pin beside what is no snapshot is ignored."""
        overview = self.overview()
        listed = [i for i in overview.ids if overview.state(i) in ("committed", "damaged")]
        return {i for i in listed if "pinned" in overview.marks(i)}

    def is_pinned(self, snapshot_id: SnapshotId) -> bool:
        """Whether there is a pin beside this one."""
        return "pinned" in self.tier.marks(snapshot_id)

    def mark_damaged(self, snapshot_id: SnapshotId) -> None:
        """Say beside a snapshot that it was found damaged: retention does not count it any more."""
        if self.is_listed(snapshot_id):
            self.tier.put_mark(snapshot_id, "damaged")

    def is_listed(self, snapshot_id: SnapshotId) -> bool:
        """Whether it was committed and not deleted, readable or not."""
        return self.state(snapshot_id) in ("committed", "damaged")

    def is_part(self, snapshot_id: SnapshotId) -> bool:
        """Whether other hosts have roots of their own with the rest of an attempt, which this does not show.

        Raises:
            TierError: The record of its run cannot be read.
        """
        if self.spans_hosts or self.tier.is_shared:
            return False
        record = self.run_record(snapshot_id.run)
        return record is not None and bool(record.roots)

    def _check_listed(self, snapshot_id: SnapshotId) -> None:
        if not self.is_listed(snapshot_id):
            raise SnapshotNotFoundError(
                f"{snapshot_id} is not committed in {self.tier.location}", step=snapshot_id.step
            )

    # -------------------------------------------------------------------- runs

    def highest_run(self) -> int:
        """Highest run number that left any trace, 0 if none did."""
        runs = self.tier.run_numbers()
        runs += [snapshot_id.run for snapshot_id in self.tier.list_ids()]
        return max(runs, default=0)

    def claim_run(self, lowest: int, record: Callable[[], RunRecord]) -> int:
        """Claim the first free run number from `lowest` on, and above all traces, for rank 0.

        Args:
            lowest: The least that will do.
            record: Says who claims it; called once the root is there.
        """
        self.tier.make_location()
        data = msgspec.json.encode(record())
        run = max(lowest, self.highest_run() + 1)
        while not self.tier.claim_run(run, data):
            run += 1
        return run

    def sees_run(self, run: int, nonce: str) -> bool:
        """Whether this host sees the record that rank 0 wrote: the root is shared."""
        record = decode_record(self.tier.read_run(run))
        if record is None or record.nonce != nonce:
            return False
        self._was_exclusive = record.is_exclusive
        return True

    @property
    def is_exclusive(self) -> bool:
        """Whether registers are created exclusively, as rank 0 found it out at the first save."""
        found = self.tier.is_exclusive
        return self._was_exclusive if found is None else found

    def run_record(self, run: int) -> RunRecord | None:
        """Who claimed a number; None if nothing readable says so. It is written once, and read once."""
        if run not in self._records:
            record = decode_record(self.tier.read_run(run))
            if record is None:
                return None
            self._records[run] = record
        return self._records[run]


def aborted_manifest(
    snapshot_id: SnapshotId, *, reason: str, writer: Mapping[str, str]
) -> Manifest:
    """The register content of an attempt that will never be a snapshot."""
    return Manifest(
        format=FORMAT_VERSION,
        state="aborted",
        step=snapshot_id.step,
        run=snapshot_id.run,
        count=snapshot_id.count,
        nonce=snapshot_id.nonce,
        created=time.time(),
        world_size=0,
        meshes=(),
        tables={},
        shards=(),
        metadata=None,
        writer=dict(writer),
        reason=reason[:500].encode("utf-8", "backslashreplace").decode(),
    )


def newest_first(ids: Iterable[SnapshotId]) -> list[SnapshotId]:
    """Order of P1, reversed."""
    return sorted(set(ids), key=lambda i: i.order, reverse=True)
