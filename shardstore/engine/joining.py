"""Whether all ranks see one root; and where they do not, the roots of all hosts as one (P4, private roots)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from shardstore.engine.attempts import list_ranks
from shardstore.engine.catalog import Catalog
from shardstore.engine.jointroot import JointTier
from shardstore.engine.liveness import RootClass, RunRecord, folder_identity
from shardstore.engine.peers import Peers
from shardstore.engine.session import Session
from shardstore.engine.steward import Steward
from shardstore.engine.waiting import VISIBLE_WAIT_S, wait_until
from shardstore.errors import ShardStoreError, TierError
from shardstore.format.records import SnapshotId

_MAX_ROUNDS: Final = 50
"""Of claims: each time another job was faster, or two hosts turned out to see one root."""


class RootCard(msgspec.Struct, frozen=True):
    """Which root a rank sees."""

    host: str = ""
    boot_id: str = ""
    folder: tuple[int, int] = (-1, -1)
    """Device and inode; (-1, -1): it is not there."""
    has_looked: bool = False
    """This rank has looked whether the root belongs to this host alone."""
    is_private: bool = False
    """It has, and it does."""


def card_of(catalog: Catalog, *, host: str, boot_id: str, look: bool) -> RootCard:
    """Which root this rank sees; with `look` also whether an earlier run kept it for its host alone."""
    folder = folder_identity(catalog.tier.location)
    return RootCard(host, boot_id, folder, look, look and was_private(catalog))


def was_private(catalog: Catalog) -> bool:
    """Whether the newest run that claimed this root found that hosts share none."""
    try:
        newest = max(catalog.tier.run_numbers(), default=None)
        record = None if newest is None else catalog.run_record(newest)
    except ShardStoreError:
        return True  # it cannot be told: whoever goes on to read it hears why
    return record is not None and bool(record.roots)


def group(cards: Sequence[RootCard]) -> tuple[RootClass, ...]:
    """Ranks by the folder that they see, those of the lowest rank first."""
    ranks: dict[object, list[int]] = {}
    for rank, card in enumerate(cards):
        ranks.setdefault((card.boot_id, card.folder), []).append(rank)
    return tuple(RootClass(cards[found[0]].host, tuple(found)) for found in ranks.values())


def class_of(classes: Sequence[RootClass], rank: int) -> RootClass:
    """The class of a rank."""
    return next(c for c in classes if rank in c.ranks)


# ------------------------------------------------------------------------- session


def start_steward(session: Session, classes: Sequence[RootClass], name: str) -> Steward | None:
    """Answer for this host's root from now on, where this rank has to."""
    rank, catalog = session.rank, session.catalog
    if rank == 0 or catalog is None or class_of(classes, rank).first != rank:
        return None
    return Steward(session.coordinator, catalog, name=name, num_roots=len(classes), ops=session.ops)


def joint_catalog(session: Session, classes: Sequence[RootClass], name: str) -> Catalog:
    """On rank 0: all roots as one."""
    assert session.own_catalog is not None
    peers = Peers(
        session.coordinator,
        classes,
        name=name,
        patience=lambda: session.in_time(session.timeout_s),
        ops=session.ops,
    )
    return Catalog(JointTier(session.own_catalog.tier, peers), spans_hosts=True)


def join(session: Session, classes: tuple[RootClass, ...], name: str) -> None:
    """From now on rank 0 works on all roots, and the first rank of every other one answers for it."""
    part(session)
    session.classes = classes
    session.steward = start_steward(session, classes, name)
    if session.rank == 0:
        session.catalog = joint_catalog(session, classes, name)


def part(session: Session) -> None:
    """Every rank by itself again, on the root that it sees."""
    if session.steward is not None:
        session.steward.stop()
        session.steward = None
    session.classes = ()
    session.catalog = session.own_catalog


# ---------------------------------------------------------------------- first save


class _Folder(msgspec.Struct, frozen=True):
    card: RootCard
    highest_run: int = 0
    problem: str = ""


class _Claim(msgspec.Struct, frozen=True):
    has_won: bool = True
    same_as: int | None = None
    """Another first rank, whose record of this run is there already: both see one root."""
    problem: str = ""


class _Roots(msgspec.Struct, frozen=True):
    classes: tuple[RootClass, ...]
    run: int
    is_claimed: bool = False


def agree_on_roots(
    session: Session,
    name: str,
    *,
    highest_run: int,
    record: Callable[[tuple[RootClass, ...], int], RunRecord],
) -> int:
    """Agree on who shares a root with whom, and claim the run's number on every root. Every rank calls it.

    Args:
        session: Of this rank.
        name: Used once; equal on all ranks.
        highest_run: That this rank has seen near it.
        record: Makes the record that says who claims, given all classes and the rank whose root it is for.

    Returns:
        The run's number.

    Raises:
        CoordinationError: A root cannot be written to, or a rank is missing; on all ranks.
    """
    coordinator, catalog = session.coordinator, session.own_catalog
    assert catalog is not None
    decided = coordinator.gather_decide(
        f"{name}/folders",
        msgspec.json.encode(_look(session, catalog, highest_run)),
        _decide_folders,
        phase="finding out which hosts share a root",
    )
    roots = msgspec.json.decode(decided, type=_Roots)
    for number in range(_MAX_ROUNDS):
        claim = _Claim()
        if class_of(roots.classes, session.rank).first == session.rank:
            session.ops.point("claim root")
            claim = _claim(session, catalog, roots, record)
        decided = coordinator.gather_decide(
            f"{name}/claims/{number}",
            msgspec.json.encode(claim),
            lambda values, roots=roots: _decide_claims(roots, values),  # type: ignore[misc]
            phase="claiming the run number on the root of every host",
        )
        roots = msgspec.json.decode(decided, type=_Roots)
        if roots.is_claimed:
            break
    else:
        raise TierError(
            f"root: no run number was free on all hosts, {_MAX_ROUNDS} times over: other jobs claim them",
            tier="root", operation="share",
        )  # fmt: skip
    # Until all agree, what was known at the start holds: no rank may work on its own root alone.
    classes = roots.classes if len(roots.classes) > 1 else ()
    if classes != session.classes:
        part(session)
        if classes:
            join(session, classes, f"{name}/roots")
    if classes:
        _tell(session)
    return roots.run


