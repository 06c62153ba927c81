"""The store: what a trainer calls."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Literal, overload

from shardstore.cluster.preemption import check_signals
from shardstore.cluster.threads import rank_in_process
from shardstore.engine import registry
from shardstore.engine.arguments import check_flag, check_patience, check_timeout
from shardstore.engine.deleting import delete_step
from shardstore.engine.failures import Failures
from shardstore.engine.flush import Flusher
from shardstore.engine.guard import PreemptionGuard
from shardstore.engine.handle import Snapshot
from shardstore.engine.kept import KeptSnapshots
from shardstore.engine.leaving import Leaver
from shardstore.engine.listing import SnapshotInfo, list_session
from shardstore.engine.marking import pin_step
from shardstore.engine.opening import open_session
from shardstore.engine.options import check_options
from shardstore.engine.plan import check_step
from shardstore.engine.progress import Progress, ProgressReporter
from shardstore.engine.report import RestoreReport
from shardstore.engine.restore import RestoreOptions, Restorer
from shardstore.engine.retention import Keep
from shardstore.engine.saving import SavePipeline
from shardstore.engine.session import PendingSave, failure_of
from shardstore.engine.stager import Stager
from shardstore.engine.stats import StoreStats
from shardstore.engine.summary import stats_of
from shardstore.engine.swap import PrivateCopy
from shardstore.engine.transitions import report_staged, staged
from shardstore.errors import CoordinationTimeoutError, ShardStoreError
from shardstore.state.overlap import StepGuard
from shardstore.tiers.fileops import current_ops

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # noqa: TID251 - a type only

    from shardstore.cluster.threads import ThreadRank


class SnapshotStore:
    """A store of snapshots of the state of all ranks.

    Every rank opens it and calls `save`, `restore`, `swapped`, `delete`, `pin`, `unpin` and `warmup`
    in the same order; the rest is local. One thread calls it. Use it as a context manager: left normally it drains and
    frees its memory, left by an exception it waits for no rank and keeps memory for the restart.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        disk: str | os.PathLike[str] | None = None,
        memory: int | str = "auto",
        memory_dir: str | os.PathLike[str] = "/dev/shm",  # noqa: S108
        name: str | None = None,
        keep: int | Keep | None = None,
        shared: bool | None = None,
        on_full: Literal["wait", "skip", "direct"] = "wait",
        on_error: Literal["raise", "warn"] = "raise",
        process_group: ProcessGroup | ThreadRank | None = None,
        timeout_s: float = 600.0,
        storage_options: Mapping[str, object] | None = None,
        progress: Callable[[Progress], object] | None = None,
        replicas: Literal["all", "once"] = "all",
    ) -> None:
        """Open the store, and adopt what a dead run of the same name left in memory.

        Args:
            root: Where snapshots are durable: a folder that all hosts share (or see `shared`), or the URL of
                remote storage (`s3://bucket/folder`, `gs://`, `az://`, `sftp://`, any that fsspec has a
                client for). None: memory and disk only.
            disk: Folder on a disk of each host, between memory and the root: memory is free again as soon
                as a snapshot is there, and a restart reads it from there. When it is full, what the root
                has as well goes, oldest first.
            memory: Host memory for this rank, "24GiB" or bytes; "auto" is half of what is free,
                shared among the host's ranks; 0 keeps nothing in memory (needs a root). A state that
                does not fit is streamed to the root, and `save` blocks until it is there.
            memory_dir: A tmpfs for the memory tier.
            name: Namespace under `memory_dir` and `disk`; default: digest of the root, else of the disk.
                With none of these, memory is private and ends with the process.
            keep: How many of the newest snapshots to keep, or a Keep(last=, every_steps=) that also keeps
                some for good. Older ones are deleted once a newer one is committed; pinned ones, those
                with persist=False, and those of other jobs that work on the root, never. None deletes
                nothing.
            shared: Whether all hosts see one root. True refuses a root that they do not share. False: each
                has its own (ranks may then name different folders): it keeps its ranks' files, and a
                restart needs every rank on the host that it was on. None finds out at the first save.
            on_full: What `save` does while no memory is free, but some is on its way out: waits for
                it; leaves this snapshot out, on all ranks (`wait` returns None then); or writes
                directly to the root and blocks meanwhile.
            on_error: A failed background write raises at the same later call on all ranks, or warns.
            process_group: Ranks of the store; default: all.
            timeout_s: Longest wait for a rank that makes no progress, in seconds.
            storage_options: For the client of a remote root: endpoint, credentials. They are neither stored
                nor shown; better leave credentials to the client's own configuration.
            progress: Called with a Progress at most about every 0.2 s of work on this rank, and at its
                end: from the calling thread and from background threads, which wait for it meanwhile
                (a slow one is called less often), several at a time. What it raises is logged once and
                breaks nothing. It must not call the store, but for `stats`. Ranks may differ. None:
                rank 0 logs a line every 5 s of a save, restore or drain that blocks for longer.
            replicas: "once" has the root hold each shard once where DTensor placements replicate it (as
                HSDP does): replicas write in turn, about equally much, and a restore reads the shared
                copy. Memory and disk hold whole files, as the root does with "all". Replicas whose bytes
                differ are warned of, and store their own.

        Raises:
            ValueError: An argument is off.
            CoordinationError: Ranks differ in arguments; or WORLD_SIZE > 1 without init_process_group.
            TierError: The root's bucket, credentials or client are missing or wrong; `disk` cannot be used; or `memory_dir` cannot and there is neither root nor disk; or
                one of them is a file.
        """
        self._options = check_options(
            root=root,
            disk=disk,
            memory=memory,
            memory_dir=memory_dir,
            name=name,
            keep=keep,
            on_full=on_full,
            on_error=on_error,
            timeout_s=timeout_s,
            replicas=replicas,
            storage_options=storage_options,
            shared=shared,
        )
        if progress is not None and not callable(progress):
            raise ValueError(f"progress must be callable or None, got {progress!r}")
        self._state: Literal["open", "swapped", "closed"] = "open"
        self._why_closed = "it was closed"
        self._count = 0
        self._round = 0
        self._num_flushes = 0
        self._guards: list[PreemptionGuard] = []
        ops = current_ops()
        self._pid = os.getpid()
        place = self._options.memory_dir, self._options.name, rank_in_process(process_group)
        registry.take_over(*place)
        self._session = open_session(self._options, process_group, ops)
        self._session.progress = ProgressReporter(progress, rank=self._session.rank)
        self._failures = Failures(self._session, only_warn=on_error == "warn")
        kept = KeptSnapshots(self._session, ops)
        self._pipeline = SavePipeline(self._session, self._failures, kept, ops)
        self._stager = Stager(self._session, ops, on_full=on_full, number=self._pipeline.number)
        self._guard = StepGuard(self._options.timeout_s)
        self._restorer: Restorer | None = None
        self._flusher = Flusher(self._session, self._pipeline, kept, ops)
        self._leaver = Leaver(
            self._session, self._pipeline, self._failures, self._flusher, self._gone
        )
        registry.register(self, *place)

    # -------------------------------------------------------------------- save

    def save(
        self,
        state: Mapping[str, object],
        *,
        step: int,
        metadata: object = None,
        persist: bool = True,
        overlap: bool = False,
    ) -> Snapshot:
        """Copy the state of this rank, at a step boundary. All ranks.

        On return the state may change. Writing, and agreeing with the other ranks, goes on behind.

        With `overlap` the copy of what an optimizer in `state` holds, its parameters and its state for
        them, goes on behind as well, during the next forward and backward; every `step` of every
        torch optimizer waits for it by itself (also inside Accelerate's wrapper or a backward), and so
        do `save`, `restore`, `swapped`, `delete` and `close`. Everything else is copied on return:
        buffers, averages, frozen weights, plain tensors, leaves. Moving parameters (`p.data = ...`,
        `module.to`) is fine; resharding and clipping gradients do not change them. Whoever writes to
        them in place by other means calls `snapshot.staged.result()` first: `load_state_dict` of a
        module, a step replayed from a CUDA graph, `untyped_storage().resize_`, SAM's `first_step`,
        ScheduleFree's `train` and `eval`, optimizers that are no torch.optim.Optimizer.

        Args:
            state: Names to modules, optimizers, objects with state_dict, tensors, plain values.
            step: Step, equal on all ranks.
            metadata: JSON; rank 0's is in the manifest.
            persist: False keeps it in memory until it is deleted; `keep` does not count it. With a root
                (or disk) it goes there, on all ranks, when one of them needs its memory.
            overlap: Return before parameters and optimizer state are copied. Without effect on this
                rank for a state that is streamed, or in which no optimizer is found. If the late copy
                fails, the save fails as it does for any failure behind.

        Raises:
            ValueError: `step` is not an integer from 0 on, or `persist` is not a bool.
            UnsupportedStateError: Something cannot be stored; the text says what and where.
            TierFullError: No memory is left, none became free in time, and the root cannot be used
                instead (persist=False, or there is none).
            SaveFailedError: An *earlier* save failed in the background. Raised by the same save on
                every rank; this save itself was taken and goes on.
        """
        self._check_open("save")
        self._count += 1
        self._failures.enter(self._count)
        self._session.meter.count("saves")
        save = PendingSave(
            count=self._count,
            step=-1,
            persist=persist is not False,
            created=time.time(),
        )
        try:
            self._guard.wait()
            check_flag(persist, what="persist")
            check_flag(overlap, what="overlap")
            self._stager.stage(save, state, step=step, metadata=metadata, overlap=overlap)
        except BaseException as error:
            save.raised = failure_of(error, self._session.rank)
            save.late = None  # its slot will serve others
            if save.slot is not None:
                self._session.memory.abandon_slot(save.slot)
                save.slot = None
            self._pipeline.submit(save)
            earlier = self._failures.due_at(self._count)
            if earlier is not None:
                self._session.warn("raised with another error of this save: %s", earlier)
            raise
        self._session.meter.save_blocked_s = time.monotonic() - save.started
        is_late = save.late is not None
        if save.late is not None:
            self._guard.watch(save.late)
        else:
            staged(self._session, save)
            save.staged.set_result(None)
        self._pipeline.submit(save)
        if not is_late:
            report_staged(self._session, save)
        if self._session.is_stopping:  # on all ranks alike: there will hardly be another save
            self._flusher.start(f"flush/save-{self._count}", self._session.in_time(float("inf")))
        earlier = self._failures.due_at(self._count)
        if earlier is not None:
            self._guard.wait()  # the caller gets no handle to wait with
            raise earlier
        return Snapshot(save)

    def warmup(self, state: Mapping[str, object]) -> None:
        """Get memory for the first saves now, and wait for it: first touch is the slow part. All ranks.

        Warns, as the first save does, if the root has no room for what `keep` is to keep.
        """
        self._check_open("warmup")
        self._pipeline.foresee(self._stager.warm_up(state))

    # ----------------------------------------------------------------- restore

    @overload
    def restore(
        self,
        state: Mapping[str, object],
        *,
        step: int | None = None,
        required: Literal[True] = True,
        partial: bool = False,
        strict: bool = True,
        fallback: bool = True,
    ) -> RestoreReport: ...

    @overload
    def restore(
        self,
        state: Mapping[str, object],
        *,
        step: int | None = None,
        required: bool,
        partial: bool = False,
        strict: bool = True,
        fallback: bool = True,
    ) -> RestoreReport | None: ...

    def restore(
        self,
        state: Mapping[str, object],
        *,
        step: int | None = None,
        required: bool = True,
        partial: bool = False,
        strict: bool = True,
        fallback: bool = True,
    ) -> RestoreReport | None:
        """Fill live state in place from one snapshot, the same on all ranks. All ranks.

        Every byte is verified on every rank before any live tensor is touched; if that fails, this
        raises and live state is unchanged everywhere.

        Args:
            state: As given to `save`, or a part of it with `partial`.
            step: None takes the newest: the highest run, then the latest save.
            required: Whether having no snapshot is an error; False returns None then, on all ranks.
            partial: The snapshot may hold names that `state` does not.
            strict: False reports missing and unexpected names instead of refusing them.
            fallback: Pass over damaged or unreadable snapshots to the next older one (with `step`: to
                an earlier save of that step). Never over one that does not fit.

        Raises:
            SnapshotNotFoundError: Nothing was ever committed, or not that step.
            StateMismatchError, TopologyMismatchError: It does not fit; all differences in one text.
            CorruptSnapshotError: Snapshots exist, but none can be read.
            CoordinationError: Another rank failed or is missing; the text names it.
        """
        self._check_open("restore")
        options = RestoreOptions(step, required, partial, strict, fallback)
        return self._restore(state, options)

    def _restore(
        self,
        state: Mapping[str, object],
        options: RestoreOptions,
        problem: BaseException | None = None,
    ) -> RestoreReport | None:
        self._round += 1
        self._guard.wait()
        self._wait_own_seals()
        self._restorer = Restorer(
            self._session,
            state,
            options,
            name=f"restore/{self._round}",
            where=self._where(),
            count=self._count,
            problem=problem,
        )
        try:
            return self._restorer.run()
        finally:
            self._count = self._restorer.count

    def _wait_own_seals(self) -> None:
        deadline = time.monotonic() + self._options.timeout_s
        for save in self._pipeline.pending:
            # What was streamed is restorable once it is committed, the rest as soon as it is sealed.
            ready = save.sealed if save.streamed is None else save.settled
            ready.wait(max(0.0, deadline - time.monotonic()))

    def _where(self) -> str:
        return (
            self._options.root
            or self._options.disk
            or f"memory ({self._options.name or 'private'})"
        )

    @contextmanager
    def swapped(
        self, state: Mapping[str, object], *, step: int | None = None, strict: bool = True
    ) -> Iterator[RestoreReport]:
        """Make live state another step inside the `with`, then exactly what it was. All ranks.

        The own copy is in no listing and survives nothing; leaving is local and happens on exceptions
        too. `save`, `restore` and `delete` inside raise.
        """
        self._check_open("swapped")
        copy, problem = None, None
        try:
            copy = PrivateCopy(self._session, state)
        except BaseException as error:  # noqa: BLE001 - all ranks must hear of it first
            problem = error
        before = self._restorer
        try:
            options = RestoreOptions(step, partial=True, strict=strict)
            report = self._restore(state, options, problem)
            assert report is not None
            self._state = "swapped"
            yield report
        finally:
            if self._state == "swapped":
                self._state = "open"
            if copy is not None:
                try:
                    restorer = self._restorer
                    if (
                        restorer is not None
                        and restorer is not before
                        and restorer.has_touched_state
                    ):
                        copy.put_back()
                finally:
                    copy.close()

    # -------------------------------------------------------------------- rest

    def snapshots(self) -> list[SnapshotInfo]:
        """Restorable snapshots as this rank knows them, oldest first. Local."""
        self._check_usable("snapshots")
        return list_session(self._session)

    def stats(self) -> StoreStats:
        """What this rank has done so far, in plain numbers. Local; see StoreStats."""
        return stats_of(self._session, self._pipeline.pending)

    def delete(self, step: int) -> None:
        """Delete every snapshot at `step`, from all tiers. All ranks.

        Raises:
            SnapshotNotFoundError: No tier has that step.
        """
        self._check_open("delete")
        self._round += 1
        number = check_step(step)
        self._guard.wait()
        self._leaver.wait_outcomes(self._options.timeout_s)
        delete_step(self._session, number, name=f"delete/{self._round}")

    def pin(self, step: int) -> None:
        """Exempt every snapshot at `step` from `keep`, until `unpin`; it survives restarts. All ranks.

        The pin is a small file beside the snapshot, and goes where its folder goes. `delete` is explicit
        and deletes pinned ones as well.

        Raises:
            SnapshotNotFoundError: No tier has that step.
            CoordinationError: The pin could not be written somewhere; the text says where.
        """
        self._pin("pin", step, on=True)

    def unpin(self, step: int) -> None:
        """Leave every snapshot at `step` to `keep` again, from the next commit on. All ranks.

        Raises:
            SnapshotNotFoundError: No tier has that step.
            CoordinationError: A pin could not be removed somewhere; the text says where.
        """
        self._pin("unpin", step, on=False)

    def _pin(self, call: str, step: int, *, on: bool) -> None:
        self._check_open(call)
        self._round += 1
        number = check_step(step)
        self._guard.wait()
        self._leaver.wait_outcomes(self._options.timeout_s)
        pin_step(self._session, number, name=f"{call}/{self._round}", on=on)

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until every save so far is committed or has failed. Local.

        Raises:
            SaveFailedError: One failed and was not raised by a later save.
            CoordinationTimeoutError: Not done within `timeout_s`.
            ValueError: `timeout_s` is neither None nor a time in seconds.
        """
        self._check_usable("drain")
        timeout_s = check_patience(timeout_s)
        if not self._leaver.wait_outcomes(timeout_s):
            steps = ", ".join(str(save.step) for save in self._pipeline.pending)
            when = "in the grace period" if self._session.is_ending else f"after {timeout_s} s"
            raise CoordinationTimeoutError(
                f"steps {steps} are not committed {when}; they still may be",
                phase="drain",
            )
        error = self._failures.rest()
        if error is not None:
            raise error

    def flush(self, timeout_s: float = 20.0) -> SnapshotInfo | None:
        """Have the newest snapshot that all ranks have safe in the outermost tier soon, before older ones.

        All ranks, at about the same time; no collective. It never raises for what does not work in time: what
        it leaves undone goes on behind, and is told by the save itself.

        Args:
            timeout_s: How long it may take, in seconds.

        Returns:
            The snapshot that is safe now, as this rank knows it; None if there was none, or no time.

        Raises:
            ValueError: `timeout_s` is no time in seconds.
        """
        self._check_usable("flush")
        seconds = check_timeout(timeout_s, what="timeout_s")
        self._num_flushes += 1
        return self._flusher.run(f"flush/{self._num_flushes}", self._session.in_time(seconds))

    def guard_preemption(
        self,
        *,
        grace_s: float = 25.0,
        signals: Sequence[signal.Signals] = (signal.SIGTERM,),
    ) -> PreemptionGuard:
        """Be ready for the scheduler's signal: `with store.guard_preemption() as guard`. All ranks.

        Inside the `with` a signal to any rank makes all ranks flush the newest snapshot that all have, in the
        background and whatever their main threads are doing, and `guard.should_stop(step)` true on all of
        them at the same step. What handled the signal before is called as well, if it is a Python
        function, and is back after the `with`, or after `close` once a signal has come. Workers
        that multiprocessing forks meanwhile hold such a signal back. docs/preemption.md says what to set where.

        Args:
            grace_s: Seconds from the signal to the kill: 25 for torchrun, which waits 30.
            signals: What the scheduler sends.

        Raises:
            ValueError: An argument is off.
        """
        self._check_open("guard_preemption")
        guard = PreemptionGuard(
            self._session,
            self._flusher,
            name=f"preempt/{len(self._guards)}",
            grace_s=check_timeout(grace_s, what="grace_s"),
            signals=check_signals(signals),
            earlier=self._guards[-1] if self._guards else None,
        )
        self._guards.append(guard)
        return guard

    def close(self, *, keep_memory: bool = False) -> None:
        """Drain, then free this rank's memory if all ranks closed cleanly. Closing twice is fine.

        After a signal to a `guard_preemption`: flush the newest, drain until the grace period is nearly over,
        and keep memory.

        Raises:
            SaveFailedError: A save failed and was not raised yet; the store is closed all the same.
        """
        if self._state == "closed":
            return
        self._check_open("close")
        self._state = "closed"
        if self._guards:
            self._guards[-1].listen_again()
        try:
            self._guard.close()
            self._stager.close()
            error = self._leaver.close(keep_memory=keep_memory)
        except BaseException:  # an interrupt: own seals and spills go on behind
            self._leaver.abandon()
            if not self._session.is_ending:
                self._release_signals()
            raise
        self._release_signals()
        if error is not None:
            raise error

    def _gone(self) -> None:
        registry.unregister(self)
        self._release_signals()

    def _release_signals(self) -> None:
        for guard in self._guards:
            guard.release()

    def _abandon(self, why: str) -> None:
        if self._state != "closed":
            self._state, self._why_closed = "closed", why
            self._guard.close()
            self._stager.close()
            self._leaver.abandon()

    def take_leave(self, why: str) -> None:
        """Stop taking calls, finish own spills, wait for no rank, keep memory (for the registry)."""
        self._abandon(why)
        self._leaver.join()
        self._release_signals()

    def leave_at_exit(self) -> None:
        """The interpreter ends: finish what is this rank's own (for the registry)."""
        if self._state != "closed":
            self._leaver.finish_at_exit()
        self.take_leave("the interpreter ends")

    def __enter__(self) -> SnapshotStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        elif os.getpid() == self._pid:  # not a forked child, which leaves the `with` of its parent
            self._abandon("its `with` was left by an exception")

    def _check_usable(self, call: str) -> None:
        if os.getpid() != self._pid:
            raise ShardStoreError(
                f"{call} was called in a forked child: the store belongs to process {self._pid}"
            )
        if self._state == "closed":
            raise ShardStoreError(
                f"{call} was called on a store after {self._why_closed}: open a new one"
            )

    def _check_open(self, call: str) -> None:
        self._check_usable(call)
        if self._state == "swapped":
            raise ShardStoreError(
                f"{call} was called inside swapped(): live state is another step there. Leave the `with` "
                "first."
            )

    def __repr__(self) -> str:
        session = self._session
        memory = session.memory
        newest = max(memory.ids(), key=lambda i: i.order, default=None)
        return (
            f"SnapshotStore({self._where()!r}, rank {session.rank} of {session.world_size}, "
            f"{self._state}, memory budget {memory.budget_bytes / 2**30:.2f} GiB, "
            f"newest in memory {newest.step if newest else None}, "
            f"{len(self._pipeline.pending)} saves pending)"
        )
