"""System calls of a process that a control group limits, in which nothing else is pretended."""

from __future__ import annotations

from shardstore.tiers.fileops import FileOps

MIB = 1 << 20
_GROUP = "/sys/fs/cgroup/job"


class LimitedOps(FileOps):
    """A cgroup v2 of `limit` bytes, of which `use` are taken; change both while it runs."""

    def __init__(self, limit: int, use: int = 0) -> None:
        self.limit, self.use = limit, use
        self.largest_write = 0
        self.num_reserved = 0

    def used(self) -> int:
        """What the kernel would say."""
        return self.use

    def read_text(self, path: str) -> str:
        if path == "/proc/self/cgroup":
            return "0::/job\n"
        if path == "/proc/self/mountinfo":
            return "35 31 0:32 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
        if not path.startswith("/sys/fs/cgroup"):
            return super().read_text(path)
        if path == f"{_GROUP}/memory.max":
            return f"{self.limit}\n"
        if path == f"{_GROUP}/memory.current":
            return f"{self.used()}\n"
        raise FileNotFoundError(path)

    def allocate(self, fd: int, nbytes: int, offset: int = 0) -> None:
        super().allocate(fd, nbytes, offset)
        self.num_reserved += nbytes

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        self.largest_write = max(self.largest_write, len(data))
        super().write_at(fd, data, offset)
