"""The first rank of a root that rank 0's host does not see: it does there what rank 0 asks for."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Final

import msgspec

from shardstore.cluster.coordination import Coordinator
from shardstore.engine.catalog import Catalog
from shardstore.engine.peers import (
    Answer,
    Problem,
    Question,
    View,
    answer_key,
    question_key,
)
from shardstore.engine.workers import Worker
from shardstore.errors import CoordinationError, ShardStoreError
from shardstore.format.manifest import decode_manifest, encode_manifest
from shardstore.format.records import Manifest, SnapshotId
from shardstore.tiers.fileops import FileOps

_EVERY_S: Final = 0.02
_EVERY_S_PER_ROOT: Final = 0.002
"""Rank 0 answers all who look for questions."""


class Steward:
    """Answers rank 0's questions about this host's root, one after the other, on a thread of its own."""

    def __init__(
        self,
        coordinator: Coordinator,
        catalog: Catalog,
        *,
        name: str,
        num_roots: int,
        ops: FileOps,
    ) -> None:
        """Listen from now on.

        Args:
            coordinator: Of this rank.
            catalog: Of this host's root.
            name: As rank 0's `Peers` have it.
            num_roots: How many roots there are.
            ops: For the named points of protocols.
        """
        self._coordinator = coordinator
        self._catalog = catalog
        self._name = name
        self._every_s = _EVERY_S + _EVERY_S_PER_ROOT * num_roots
        self._ops = ops
        self._worker: Worker[tuple[int, Question]] = Worker("root", self._answer)
        self._heard: Future[Any] | None = None
        self._listen(0)

    def stop(self) -> None:
        """Answer nothing more but what is queued."""
        if self._heard is not None:
            self._heard.cancel()
        self._worker.stop()

    def _listen(self, number: int) -> None:
        key = question_key(self._name, number)
        self._heard = heard = self._coordinator.watch([key], every_s=self._every_s)

        def hear(found: Future[Any]) -> None:
            """On the thread of the key-value store's client."""
            if found.cancelled() or found.exception() is not None:
                self._worker.stop()
                return
            question = msgspec.msgpack.decode(found.result()[0], type=Question)
            if self._worker.submit((number, question)):
                self._listen(number + 1)

        heard.add_done_callback(hear)

    def _answer(self, numbered: tuple[int, Question]) -> None:
        number, question = numbered
        answer = Answer()
        if self._coordinator.rank in question.whom:
            self._ops.point("answer for this root")
            answer = answer_for(self._catalog, question)
            self._ops.point("answered for this root")
        key = answer_key(self._name, number, self._coordinator.rank)
        try:
            self._coordinator.post(key, msgspec.msgpack.encode(answer))
        except CoordinationError:
            pass  # the store is gone, and rank 0 with it


def answer_for(catalog: Catalog, question: Question) -> Answer:
    """Do on one root what rank 0 asks for; that it cannot be done is an answer as well."""
    try:
        return Answer(msgspec.msgpack.encode(_do(catalog, question)))
    except Exception as error:  # noqa: BLE001 - told to rank 0, whose question it is
        return Answer(problem=_problem_of(error))


def _do(catalog: Catalog, question: Question) -> object:
    """Returns what `Answer.value` is to hold."""
    tier, snapshot_id = catalog.tier, question.id
    match question.operation:
        case "overview":
            return _views_of_all(catalog)
        case "runs":
            return tier.run_numbers()
        case "deleted":
            return tier.list_deleted()
        case "names":
            return tier.list_names(question.folder)
        case "small":
            return tier.read_small(question.name)
        case "run":
            return tier.read_run(question.rank)
        case "remove deleted":
            tier.remove_deleted(question.name)
        case "remove temp":
            tier.remove_temp(question.folder, question.name)
        case _:
            assert snapshot_id is not None
            return _do_to(catalog, snapshot_id, question)
    return None


def _do_to(catalog: Catalog, snapshot_id: SnapshotId, question: Question) -> object:
    """The same, of one attempt."""
    tier = catalog.tier
    match question.operation:
        case "look":
            return view_of(catalog, snapshot_id)
        case "manifest":
            return tier.read_manifest(snapshot_id)
        case "read":
            with tier.open_shard(snapshot_id, question.rank) as reader:
                stop = min(question.stop, reader.nbytes)
                return reader.nbytes, bytes(reader.read(question.start, stop))
        case "publish":
            manifest = decode_manifest(question.data, source="rank 0", expect=snapshot_id)
            return publish_part(catalog, manifest)
        case "sync":
            tier.make_durable(snapshot_id, tier.list_ranks(snapshot_id))
        case "abort":
            close_register(catalog, snapshot_id, question.data)
        case "unlist":
            tier.replace_manifest(snapshot_id, question.data)
        case "remove" if catalog.settled_state(snapshot_id) == "aborted":
            tier.remove(snapshot_id)
        case "mark" if question.mark is not None:
            tier.put_mark(snapshot_id, question.mark)
        case "unmark" if question.mark is not None:
            tier.drop_mark(snapshot_id, question.mark)
    return None


def _views_of_all(catalog: Catalog) -> list[View]:
    """What a root has of every attempt, in one look."""
    found = catalog.overview()
    return [View(i, found.state(i), tuple(found.names[i]), has_folder=True) for i in found.ids]


def view_of(catalog: Catalog, snapshot_id: SnapshotId) -> View:
    """What a root has of one attempt.

    Raises:
        TierError: The folder cannot be listed.
    """
    tier, state = catalog.tier, catalog.state(snapshot_id)
    names = tuple(name for name, _ in tier.list_names(snapshot_id.name))
    has_folder = bool(names) or state != "torn" or snapshot_id in tier.list_ids()
    return View(snapshot_id, state, names, has_folder)


def publish_part(catalog: Catalog, manifest: Manifest) -> bytes | None:
    """Commit on one of several roots: the register says which files are in its folder.

    Returns:
        What the register holds; None if the folder, or every file in it, is gone.
    """
    ranks = [r for r in catalog.tier.list_ranks(manifest.id) if r < manifest.world_size]
    if not ranks:
        return None
    here = msgspec.UNSET if len(ranks) == manifest.world_size else tuple(ranks)
    data = encode_manifest(msgspec.structs.replace(manifest, here=here))
    return catalog.tier.create_manifest(manifest.id, data, make_folder=False, ranks=ranks)


def close_register(catalog: Catalog, snapshot_id: SnapshotId, data: bytes) -> None:
    """Make the register of one of several roots say `aborted`, as all of them together do, whatever it said."""
    catalog.tier.create_manifest(snapshot_id, data, make_folder=True)
    if catalog.settled_state(snapshot_id) != "aborted":
        catalog.tier.replace_manifest(snapshot_id, data)


def _problem_of(error: Exception) -> Problem:
    is_absent = isinstance(error.__cause__, FileNotFoundError)
    if isinstance(error, ShardStoreError):
        key, operation = getattr(error, "key", ""), getattr(error, "operation", "")
        return Problem(str(error), key, operation, is_absent)
    return Problem(f"{type(error).__name__}: {error}", is_absent=is_absent)
