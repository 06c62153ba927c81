"""The arguments of a store, checked before anything is done."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardstore.engine.arguments import check_timeout, resolve_memory_dir
from shardstore.engine.listing import resolve_disk, resolve_name, resolve_root
from shardstore.engine.retention import Keep, check_keep
from shardstore.errors import shown
from shardstore.tiers.addresses import is_url
from shardstore.tiers.limits import parse_bytes


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """Checked arguments of `SnapshotStore`."""

    root: str | None
    disk: str | None
    """Absolute; this store uses a folder of its own in it."""
    memory_bytes: int | None
    """None: measured."""
    memory_dir: str
    name: str | None
    keep: Keep | None
    timeout_s: float
    on_error: str
    on_full: str
    shared: bool | None
    is_named: bool
    """`name` was given."""
    replicas: str = "all"
    storage_options: Mapping[str, object] | None = field(default=None, repr=False)
    """For the client of a remote root. Secrets: neither told to other ranks, nor stored, nor shown."""

    @property
    def shared_arguments(self) -> tuple[object, ...]:
        """What must be equal on all ranks."""
        root, name = self.root, self.name
        if self.shared is False and root is not None:  # of each host
            root, name = "given", name if self.is_named else "of the root"
        return (
            root, name, self._keep_as_given, self.memory_bytes == 0, self.on_error, self.on_full,
            self.disk is not None, self.replicas, self.shared,
        )  # fmt: skip

    @property
    def _keep_as_given(self) -> int | str | None:
        if self.keep is None or self.keep.every_steps is not None:
            return None if self.keep is None else repr(self.keep)
        return self.keep.last


def check_options(
    *,
    root: str | os.PathLike[str] | None,
    disk: str | os.PathLike[str] | None,
    memory: object,
    memory_dir: object,
    name: object,
    keep: object,
    on_full: object,
    on_error: object,
    timeout_s: object,
    shared: object,
    replicas: object = "all",
    storage_options: object = None,
) -> OpenOptions:
    """Validate the arguments of `SnapshotStore`, and fill in what depends on others.

    Raises:
        ValueError: One of them is off, or they do not go together.
    """
    if on_error not in ("raise", "warn"):
        raise ValueError(f'on_error must be "raise" or "warn", got {shown(on_error)}')
    if on_full not in ("wait", "skip", "direct"):
        raise ValueError(f'on_full must be "wait", "skip" or "direct", got {shown(on_full)}')
    if replicas not in ("all", "once"):
        raise ValueError(f'replicas must be "all" or "once", got {shown(replicas)}')
    if shared is not None and not isinstance(shared, bool):
        raise ValueError(f"shared must be True, False or None, got {shown(shared)}")
    seconds = check_timeout(timeout_s, what="timeout_s")
    resolved, local = resolve_root(root), resolve_disk(disk)
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise ValueError(
            f"storage_options must be a mapping or None, got {type(storage_options).__name__}"
        )
    if storage_options and (resolved is None or not is_url(resolved)):
        raise ValueError("storage_options= are for a root that is a URL, as s3://bucket/folder")
    is_auto = isinstance(memory, str) and memory == "auto"
    budget = None if is_auto else parse_bytes(memory, what="memory")
    if budget == 0 and resolved is None and local is None:
        raise ValueError(
            "memory=0 needs a root or a disk: there would be nowhere to keep a snapshot"
        )
    if replicas == "once" and resolved is None:
        raise ValueError(
            'replicas="once" needs a root, which all ranks read: memory and disks hold whole files'
        )
    return OpenOptions(
        root=resolved,
        disk=local,
        memory_bytes=budget,
        memory_dir=resolve_memory_dir(memory_dir),
        name=resolve_name(name, resolved or local),
        keep=check_keep(keep),
        timeout_s=seconds,
        on_error=on_error,
        on_full=on_full,
        shared=shared,
        is_named=name is not None,
        replicas=str(replicas),
        storage_options=storage_options,
    )
