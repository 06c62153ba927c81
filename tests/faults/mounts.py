"""Two ranks on file systems of their own; run in a private mount namespace by test_env_mounts.py."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.faults.threaded import Ranks, Stores

NUMEL = 60_000


def _mount(folder: Path, options: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)


def _free(folder: Path) -> tuple[int, int]:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize, found.f_ffree


def _open(root: Path, **options: Any) -> Stores:
    memory = root.parent / "memory"
    memory.mkdir(exist_ok=True)
    options = {"memory": 0, "on_error": "warn", "timeout_s": 60.0, **options}
    return Ranks().open(root, memory_dir=memory, name="job", **options)


def _fill(path: Path, leave_bytes: int) -> None:
    """Take all but `leave_bytes` of the file system."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, _free(path.parent)[0] - leave_bytes)


def full(folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Less and less room for a save that needs about 960,000 bytes; afterwards there is room again."""
    root = folder / "root"
    _mount(root, "size=8m")
    stores = _open(root, **options)
    stores.save(1, numel=NUMEL)
    stores.drain()
    found = []
    step = newest = 1
    for leave_bytes in (*range(0, 640_000, 49_152), 4096, 8192, 12288, 16384, 20480):
        filler = root / "filler"
        _fill(filler, leave_bytes)
        before, step = _free(root), step + 1
        told = stores.save(step, numel=NUMEL)
        stores.drain()
        after = _free(root)
        newest = newest if told[0] else step
        one = {"left": leave_bytes, "told": told, "before": before, "after": after}
        one["restored"] = stores.restore(numel=NUMEL) == newest
        one["listed"] = stores.listed()[-1] == newest
        filler.unlink()
        step += 1
        one["next"] = stores.save(step, numel=NUMEL)
        stores.drain()
        newest = step
        for old in stores.listed()[:-1]:
            stores.each(lambda store, _, old=old: store.delete(old))  # type: ignore[misc]
        found.append(one)
    stores.close()
    return found


def inodes(folder: Path) -> list[dict[str, Any]]:
    """Room for so many more files and folders."""
    root = folder / "root"
    _mount(root, "size=8m,nr_inodes=64")
    stores = _open(root)
    stores.save(1)
    found = []
    step = newest = 1
    for left in range(7):
        fillers: list[Path] = []
        with contextlib.suppress(OSError):
            while True:
                filler = root / f"filler-{len(fillers)}"
                filler.touch()
                fillers.append(filler)
        for filler in fillers[:left]:
            filler.unlink()
        before, step = _free(root), step + 1
        told = stores.save(step)
        stores.drain()
        after = _free(root)
        newest = newest if told[0] else step
        found.append(
            {
                "left": left,
                "told": told,
                "before": before,
                "after": after,
                "restored": stores.restore() == newest,
                "listed": stores.listed()[-1] == newest,
            }
        )
        for filler in fillers[left:]:
            filler.unlink()
    stores.close()
    return found


def read_only(folder: Path) -> dict[str, Any]:
    """The file system turns read-only between two saves, and then back."""
    root = folder / "root"
    _mount(root, "size=8m")
    stores = _open(root, memory="1MiB")
    stores.save(1)
    stores.drain()
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    found: dict[str, Any] = {"told": stores.save(2), "restored": stores.restore()}
    stores.drain()
    stores.close()
    stores = _open(root, memory="1MiB")
    found["again"] = stores.restore()
    found["told again"] = stores.save(3)
    subprocess.run(["mount", "-o", "remount,rw", str(root)], check=True)
    found["back"] = stores.save(4), stores.restore(), stores.listed()
    stores.close()
    return found


def unmounted(folder: Path) -> dict[str, Any]:
    """The file system goes away under the job: an empty folder is in its place."""
    root = folder / "root"
    _mount(root, "size=8m")
    stores = _open(root)
    stores.save(1)
    subprocess.run(["umount", "-l", str(root)], check=True)
    found: dict[str, Any] = {"told": stores.save(2), "restored": stores.restore()}
    found["listed"] = stores.listed()
    stores.close()
    return found


def main() -> None:
    """Argument: a folder."""
    import io
    import logging

    folder = Path(sys.argv[1])
    heard = io.StringIO()
    logging.getLogger("shardstore").addHandler(logging.StreamHandler(heard))
    found = {
        "full": full(folder / "full"),
        "full_with_memory": full(folder / "full-with-memory", memory="4MiB"),
        "inodes": inodes(folder / "inodes"),
        "read_only": read_only(folder / "read-only"),
        "unmounted": unmounted(folder / "unmounted"),
        "heard": heard.getvalue()[-4000:],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
