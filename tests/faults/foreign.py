"""Things that are not ours, put wherever a store looks: none of them may be followed, read, waited for or removed."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def _pipe(path: bytes) -> None:
    os.mkfifo(path)


def _socket(path: bytes) -> None:
    os.mknod(path, 0o600 | stat.S_IFSOCK)


def _dangling(path: bytes) -> None:
    os.symlink(b"nowhere", path)


def _loop(path: bytes) -> None:
    os.symlink(os.path.basename(path), path)


def _out(path: bytes) -> None:
    os.symlink(b"/", path)


def _folder(path: bytes) -> None:
    os.mkdir(path)
    Path(os.fsdecode(path), "theirs").write_text("theirs")


def _file(path: bytes) -> None:
    with open(path, "wb") as file:
        file.write(b"theirs")


def _device(path: bytes) -> None:
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero: endless
    except PermissionError:
        pass


KINDS = (_pipe, _socket, _dangling, _loop, _out, _folder, _file, _device)


def plant_names(folder: Path, names: list[bytes]) -> None:
    """Each kind of thing under each name, as far as names are left: `%d` in a name is its number."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for name in names:
        for kind in KINDS:
            number += 1
            path = os.path.join(os.fsencode(folder), name.replace(b"%d", b"%04d" % number))
            if not os.path.lexists(path):
                kind(path)


def plant_root(root: Path) -> None:
    """Foreign things in a root, and attempts in which foreign things have the names of ours."""
    plant_names(
        root,
        [
            b"notes-%d.txt",
            b"\xff\xfe-%d",
            b"step-%d",
            b"step-00000000%d.00000001-000001-0badcafe",
            b"run-0000%d.json",
            b"run-zzzz%d.json",
            b"deleted-step-00000000%d.00000001-000001-0badcafe",
            b".manifest.json.%d.tmp",
            b"manifest.json",
            b"%d\nline",
            b"-rf %d",
            b"x" * 200 + b"%d",
        ],
    )
    for number, kind in enumerate(KINDS):
        attempt = root / f"step-00000000{number:04d}.00000000-000001-0badcafe"
        attempt.mkdir()
        kind(os.fsencode(attempt / "manifest.json"))
        attempt = root / f"step-00000000{number:04d}.00000000-000002-0badcafe"
        attempt.mkdir()
        for rank in range(2):
            kind(os.fsencode(attempt / f"rank-{rank:05d}.safetensors"))
    odd = root / "step-000000000009.00000000-000003-0badcafe"
    odd.mkdir()
    for name in ("rank-\u0660\u0660\u0660\u0660\u0660.safetensors", "rank-000000.safetensors"):
        (odd / name).write_bytes(b"theirs")
    many = root / "many"
    many.mkdir()
    for number in range(5000):
        (many / f"{number}").touch()


def plant_near(folder: Path) -> None:
    """Foreign things in the folder of the memory tier or of the disk."""
    plant_names(
        folder,
        [
            b"notes-%d.txt",
            b"\xff\xfe-%d",
            b"slot-0badcafe-00000-%d",
            b"slot-0badcafe-00007-%d",
            b"owner-0bad%d-00000.lock",
            b"owner-0bad%d-00007.lock",
            b"step-00000000%d.00000001-000001-0badcafe",
        ],
    )
    for number, kind in enumerate(KINDS):
        attempt = folder / f"step-00000000{number:04d}.00000000-000001-0badcafe"
        attempt.mkdir()
        for name in ("safetensors", "complete", "safetensors.tmp"):
            for rank in (0, 7):
                kind(os.fsencode(attempt / f"rank-{rank:05d}.{name}"))


def names_below(folder: Path) -> set[bytes]:
    """Every name below a folder, links not followed."""
    found: set[bytes] = set()
    for parent, folders, files in os.walk(os.fsencode(folder)):
        found.update(os.path.join(parent, name) for name in folders + files)
    return found
