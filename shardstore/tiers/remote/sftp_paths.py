"""Keys as paths on a server, and the names of files that are not complete yet."""

from __future__ import annotations

import re
import secrets
from typing import Final

from shardstore.tiers.remote.faults import Fault

_TEMPORARY: Final = re.compile(r"(.+)\.[0-9a-f]{8}\.tmp", re.DOTALL)
_SUFFIX_NBYTES: Final = len(".01234567.tmp")
_NAME_NBYTES: Final = 255
_PATH_NBYTES: Final = 4095


def normalised_root(prefix: str) -> str:
    """The absolute path of a root; names in it are literal.

    Raises:
        ValueError: `.` or `..` in it, or a NUL.
    """
    names = [name for name in prefix.split("/") if name]
    if "." in names or ".." in names or "\0" in prefix:
        raise ValueError(f"{prefix!r} is no absolute path without . and ..")
    return "/" + "/".join(names)


def is_possible(key: str, *, room: int = 0) -> bool:
    """Whether a file can have this key; `room` bytes are kept free in each name."""
    names = key.split("/")
    return not ({"", ".", ".."} & set(names) or "\0" in key) and all(
        len(_encoded(name)) + room <= _NAME_NBYTES for name in names
    )


def path_of(root: str, key: str) -> str:
    """Where an object of this key is."""
    return f"{root.rstrip('/')}/{key}"


def writable_path_of(root: str, key: str) -> str:
    """The same for one to be written.

    Raises:
        Fault: "refused": the server cannot have a file of that name.
    """
    path = path_of(root, key)
    if not is_possible(key):
        raise Fault("refused", f"{key!r} cannot be the name of a file")
    if not is_possible(key, room=_SUFFIX_NBYTES) or len(_encoded(path)) + _SUFFIX_NBYTES > _PATH_NBYTES:  # fmt: skip
        raise Fault(
            "refused",
            f"{key[:60]!r}... is too long: a name may have {_NAME_NBYTES - _SUFFIX_NBYTES} bytes, "
            f"and {_SUFFIX_NBYTES} more until it is complete; a path {_PATH_NBYTES}",
        )
    if owner_of(key) is not None:
        raise Fault("refused", f"{key!r} is how files are called that are not complete yet")
    return path


def temporary_path(path: str) -> str:
    """A new name beside `path` for what will be there."""
    return f"{path}.{secrets.token_hex(4)}.tmp"


def owner_of(key: str) -> str | None:
    """The key that a temporary file is for; None if it is none."""
    found = _TEMPORARY.fullmatch(key)
    return found[1] if found else None


def parent_of(path: str) -> str:
    """The folder that a path is in."""
    return path.rpartition("/")[0] or "/"


def folders_between(root: str, path: str) -> list[str]:
    """The folders that `path` is in, from the nearest to the last one below the root."""
    folders = []
    folder = parent_of(path)
    while len(folder) > len(root):
        folders.append(folder)
        folder = parent_of(folder)
    return folders


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")
