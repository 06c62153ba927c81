"""Which snapshots have files in the memory, or on a disk, of this host, of any run and user, alive or dead."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Final

from shardstore.format.records import SnapshotId
from shardstore.tiers.fileops import FileOps

_USER: Final = "shardstore-"


@dataclass(slots=True)
class HeldMemory:
    """What was found, and where nobody lets us look."""

    where: dict[SnapshotId, str] = field(default_factory=dict)
    """Snapshots to a folder that holds a file of them."""
    unseen: list[str] = field(default_factory=list)
    """Folders that could not be read."""

    def look_into(self, folder: str, ops: FileOps) -> None:
        """Add what the memory folder of one store holds. That it is gone is fine."""
        for name in self._names(folder, ops):
            snapshot_id = SnapshotId.parse(name)
            if snapshot_id is not None and self._names(inner := os.path.join(folder, name), ops):
                self.where.setdefault(snapshot_id, inner)

    def look_into_all(self, memory_dir: str, ops: FileOps) -> None:
        """Add what all stores of all users hold under one `memory_dir`."""
        for user in self._names(memory_dir, ops):
            if user.startswith(_USER):
                folder = os.path.join(memory_dir, user)
                for name in self._names(folder, ops):
                    self.look_into(os.path.join(folder, name), ops)

    def _names(self, folder: str, ops: FileOps) -> list[str]:
        try:
            return ops.list_folder(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError:
            self.unseen.append(folder)
            return []