def _look(session: Session, catalog: Catalog, highest_run: int) -> _Folder:
    card = RootCard()
    try:
        catalog.tier.make_location()
        card = card_of(catalog, host=session.host, boot_id=session.boot_id, look=False)
        return _Folder(card, max(highest_run, catalog.highest_run()))
    except (ShardStoreError, OSError) as error:
        return _Folder(card, problem=_told(session, error))


def _told(session: Session, error: Exception) -> str:
    return f"rank {session.rank} on host {session.host}: {error}"


def _decide_folders(values: list[bytes]) -> bytes:
    found = [msgspec.json.decode(value, type=_Folder) for value in values]
    _raise_any([folder.problem for folder in found])
    run = 1 + max(folder.highest_run for folder in found)
    return msgspec.json.encode(_Roots(group([folder.card for folder in found]), run))


def _raise_any(problems: list[str]) -> None:
    told = [problem for problem in problems if problem]
    if told:
        raise TierError("; ".join(told[:4]), tier="root", operation="claim")


def _claim(
    session: Session,
    catalog: Catalog,
    roots: _Roots,
    record: Callable[[tuple[RootClass, ...], int], RunRecord],
) -> _Claim:
    classes = roots.classes if len(roots.classes) > 1 else ()
    try:
        data = msgspec.json.encode(record(classes, session.rank))
        if catalog.tier.claim_run(roots.run, data):
            return _Claim()
        # Exclusive create asks the file system itself; its other answers may come from a cache.
        wait_until(
            lambda: catalog.run_record(roots.run) is not None, session.in_time(VISIBLE_WAIT_S)
        )
        found = catalog.run_record(roots.run)
    except (ShardStoreError, OSError) as error:
        return _Claim(has_won=False, problem=_told(session, error))
    if found is None or found.nonce != session.nonce:
        return _Claim(has_won=False)
    if found.first_rank == session.rank:
        return _Claim()  # the answer to our own claim was lost
    return _Claim(has_won=False, same_as=found.first_rank)


def _decide_claims(roots: _Roots, values: list[bytes]) -> bytes:
    claims = [msgspec.json.decode(value, type=_Claim) for value in values]
    _raise_any([claim.problem for claim in claims])
    if all(claim.has_won for claim in claims):
        return msgspec.json.encode(msgspec.structs.replace(roots, is_claimed=True))
    leader = {c.first: c.first for c in roots.classes}
    for rank, claim in enumerate(claims):
        if claim.same_as is not None and claim.same_as in leader:
            one, other = sorted((leader[rank], leader[claim.same_as]))
            leader = {first: one if now == other else now for first, now in leader.items()}
    merged: dict[int, list[int]] = {}
    for c in roots.classes:
        merged.setdefault(leader[c.first], []).extend(c.ranks)
    hosts = {c.first: c.host for c in roots.classes}
    classes = tuple(RootClass(hosts[first], tuple(sorted(r))) for first, r in merged.items())
    return msgspec.json.encode(_Roots(classes, roots.run + 1))


def _tell(session: Session) -> None:
    if session.rank != 0:
        return
    assert session.catalog is not None
    if session.wants_once:
        session.log(
            'replicas="once" needs a root that all hosts share: every rank stores its whole file'
        )
    who = "; ".join(f"{list_ranks(c.ranks)} on host {c.host}" for c in session.classes)
    text = (
        "hosts do not share %s: each keeps the files of its own ranks there (%s). A restart needs every "
        "rank on the host that it was on, with its root."
    )
    if session.shared is None:
        text += " shared=False says that this is meant, shared=True refuses it"
        session.warn_once("private roots", text, session.catalog.tier.location, who)
    else:
        session.log(text, session.catalog.tier.location, who)


def complete_commits(catalog: Catalog, *, warn: Callable[..., None]) -> list[SnapshotId]:
    """On rank 0: what is committed on some roots, and whole on all together, is committed on the others, too.

    Args:
        catalog: Of rank 0.
        warn: Told, as a logger is, what cannot be committed.
    """
    tier = catalog.tier
    if not isinstance(tier, JointTier):
        return []
    # All are found before one is completed: what one look at the roots has told ends with the first write.
    half, done = [], []
    for snapshot_id in catalog.ids():
        try:
            if tier.is_half_committed(snapshot_id):
                half.append(snapshot_id)
        except ShardStoreError as error:
            warn("whether %s is committed on all hosts cannot be seen: %s", snapshot_id, error)
    for snapshot_id in half:
        try:
            manifest = catalog.entry(snapshot_id).manifest
            if manifest is None or manifest.state != "committed":
                continue  # it was deleted meanwhile
            tier.make_durable(snapshot_id, range(manifest.world_size))
            if catalog.publish(msgspec.structs.replace(manifest, here=msgspec.UNSET)):
                done.append(snapshot_id)
        except ShardStoreError as error:
            warn("%s is committed on some hosts, and cannot be on all: %s", snapshot_id, error)
    return done
