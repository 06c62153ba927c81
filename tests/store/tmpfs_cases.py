"""Cases with a tmpfs of their own for the memory tier; run in a private mount namespace by test_limits_tmpfs.py."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from shardstore import ShardStoreError, SnapshotStore
from shardstore.tiers.fileops import FileOps, use_ops
from tests.ranks import run_ranks

MIB = 1 << 20
STATE_BYTES = 80 * MIB


@contextlib.contextmanager
def listening() -> Iterator[io.StringIO]:
    """What the store says meanwhile."""
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    logging.getLogger("shardstore").addHandler(handler)
    try:
        yield heard
    finally:
        logging.getLogger("shardstore").removeHandler(handler)


def _state(rank: int, nbytes: int) -> dict[str, Any]:
    return {"w": torch.full((nbytes // 4,), float(rank)), "step": {"n": 0}}


def save_and_restore(
    rank: int, folder: str, memory: Any, nbytes: int, between: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Three saves with numbered values, each restored in place; then a fresh store restores the newest."""
    state = _state(rank, nbytes)
    where = {"memory": memory, "memory_dir": Path(folder) / "shm", "timeout_s": 30.0}
    found: dict[str, Any] = {}
    with listening() as heard:
        with SnapshotStore(Path(folder) / "root", **where) as store:
            for step in (1, 2, 3):
                state["w"].fill_(10 * step + rank)
                state["step"]["n"] = step
                store.save(state, step=step)
                if between is not None:
                    between(step)
            store.drain()
            for step in (1, 2, 3):
                state["w"].fill_(-1)
                store.restore(state, step=step)
                assert bool((state["w"] == 10 * step + rank).all()), step
            found["num_streamed"] = store.stats().num_streamed
        with SnapshotStore(Path(folder) / "root", **where) as store:
            state["w"].fill_(-1)
            found["step"] = store.restore(state).step
            assert bool((state["w"] == 30 + rank).all())
    found["said"] = heard.getvalue()
    return found


def save_without_root(rank: int, folder: str, memory: Any, nbytes: int) -> dict[str, Any]:
    """Opening or saving must be refused, on all ranks; nothing is left."""
    state = _state(rank, nbytes)
    try:
        store = SnapshotStore(
            name="alone", memory=memory, memory_dir=Path(folder) / "shm", timeout_s=30.0
        )
    except ShardStoreError as error:
        return {"refused": [type(error).__name__, str(error)], "where": "construction"}
    found: dict[str, Any] = {"where": "save", "refused": None, "listed": -1}
    try:
        store.save(state, step=1).wait(30)
    except ShardStoreError as error:
        numbers = getattr(error, "needed_bytes", 0), getattr(error, "free_bytes", 0)
        found["refused"] = [type(error).__name__, str(error)]
        found["numbers"] = numbers
    found["listed"] = len(store.snapshots())
    small = _state(rank, 1024)
    with contextlib.suppress(ShardStoreError):  # the failure of before
        store.drain()
    if found["refused"] and os.path.ismount(Path(folder) / "shm"):
        with contextlib.suppress(ShardStoreError):
            found["small"] = bool(store.save(small, step=2).wait(30))
    store.take_leave("the case ends")
    return found


def _fill(path: Path) -> None:
    """Somebody else takes the whole tmpfs, whoever else is taking memory at this moment."""
    piece = 1 << 26
    with path.open("wb") as file:
        while piece >= 4096:
            try:
                os.posix_fallocate(file.fileno(), file.seek(0, 2), piece)
            except OSError:
                piece //= 2


class FillsBeforeStaging(FileOps):
    """Somebody else takes all that is left once a slot is reserved."""

    def __init__(self, shm: Path) -> None:
        self.shm = shm
        self.count = 0

    def point(self, name: str) -> None:
        if name == "stage":
            self.count += 1
            _fill(self.shm / f"other-{self.count}")


def filled_between(rank: int, folder: str, memory: Any, nbytes: int) -> dict[str, Any]:
    """The tmpfs is filled after the first save."""
    shm = Path(folder) / "shm"

    def between(step: int) -> None:
        if step == 1 and rank == 0:
            _fill(shm / "other")

    return save_and_restore(rank, folder, memory, nbytes, between)


def filled_while_staging(rank: int, folder: str, memory: Any, nbytes: int) -> dict[str, Any]:
    """The tmpfs is filled between reserve and stage of each save."""
    with use_ops(FillsBeforeStaging(Path(folder) / "shm")):
        return save_and_restore(rank, folder, memory, nbytes)


def no_inodes(rank: int, folder: str, memory: Any, nbytes: int) -> dict[str, Any]:
    """The tmpfs has room, but no file can be made in it."""
    shm = Path(folder) / "shm"
    if rank == 0:
        with contextlib.suppress(OSError):
            for number in range(100):
                (shm / f"other-{number}").touch()
    return save_and_restore(rank, folder, memory, nbytes)


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    case.__name__: case
    for case in (
        save_and_restore,
        save_without_root,
        filled_between,
        filled_while_staging,
        no_inodes,
    )
}


def main() -> None:
    """Arguments: folder, mount options or "", ranks, and [case, memory, bytes] as JSON, several times."""
    folder, options, num_ranks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    results = []
    for number, text in enumerate(sys.argv[4:]):
        case, memory, nbytes = json.loads(text)
        own = folder / str(number)
        own.mkdir()
        if options:
            (own / "shm").mkdir()
            command = ["mount", "-t", "tmpfs", "-o", options, "none", str(own / "shm")]
            subprocess.run(command, check=True)
        arguments = (str(own), memory, nbytes)
        if num_ranks > 1:
            results.append(run_ranks(num_ranks, CASES[case], *arguments))
        else:
            results.append([CASES[case](0, *arguments)])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
