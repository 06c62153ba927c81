"""Files and folders through one SFTP session: made, synced and removed so that others may do the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from shardstore.tiers.remote.sftp_codec import (
    Answer,
    Code,
    Flags,
    Request,
    Space,
    Status,
    field,
    text,
)
from shardstore.tiers.remote.sftp_connections import Connections
from shardstore.tiers.remote.sftp_paths import folders_between, parent_of
from shardstore.tiers.remote.sftp_session import Session

_TRIES = 5
"""Of making a folder and a file in it, while others remove folders that are empty."""
_FSYNC = b"fsync@openssh.com"
_HARDLINK = b"hardlink@openssh.com"
_POSIX_RENAME = b"posix-rename@openssh.com"


@contextlib.contextmanager
def writing(connections: Connections, path: str, nbytes: int) -> Iterator[Session]:
    """A session for writing `path`; refusals get their reason."""
    with connections.session(nbytes) as session:
        try:
            yield session
        except Status as answer:
            raise explained(session, path, nbytes, answer) from answer


@contextlib.contextmanager
def opened(session: Session, handle: bytes) -> Iterator[bytes]:
    """Close a handle after the block; an error of the connection leaves nothing to close."""
    try:
        yield handle
    except (Status, FileNotFoundError):
        with contextlib.suppress(Status):
            session.close(handle)
        raise
    session.close(handle)


def create_file(session: Session, path: str, *, is_new: bool = False) -> bytes:
    """Open a file for writing, with the folders that it needs; returns the handle."""
    flags = Flags.WRITE | Flags.CREATE | (Flags.EXCLUSIVE if is_new else 0)
    for left in reversed(range(_TRIES)):
        try:
            return session.open(path, flags)
        except Status as answer:
            if answer.code != Code.NO_SUCH_FILE or not left:
                raise
        try:
            _make_folders(session, parent_of(path))
        except Status as answer:
            if answer.code != Code.NO_SUCH_FILE:
                raise
    raise AssertionError


def write_new(session: Session, path: str, data: bytes) -> None:
    """Write a file that must not exist, down to the server's disk."""
    with opened(session, create_file(session, path, is_new=True)) as handle:
        session.write(handle, 0, memoryview(data))
        sync(session, handle)


def sync(session: Session, handle: bytes) -> None:
    """Have the server write to its disk what it holds of a file."""
    if _FSYNC in session.extensions:
        session.extended(_FSYNC, field(handle))


def sync_folder(session: Session, path: str) -> None:
    """The same for the names in a folder, where the server opens folders as files (OpenSSH does)."""
    if _FSYNC not in session.extensions:
        return
    with contextlib.suppress(Status), opened(session, session.open(path, Flags.READ)) as handle:
        session.extended(_FSYNC, field(handle))


def replace(session: Session, temporary: str, path: str) -> None:
    """Give a file its name, in place of another one; at once where the server can."""
    if _POSIX_RENAME in session.extensions:
        session.extended(_POSIX_RENAME, text(temporary) + text(path))
    else:
        session.each(Request.REMOVE, [text(path)], Answer.STATUS)
        session.rename_to_new(temporary, path)
    sync_folder(session, parent_of(path))


def publish_new(session: Session, temporary: str, path: str) -> bool:
    """Give a file its name unless that is taken: False then. The temporary name goes."""
    is_new = _is_linked(session, temporary, path)
    session.each(Request.REMOVE, [text(temporary)], Answer.STATUS)
    sync_folder(session, parent_of(path))
    return is_new


def remove(session: Session, root: str, paths: Iterable[str]) -> None:
    """Remove files, and the folders below the root that have nothing in them then."""
    paths = list(paths)
    refused: Status | None = None
    answers = session.each(Request.REMOVE, [text(path) for path in paths], Answer.STATUS)
    for path, answer in zip(paths, answers, strict=True):
        if isinstance(answer, bytes) or answer.code == Code.NO_SUCH_FILE:
            continue
        found = session.attributes(path)
        if found is not None and not found.is_folder:  # no object is called like a folder
            refused = refused or Status(answer.code, f"{path}: {answer.text}")
    by_depth: dict[int, set[str]] = {}
    for path in paths:
        for folder in folders_between(root, path):
            by_depth.setdefault(folder.count("/"), set()).add(folder)
    for _, folders in sorted(by_depth.items(), reverse=True):
        session.each(Request.RMDIR, [text(folder) for folder in sorted(folders)], Answer.STATUS)
    if refused is not None:
        raise refused


def space_at(session: Session, path: str) -> Space | None:
    """What is free where `path` is, or would be."""
    while (space := session.space(path)) is None and path != "/":
        path = parent_of(path)
    return space


def explained(session: Session, path: str, nbytes: int, answer: Status) -> Status:
    """Why a write was refused: servers call most reasons "Failure"."""
    if answer.code != Code.FAILURE or answer.kind is not None:
        return answer
    found = session.attributes(path)
    if found is not None and found.is_folder:
        return Status(answer.code, f"{path} is a folder", kind="refused")
    space = space_at(session, parent_of(path))
    if space is not None and space.is_read_only:
        return Status(answer.code, f"{path} is on a read-only file system", kind="denied")
    if space is not None and space.free_nbytes < max(nbytes, 1 << 20):
        return Status(answer.code, f"{space.free_nbytes:,} bytes are free", kind="full")
    return answer


def _make_folders(session: Session, path: str) -> None:
    found = session.attributes(path)
    if found is None and path != "/":
        _make_folders(session, parent_of(path))
        try:
            session.make_folder(path)
        except Status:
            found = session.attributes(path)  # another may have made it meanwhile
            if found is None:
                raise
        else:
            sync_folder(session, parent_of(path))
            return
    if found is not None and not found.is_folder:
        raise Status(Code.FAILURE, f"{path} is a file, and no folder", kind="refused")


def _is_linked(session: Session, temporary: str, path: str) -> bool:
    if session.attributes(path) is not None:
        return False
    if _HARDLINK in session.extensions:
        try:
            session.extended(_HARDLINK, text(temporary) + text(path))
            return True
        except Status:
            if session.attributes(path) is not None:
                return False
            # Else a file system without links.
    try:
        session.rename_to_new(temporary, path)
        return True
    except Status:
        if session.attributes(path) is None:
            raise
        return False
