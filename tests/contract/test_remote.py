"""The published suite over remote storage: memory://, a file system of which nothing is known, real servers."""

from __future__ import annotations

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from shardstore.testing import TierContract
from shardstore.tiers.base import RootTier
from shardstore.tiers.fileops import FileOps
from shardstore.tiers.remote.link import Link
from shardstore.tiers.remote.memory import MemoryStore
from shardstore.tiers.remote.requests import Patience, Requests
from shardstore.tiers.remote.tier import RemoteTier


class RemoteContract(TierContract):
    """Files are looked at through fsspec, past the tier."""

    uses_file_ops = False
    has_folders = False

    def remote(self, store: object, ops: FileOps) -> RootTier:
        requests = Requests(store, name="root", ops=ops, patience=Patience(5.0, 5.0))  # type: ignore[arg-type]
        return RemoteTier(requests, keep_closed_s=0.0, visible_s=0.05)


class TestMemory(RemoteContract):
    @property
    def root(self) -> str:
        return f"/{self.folder.parent.parent.name}/tier"

    @property
    def fs(self) -> MemoryFileSystem:
        return fsspec.filesystem("memory")

    def make_tier(self, ops: FileOps) -> RootTier:
        store = MemoryStore(self.fs, self.root, location=f"memory:/{self.root}", link=Link())
        return self.remote(store, ops)

    def raw_files(self) -> dict[str, bytes]:
        start = f"{self.root}/"
        store = self.fs.store
        return {
            p.removeprefix(start): store[p].getvalue() for p in list(store) if p.startswith(start)
        }

    def raw_write(self, name: str, data: bytes) -> None:
        self.fs.pipe_file(f"{self.root}/{name}", data)

    def raw_truncate(self, name: str, nbytes: int) -> None:
        self.raw_write(name, self.raw_files()[name][:nbytes])
