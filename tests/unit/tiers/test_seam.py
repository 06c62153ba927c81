"""Nothing in the package changes storage, or reads content of files, past the seam where tests break it."""

from __future__ import annotations

import ast
from pathlib import Path

import shardstore

_PACKAGE = Path(shardstore.__file__).parent
_SEAM = "tiers/fileops.py"
_CALLS = {
    "open", "creat", "mkdir", "makedirs", "mkfifo", "mknod", "rmdir", "removedirs", "unlink", "remove",
    "rename", "renames", "replace", "link", "symlink", "truncate", "ftruncate", "posix_fallocate",
    "write", "pwrite", "pwritev", "writev", "sendfile", "copy_file_range", "splice",
    "read", "pread", "preadv", "readv", "fsync", "fdatasync", "sync", "syncfs", "listdir", "scandir",
    "walk", "fwalk", "utime", "chmod", "chown",
}  # fmt: skip
_MODULES = {"os", "shutil", "tempfile"}
_KERNEL_FILES = {
    "tiers/pages.py": 1,  # size of a huge page
    "cluster/boot.py": 1,
    "engine/liveness.py": 2,  # processes, in /proc
    "cluster/signals.py": 3,  # a pipe between threads
}
"""Calls by module, for what the kernel tells of the machine, and what is no file."""


def _bypasses(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id == "open":
            found.append(f"{path}:{node.lineno}: open")
        if (
            isinstance(called, ast.Attribute)
            and isinstance(called.value, ast.Name)
            and called.value.id in _MODULES
            and (called.value.id != "os" or called.attr in _CALLS)
        ):
            found.append(f"{path}:{node.lineno}: {called.value.id}.{called.attr}")
    return found


def test_every_change_of_storage_goes_through_the_seam() -> None:
    offending = []
    for path in sorted(_PACKAGE.rglob("*.py")):
        name = path.relative_to(_PACKAGE).as_posix()
        if name != _SEAM and not name.startswith(("testing/", "cli")):
            found = _bypasses(path)
            if len(found) > _KERNEL_FILES.get(name, 0):
                offending += found
    assert not offending, "\n".join(offending)


def test_the_seam_itself_would_be_found() -> None:
    assert len(_bypasses(_PACKAGE / _SEAM)) > 10
