"""Restore (P5): agree on one snapshot, read and verify all of it, vote, and only then touch live state."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from shardstore.engine.choose import Candidate, Chooser, Inventory, Nothing, Skip
from shardstore.engine.inventory import take_inventory
from shardstore.engine.jointly import meet_after_copying
from shardstore.engine.load import Loaded, load_shard, proves_damage
from shardstore.engine.plan import check_step
from shardstore.engine.report import RestoreReport
from shardstore.engine.session import Failure, Session, failure_of
from shardstore.engine.transitions import tell
from shardstore.engine.verdicts import (
    Ask,
    Note,
    Verdict,
    Vote,
    merge_notes,
    note_of,
    raise_note,
)
from shardstore.errors import (
    CoordinationError,
    CorruptSnapshotError,
    FormatError,
    FormatVersionError,
    ShardStoreError,
    TierError,
    TierFullError,
    UnsupportedStateError,
)
from shardstore.state.guards import check_boundary
from shardstore.state.quiet import without_gc

_NOT_FOUND: Final = (
    "no snapshot was ever committed in {where}{of_step}. Pass required=False to start fresh, or check "
    "root=, name= and memory_dir=."
)


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """The arguments of `SnapshotStore.restore`."""

    step: int | None = None
    required: bool = True
    partial: bool = False
    strict: bool = True
    fallback: bool = True


class Restorer:
    """One restore, step by step; every rank runs one at the same time, under the same name."""

    def __init__(
        self,
        session: Session,
        state: Mapping[str, object],
        options: RestoreOptions,
        *,
        name: str,
        where: str,
        count: int,
        problem: BaseException | None = None,
    ) -> None:
        """Prepare only.

        Args:
            session: This rank's session.
            state: What to fill.
            options: The caller's arguments.
            name: Unique to this restore and equal on all ranks.
            where: Root or namespace, for messages.
            count: Saves entered so far; afterwards `count` is what all ranks go on from.
            problem: Why this rank cannot take part; all ranks raise its like.
        """
        self._session = session
        self._state = state
        self._options = options
        self._name = name
        self._where = where
        self._chooser: Chooser | None = None
        self._loaded: Loaded | None = None
        self._refused_by = problem
        self._bad_argument: ValueError | None = None
        self.count = count
        self.has_touched_state = False

    def run(self) -> RestoreReport | None:
        """Do it. Returns the report, None if there is no snapshot; `count` is agreed even if it raises.

        Raises:
            ShardStoreError: See `SnapshotStore.restore`; the same class on every rank.
        """
        try:
            with self._session.restoring():
                return self._run()
        finally:
            # A traceback of what was refused must not keep live objects alive, nor may the plan.
            self._drop()
            self._refused_by = None
            self._state = {}

    def _run(self) -> RestoreReport | None:
        started = time.monotonic()
        verdict = self._first_verdict()
        if self._refused_by is not None and not isinstance(self._refused_by, Exception):
            raise self._refused_by  # an interrupt of this rank, now that the others know
        agreed = time.monotonic()
        attempt = 0
        while verdict.action == "try":
            assert verdict.candidate is not None
            verdict = self._attempt(verdict.candidate, attempt)
            attempt += 1
        if verdict.action != "apply":
            self._raise_unless_optional(verdict)
            return None
        verified = time.monotonic()
        assert verdict.candidate is not None
        self._apply(verdict.candidate, attempt)
        ended = time.monotonic()
        times = (agreed - started, verified - agreed, ended - verified)
        return self._report(verdict, verdict.candidate, times)

    # ------------------------------------------------------------------- agree

    def _first_verdict(self) -> Verdict:
        problem, inventory = None, Inventory()
        try:
            if self._refused_by is not None:
                raise self._refused_by
            if not isinstance(self._state, Mapping):
                raise UnsupportedStateError(
                    f"restore needs a mapping of names to objects, got {type(self._state).__name__}: "
                    'write {"model": model}',
                    type=type(self._state).__qualname__,
                )
            if self._options.step is not None:
                self._take_step(self._options.step)
            check_boundary(self._state)
            inventory = take_inventory(self._session, self._options.step)
        except BaseException as error:  # noqa: BLE001 - every rank must hear of it
            problem, self._refused_by = note_of(error, self._session.rank), error
        options = self._options
        ask = Ask(
            options.step if problem is None else None, options.required, options.partial, options.strict, options.fallback,
            self.count, inventory, problem,
        )  # fmt: skip
        decided = self._session.coordinator.gather_decide(
            f"{self._name}/ask",
            msgspec.json.encode(ask),
            self._choose_first,
            phase="restore: agreeing on a snapshot",
        )
        verdict = msgspec.json.decode(decided, type=Verdict)
        self.count = verdict.count
        return verdict

    def _take_step(self, step: object) -> None:
        try:
            self._options = replace(self._options, step=check_step(step))
        except ValueError as error:
            self._bad_argument = error
            raise

    def _choose_first(self, values: list[bytes]) -> bytes:
        """On rank 0: compare what the ranks ask, and choose the first candidate."""
        asks = [msgspec.json.decode(value, type=Ask) for value in values]
        count = max(ask.count for ask in asks)
        problems = [(rank, ask.problem) for rank, ask in enumerate(asks) if ask.problem]
        if problems:
            verdict = Verdict("raise", note=merge_notes(problems), count=count)
        elif any(ask.arguments != asks[0].arguments for ask in asks):
            shown = "; ".join(
                f"rank {rank}: step={a.step}, required={a.required}, partial={a.partial}, "
                f"strict={a.strict}, fallback={a.fallback}"
                for rank, a in enumerate(asks)
                if rank == 0 or a.arguments != asks[0].arguments
            )
            note = Note("coordination", f"ranks called restore with different arguments: {shown}")
            verdict = Verdict("raise", note=note, count=count)
        else:
            self._chooser = Chooser(
                [ask.inventory for ask in asks], self._session.catalog, step=self._options.step
            )
            verdict = msgspec.structs.replace(self._next_candidate(), count=count)
        return msgspec.json.encode(verdict)

    def _next_candidate(self) -> Verdict:
        """On rank 0: the next candidate, or the error that ends the search."""
        assert self._chooser is not None
        found = self._chooser.next()
        skipped = tuple(self._chooser.skipped)
        if isinstance(found, Candidate):
            if skipped and not self._options.fallback:
                return Verdict("raise", note=_corrupt_note(skipped), skipped=skipped)
            return Verdict("try", candidate=found, skipped=skipped)
        if found.kind == "unreadable":
            message = (
                f"snapshots exist in {self._where}, but none of them can be read:\n{found.detail}"
            )
            return Verdict("raise", note=Note("corrupt", message), skipped=skipped)
        return Verdict("absent", note=self._absent_note(found), skipped=skipped)

    def _absent_note(self, _found: Nothing) -> Note:
        step = self._options.step
        of_step = "" if step is None else f" at step {step}"
        return Note("absent", _NOT_FOUND.format(where=self._where, of_step=of_step))

    def _raise_unless_optional(self, verdict: Verdict) -> None:
        assert verdict.note is not None
        if verdict.action == "absent" and not self._options.required:
            self._session.log("nothing to restore: %s", verdict.note.message)
            return
        if self._bad_argument is not None:
            raise self._bad_argument  # ours; the others are told of it
        raise_note(verdict.note, step=self._options.step, cause=self._refused_by)

    # ----------------------------------------------------------------- attempt

    def _attempt(self, candidate: Candidate, attempt: int) -> Verdict:
        """Read and verify one candidate on this rank, then vote."""
        self._drop()
        vote = self._load(candidate)
        decided = self._session.coordinator.gather_decide(
            f"{self._name}/vote/{attempt}",
            msgspec.json.encode(vote),
            lambda values: self._count_votes(candidate, values),
            phase=f"restore of step {candidate.id.step}: reading and verifying",
        )
        verdict = msgspec.json.decode(decided, type=Verdict)
        self._note_damage(verdict)
        if self._refused_by is not None and not isinstance(self._refused_by, Exception):
            raise self._refused_by
        return verdict

    def _note_damage(self, verdict: Verdict) -> None:
        """All ranks alike: where there is no root, each decides by itself what retention lets go."""
        session = self._session
        if verdict.passed_over is not None:
            with session.lock:
                session.damaged.add(verdict.passed_over)
                if verdict.is_proven:
                    session.unmarked.add(verdict.passed_over)

    def _load(self, candidate: Candidate) -> Vote:
        session = self._session
        problems: list[ShardStoreError] = []
        try:
            with without_gc():
                self._loaded = load_shard(session, self._state, candidate, self._options, problems)
        except FormatVersionError as error:
            self._refused_by = error
            return Vote(refusal=note_of(error, session.rank))
        except TierFullError as error:
            # No room to read into says nothing of the snapshot.
            self._refused_by = error
            return Vote(refusal=note_of(error, session.rank))
        except (CorruptSnapshotError, FormatError, TierError) as error:
            session.warn("%s cannot be restored from: %s", candidate.id, error)
            is_proven = proves_damage(problems, candidate)
            return Vote(damage=note_of(error, session.rank), is_proven=is_proven)
        except BaseException as error:  # noqa: BLE001 - every rank must hear of it
            self._refused_by = error
            return Vote(refusal=note_of(error, session.rank))
        metadata = self._loaded.header.metadata if session.rank == 0 else None
        return Vote(tier=self._loaded.tier, metadata=metadata)

    def _count_votes(self, candidate: Candidate, values: list[bytes]) -> bytes:
        """On rank 0: apply, pass over, or refuse."""
        assert self._chooser is not None
        votes = [msgspec.json.decode(value, type=Vote) for value in values]
        refusals = [(rank, vote.refusal) for rank, vote in enumerate(votes) if vote.refusal]
        damages = [(rank, vote.damage) for rank, vote in enumerate(votes) if vote.damage]
        if refusals:
            verdict = Verdict("raise", note=merge_notes(refusals))
        elif damages:
            note = merge_notes(damages)
            self._chooser.skip(candidate, note.message)
            if self._options.fallback:
                verdict = self._next_candidate()
                if verdict.action == "raise" and verdict.note is not None:
                    # Where the last one's damage is, and what became of all of them.
                    last = verdict.note
                    note = msgspec.structs.replace(note, kind=last.kind, message=last.message)
                    verdict = msgspec.structs.replace(verdict, note=note)
            else:
                verdict = Verdict("raise", note=msgspec.structs.replace(note, kind="corrupt"))
            is_proven = any(vote.is_proven for vote in votes)
            verdict = msgspec.structs.replace(
                verdict, passed_over=candidate.id, is_proven=is_proven
            )
        else:
            tiers: dict[str, int] = {}
            for vote in votes:
                tiers[vote.tier] = tiers.get(vote.tier, 0) + 1
            verdict = Verdict(
                "apply",
                candidate=candidate,
                skipped=tuple(self._chooser.skipped),
                tiers=tiers,
                metadata=votes[0].metadata,
            )
        return msgspec.json.encode(verdict)

    # ------------------------------------------------------------------- apply

    def _apply(self, candidate: Candidate, attempt: int) -> None:
        """Touch live state; then the barrier. A failure on any rank is told on all."""
        session, failure, error = self._session, None, None
        assert self._loaded is not None
        self.has_touched_state = True
        try:
            self._loaded.apply()
        except BaseException as raised:  # noqa: BLE001 - the others must hear of it first
            failure, error = failure_of(raised, session.rank), raised
        phase = f"restore of step {candidate.id.step}: the barrier after copying"
        name = f"{self._name}/applied/{attempt}"
        mine = msgspec.json.encode(failure)
        decided = meet_after_copying(session.coordinator, name, mine, _first_failure, phase=phase)
        first = msgspec.json.decode(decided, type=Failure | None)
        if error is not None and not isinstance(error, Exception):
            raise error
        if first is not None:
            raise CoordinationError(
                f"restore of step {candidate.id.step} failed while live state was being filled: the "
                f"state is partly applied and must not be trained on. First cause, {first.describe()}",
                failed_ranks=first.failed_ranks or (first.rank,),
                phase="restore: copying into live state",
            ) from error
        self._protect(candidate)

    def _protect(self, candidate: Candidate) -> None:
        """P never moves back, but from a snapshot that turned out damaged."""
        memory = self._session.memory
        newest = memory.newest_complete
        if newest is None or candidate.id.order > newest.order or newest in self._session.damaged:
            memory.set_newest_complete(candidate.id)

    def _report(
        self, verdict: Verdict, candidate: Candidate, times: tuple[float, float, float]
    ) -> RestoreReport:
        assert self._loaded is not None
        plan = self._loaded.plan
        parts = [
            f"{tier} ({num} rank{'s' if num > 1 else ''})"
            for tier, num in sorted(verdict.tiers.items())
        ]
        report = RestoreReport(
            step=candidate.id.step,
            id=candidate.id.name,
            metadata=verdict.metadata,
            tier=", ".join(parts),
            duration_s=sum(times),
            skipped=verdict.skipped,
            missing=plan.missing,
            unexpected=plan.unexpected,
            uncovered=plan.uncovered,
            num_tensors=plan.num_tensors,
            agree_s=times[0],
            verify_s=times[1],
            copy_s=times[2],
        )
        session, nbytes = self._session, self._loaded.nbytes
        session.meter.add("restore", nbytes, report.duration_s)
        tell(
            session.rank, "restored", "restored %s", report,
            step=report.step, snapshot_id=report.id, tier=self._loaded.tier, nbytes=nbytes,
            seconds=report.duration_s,
        )  # fmt: skip
        return report

    def _drop(self) -> None:
        """Let go of buffers, and of live objects that the plan refers to."""
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None


def _first_failure(values: list[bytes]) -> bytes:
    """The lowest rank's failure, or null."""
    return next((value for value in values if value != b"null"), b"null")


def _corrupt_note(skipped: tuple[Skip, ...]) -> Note:
    reasons = "; ".join(f"{skip.id}: {skip.reason}" for skip in skipped)
    return Note("corrupt", f"the newest snapshot cannot be read and fallback=False: {reasons}")
