"""Say what a folder looks like that is no root, so that a wrong path is seen at once."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from typing import Final

from shardstore.format.records import SnapshotId

_RUN: Final = re.compile(r"run-[0-9a-f]{8}\.json")
_LOCK: Final = re.compile(r"owner-[0-9a-f]{8}-\d{5,}\.lock")
_USER: Final = re.compile(r"shardstore-\d+")
_MAX_SUGGESTED: Final = 5


def is_root(names: Collection[str]) -> bool:
    """Whether a folder with these names is a root: runs or attempts left their traces."""
    is_ours = any(_RUN.fullmatch(name) or SnapshotId.parse(name) is not None for name in names)
    return is_ours and not _is_memory(names)


def is_near_tier(path: str, names: Collection[str]) -> bool:
    """Whether a folder is the part of one store on a disk before the root, which has no registers."""
    is_of_user = _USER.fullmatch(os.path.basename(os.path.dirname(path))) is not None
    return is_of_user and not any(_RUN.fullmatch(name) for name in names)


def _is_memory(names: Collection[str]) -> bool:
    return any(_LOCK.fullmatch(name) or name.startswith("slot-") for name in names)


def looks_like(path: str, names: Collection[str]) -> str | None:
    """What a folder seems to be, in words; None if it says nothing."""
    if _USER.fullmatch(os.path.basename(path)):
        return "the folder of all stores of one user, in memory or on a disk"
    if _is_memory(names):
        return 'the memory of a store (see "shardstore memory list")'
    if is_near_tier(path, names):
        return "the disk= of a store: give the root to a command, and this one's --disk beside it"
    if ".metadata" in names and any(name.endswith(".distcp") for name in names):
        return "a checkpoint of torch.distributed.checkpoint (DCP)"
    if any(name.endswith(".distcp") for name in names):
        return "a checkpoint of torch.distributed.checkpoint (DCP) without its .metadata"
    if "model.safetensors.index.json" in names or (
        "config.json" in names and any(name.endswith(".safetensors") for name in names)
    ):
        return "a Hugging Face model folder"
    if ".snapshot_metadata" in names:
        return "a torchsnapshot snapshot"
    if "latest_checkpointed_iteration.txt" in names:
        return "a Megatron-LM checkpoint folder"
    if "latest" in names and any(name.startswith("global_step") for name in names):
        return "a DeepSpeed checkpoint folder"
    if any(re.fullmatch(r"rank-\d{5,}\.safetensors", name) for name in names):
        return "a snapshot folder under another name: a root needs its folders named as they were"
    if any(name.endswith((".pt", ".pth", ".ckpt", ".bin")) for name in names):
        return "a folder of pickled checkpoints"
    if any(name.endswith(".safetensors") for name in names):
        return "a folder of safetensors files"
    return None


def roots_below(path: str, names: Collection[str]) -> list[str]:
    """Roots among the folders in a folder: what may have been meant."""
    found = []
    for name in sorted(names):
        inner = os.path.join(path, name)
        try:
            if os.path.isdir(inner) and is_root(os.listdir(inner)):
                found.append(inner)
        except OSError:
            continue
        if len(found) == _MAX_SUGGESTED:
            break
    return found
