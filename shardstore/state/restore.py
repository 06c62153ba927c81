"""Stored state against live state: one comparison, then a plan that is prepared and applied.

`match_state` compares everything and touches nothing. `RestorePlan.prepare` allocates and decodes
all that is needed; `RestorePlan.apply` copies memory, assigns, and ends with the caller's own
`load_state_dict`, random states last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial as partial_call

import torch
from torch import nn

from shardstore.format.records import ShardHeader
from shardstore.state.collect import Collector
from shardstore.state.kinds import check_state, items_of
from shardstore.state.matcher import Actions, Matcher, Slot
from shardstore.state.matching import match_value
from shardstore.state.nodes import Node
from shardstore.state.skeleton import parse_leaves
from shardstore.state.staging import fill, is_expanded
from shardstore.state.survey import survey_state


@dataclass(slots=True)
class RestorePlan:
    """How a live state becomes the stored one. `prepare`, then `apply`, each once."""

    needed: tuple[int, ...]
    """Rows whose bytes `prepare` needs, in order; never aliases."""
    missing: tuple[str, ...]
    """Live names that the snapshot lacks: left untouched (strict=False only)."""
    unexpected: tuple[str, ...]
    """Stored names that the live state lacks (strict=False or partial=True only)."""
    uncovered: tuple[str, ...]
    """Non-persistent buffers of live modules: no snapshot holds them."""
    num_tensors: int
    """Stored rows that are restored, aliases included."""
    _prepare: Callable[[Actions], None] = field(repr=False)
    _actions: Actions | None = field(default=None, repr=False)

    def prepare(self, views: Mapping[int, torch.Tensor]) -> None:
        """Allocate and decode everything that `apply` needs; touches nothing live.

        Args:
            views: For each row of `needed`, its verified bytes as a CPU tensor of the piece's dtype
                and shape. Must stay unchanged until `apply` returned; nothing live aliases them then.
                Only those that must be decoded or built from are looked at before `apply`.

        Raises:
            StateMismatchError: an expanded live tensor cannot hold what was stored.
        """
        actions = Actions(views)
        with torch.no_grad():
            self._prepare(actions)
        self._actions = actions

    def apply(self) -> None:
        """Fill, assign, load. Fails only where memory or the caller's own load_state_dict does."""
        actions, self._actions = self._actions, None
        assert actions is not None, "prepare comes first, and apply once"
        fill((live, actions.views[row]) for live, row in actions.fills)
        _act(actions)

    def targets(self) -> dict[int, list[torch.Tensor]]:
        """Live local tensors by the row whose bytes fill them, once prepared; for `apply_streamed`.

        A tensor that is expanded is not among them.
        """
        assert self._actions is not None, "prepare comes first"
        found: dict[int, list[torch.Tensor]] = {}
        for live, row in self._actions.fills:
            if not is_expanded(live):
                found.setdefault(row, []).append(live)
        return found

    def apply_streamed(self, stream: Callable[[], None]) -> None:
        """As `apply`, with `stream` filling all `targets` from storage."""
        actions, self._actions = self._actions, None
        assert actions is not None, "prepare comes first, and apply once"
        stream()
        fill((live, actions.views[row]) for live, row in actions.fills if is_expanded(live))
        _act(actions)


def _act(actions: Actions) -> None:
    for act in (*actions.assigns, *actions.loads, *actions.random):
        act()


def match_state(
    state: Mapping[str, object],
    header: ShardHeader,
    *,
    rank: int,
    world_size: int,
    strict: bool = True,
    partial: bool = False,
) -> RestorePlan:
    """Compare a stored shard with the live state. Local to this rank; copies and changes nothing.

    Runs the live objects' `state_dict()`, and reshards FSDP2 modules that a forward left gathered.

    Args:
        state: As given to the save, with live objects to fill.
        header: Of this rank's shard; may have been built in memory.
        rank: Global rank of this process.
        world_size: Ranks of this job.
        strict: False lets names be missing and unexpected; they are reported.
        partial: The snapshot may hold names that the state does not.

    Raises:
        TopologyMismatchError: other ranks, meshes or coordinates; lists all other differences too.
        StateMismatchError: lists all differences.
        UnsupportedStateError: the state is not a mapping, or an optimizer's state has no names.
        FormatError: the leaves of the header are malformed.
    """
    entries = check_state(state)
    nodes = parse_leaves(header.leaves, header.table)
    matcher = Matcher(header, Collector(rank), survey_state(entries), strict)
    _note_live_meshes(matcher, entries)
    differences = matcher.differences
    differences.check_ranks(header, rank, world_size)
    differences.missing.extend(name for name in entries if name not in nodes)
    left_out = [name for name in nodes if name not in entries]
    if not partial:
        differences.unexpected.extend(left_out)
    with torch.no_grad():
        slots = [
            (name, _match_entry(matcher, state, name, entries[name], nodes[name]))
            for name in nodes
            if name in entries
        ]
        for match in matcher.deferred:
            match()
        matcher.deferred.clear()  # they refer to the matcher: no cycle may keep live tensors alive
    differences.raise_if_any(names_may_differ=not strict)

    def prepare(actions: Actions) -> None:
        for name, slot in slots:
            value = slot.build(actions)
            if value is not entries[name] and isinstance(state, MutableMapping):
                actions.assigns.append(partial_call(state.__setitem__, name, value))

    unexpected = [*differences.unexpected, *(left_out if partial else [])]
    return RestorePlan(
        needed=tuple(sorted({matcher.bytes_of(row) for row in matcher.used})),
        missing=tuple(differences.missing),
        unexpected=tuple(unexpected),
        uncovered=tuple(matcher.uncovered),
        num_tensors=len(matcher.used),
        _prepare=prepare,
    )


def _match_entry(
    matcher: Matcher, state: Mapping[str, object], name: str, live: object, node: Node
) -> Slot:
    slot = match_value(matcher, (name,), live, node)
    if slot.rebinds and not isinstance(state, MutableMapping):
        matcher.differences.mismatched.append(
            f"{name}: its value is replaced, and the state is read-only: give a dict, or keep the "
            "value in a dict of yours"
        )
    return slot


def _note_live_meshes(matcher: Matcher, entries: dict[str, object]) -> None:
    """Find the meshes of the live state, for DTensors that must be built."""
    for _, contents in matcher.survey.modules:
        for tensor in contents.tensors.values():
            matcher.note_meshes(tensor)
    seen: set[int] = set()
    stack: list[object] = list(entries.values())
    while stack:
        value = stack.pop()
        if isinstance(value, torch.optim.Optimizer):
            for group in value.param_groups:
                for parameter in group["params"]:
                    matcher.note_meshes(parameter)
        elif isinstance(value, list | tuple | dict) and id(value) not in seen:
            seen.add(id(value))
            stack.extend(child for _, child in items_of(value))
        elif not isinstance(value, nn.Module):
            matcher.note_meshes(value)
