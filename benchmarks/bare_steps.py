"""The bare steps of a spill, in a process of their own: what they alone take from training.

    python -m benchmarks.bare_steps FLAG FILE BYTES

Whenever the first byte of FLAG is 1, take the digest of BYTES of memory and write them directly to FILE,
both as fast as the machine can; then set it to 0. End when it is 2. What a loop in another process loses
meanwhile is lost to the machine: processors, caches and memory that two programs share.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path

import xxhash

from benchmarks import machine

_IDLE, _WORK, _END = 0, 1, 2
_POLL_S = 0.001
_LIMIT_S = 120.0


class BareSteps:
    """Begins them, and knows when they are done, for the price of looking at one byte."""

    def __init__(self, flag: mmap) -> None:
        """`flag` is shared with the process that works."""
        self._flag = flag

    def begin(self) -> BareSteps:
        """One round."""
        self._flag[0] = _WORK
        return self

    def done(self) -> bool:
        """Whether it is over."""
        return self._flag[0] == _IDLE

    def result(self) -> None:
        """Wait for it."""
        end = time.monotonic() + _LIMIT_S
        while not self.done():
            assert time.monotonic() < end, "the bare steps did not end"
            time.sleep(_POLL_S)


@contextmanager
def bare_steps(folder: Path, nbytes: int) -> Iterator[BareSteps]:
    """A process that waits for rounds; it has done one when this is entered."""
    path = folder / "flag"
    path.write_bytes(bytes([_IDLE]))
    target = folder / "bare-steps"
    command = [sys.executable, "-m", "benchmarks.bare_steps", str(path), str(target), str(nbytes)]
    with path.open("r+b") as file, mmap(file.fileno(), 1) as flag:
        process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        )
        try:
            steps = BareSteps(flag)
            steps.begin().result()
            yield steps
            flag[0] = _END
            process.wait(_LIMIT_S)
        finally:
            process.kill()
            process.wait()


def main() -> None:
    """Work when told to."""
    flag_path, target, nbytes = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    source = machine.huge_pages(nbytes)
    with (
        flag_path.open("r+b") as file,
        mmap(file.fileno(), 1) as flag,
        ThreadPoolExecutor(1) as pool,
    ):
        while flag[0] != _END:
            if flag[0] == _WORK:
                digest = pool.submit(xxhash.xxh3_128_digest, source)
                machine.bare_write_s(source, target)
                digest.result()
                target.unlink()
                flag[0] = _IDLE
            time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
