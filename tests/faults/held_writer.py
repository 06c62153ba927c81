"""A writer that stops half way through a file until it is told to go on."""

from __future__ import annotations

import threading

from shardstore.tiers.fileops import FileOps

_PAGE = 4096


class HeldWriter(FileOps):
    """Holds the first large write after half of its bytes; later ones queue behind, on their thread."""

    def __init__(self, *, held: bool = True) -> None:
        self.writing, self.go = threading.Event(), threading.Event()
        self._is_armed = held

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        if self._is_armed and len(data) > 1 << 20:
            self._is_armed = False
            half = len(data) // 2 // _PAGE * _PAGE
            super().write_at(fd, data[:half], offset)
            self.writing.set()
            assert self.go.wait(60), "the test never let the writer go on"
            data, offset = data[half:], offset + half
        super().write_at(fd, data, offset)
