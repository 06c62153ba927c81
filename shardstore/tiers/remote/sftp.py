"""The root on a server that one can log in to: files over SFTP.

A file appears under its name by a rename, or by a link where it must be new; until then it is
`<name>.<nonce>.tmp` beside it, so two writers of one name never share a file. Folders are made and removed
as needed: object stores have none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from shardstore.tiers.remote import sftp_files as files
from shardstore.tiers.remote.faults import Fault
from shardstore.tiers.remote.link import Link
from shardstore.tiers.remote.objects import Entry, Listing, Unfinished
from shardstore.tiers.remote.sftp_codec import (
    Answer,
    Attributes,
    Body,
    Code,
    Flags,
    Request,
    Status,
    text,
)
from shardstore.tiers.remote.sftp_connections import Connections
from shardstore.tiers.remote.sftp_paths import (
    is_possible,
    normalised_root,
    owner_of,
    parent_of,
    path_of,
    temporary_path,
    writable_path_of,
)
from shardstore.tiers.remote.sftp_session import Session
from shardstore.tiers.remote.sftp_upload import SFTPUpload

PART_NBYTES: Final = 8 << 20


class SFTPStore:
    """A folder on an SFTP server, as an ObjectStore.

    What is directly in a folder is told with folders that have no file in them yet; entries have no tags,
    as the protocol knows times to the second only.
    """

    kind = "SFTP"
    num_parallel = 4
    may_be_exclusive = True
    is_in_order = False

    def __init__(
        self, host: str, prefix: str, *, storage_options: Mapping[str, object], link: Link
    ) -> None:
        """Connects at the first request.

        Args:
            host: Name or address.
            prefix: The absolute path of the root, taken literally.
            storage_options: As fsspec's SFTPFileSystem takes them: port, username, password, pkey,
                key_filename, host_key_policy (like there, unknown hosts are trusted by default) and so on.
                Beside them `known_hosts`, a file: hosts that are not in it are refused.
            link: Bounds each request.

        Raises:
            ImportError: paramiko is missing.
            ValueError: An option that is none, or a path with `.` or `..`.
        """
        options = {name: value for name, value in storage_options.items() if name != "host"}
        self._root = normalised_root(prefix)
        self._connections = Connections(host, options, link, num_kept=self.num_parallel)
        user, port = options.get("username"), options.get("port")
        self.location = (
            f"sftp://{f'{user}@' if user else ''}{f'[{host}]' if ':' in host else host}"
            f"{f':{port}' if port and port != 22 else ''}{self._root}"
        )

    # ------------------------------------------------------------------- check

    def check(self) -> None:
        """Log in, and open the root's folder if it is there."""
        with self._connections.session() as session:
            found = session.attributes(self._root)
            if found is None:
                return
            if not found.is_folder:
                raise Status(Code.FAILURE, f"{self._root} is no folder", kind="refused")
            (answer,) = session.each(Request.OPENDIR, [text(self._root)], Answer.HANDLE)
            if isinstance(answer, Status):
                raise answer
            session.close(Body(answer).string())

    def check_writable(self) -> None:
        """Make and remove what a first write would make: a file in the root, or the missing folder."""
        missing = self._root
        with files.writing(self._connections, self._root, 0) as session:
            space = files.space_at(session, self._root)
            if space is not None and space.is_read_only:
                raise Status(Code.FAILURE, "the file system is read-only", kind="denied")
            if session.attributes(self._root) is not None:
                path = temporary_path(path_of(self._root, "writable"))
                session.close(session.open(path, Flags.WRITE | Flags.CREATE | Flags.EXCLUSIVE))
                session.each(Request.REMOVE, [text(path)], Answer.STATUS)
                return
            while session.attributes(parent_of(missing)) is None:
                missing = parent_of(missing)
            # A name of its own: another process may be making the real one.
            path = temporary_path(path_of(parent_of(missing), ".shardstore"))
            session.make_folder(path)
            session.each(Request.RMDIR, [text(path)], Answer.STATUS)

    # ----------------------------------------------------------------- reading

    def listing(self, prefix: str, *, is_flat: bool) -> Listing:
        """Walk the folders, a level at a time."""
        objects: dict[str, Entry] = {}
        folders: list[str] = []
        with self._connections.session() as session:
            for key, found in self._walk(session, prefix, folders, is_flat=is_flat):
                if owner_of(key) is None:
                    objects[key] = Entry(found.nbytes, "")
        return Listing(objects, frozenset(folders))

    def entry(self, key: str) -> Entry | None:
        """Ask for the file's size."""
        if not is_possible(key):
            return None
        with self._connections.session() as session:
            found = session.attributes(path_of(self._root, key))
        return Entry(found.nbytes, "") if found is not None and found.is_file else None

    def get(self, key: str, start: int, into: memoryview) -> int:
        """Read a range of a file, with many requests on their way."""
        if not is_possible(key):
            raise FileNotFoundError(key)
        with self._connections.session(len(into)) as session:
            try:
                handle = session.open(path_of(self._root, key), Flags.READ)
            except Status as answer:
                # Some servers open folders, and others refuse to.
                found = session.attributes(path_of(self._root, key))
                if found is None or found.is_folder:
                    raise FileNotFoundError(key) from answer
                raise
            with files.opened(session, handle):
                try:
                    return session.read(handle, start, into)
                except Status as answer:
                    if session.handle_attributes(handle).is_folder:
                        raise FileNotFoundError(key) from answer
                    raise

    # ----------------------------------------------------------------- writing

    def put(self, key: str, data: bytes) -> None:
        """Write a file beside it, and rename that over."""
        path = writable_path_of(self._root, key)
        with self._temporary(path, len(data)) as (session, temporary):
            files.write_new(session, temporary, data)
            files.replace(session, temporary, path)

    def create(self, key: str, data: bytes) -> bool:
        """Write a file beside it, and link that to the name if it is free."""
        path = writable_path_of(self._root, key)
        with self._temporary(path, len(data)) as (session, temporary):
            files.write_new(session, temporary, data)
            return files.publish_new(session, temporary, path)

    def begin(self, key: str, nbytes: int, part_bytes: int) -> SFTPUpload:
        """Parts go to their places in one file, in any order.

        Raises:
            Fault: "full": fewer than `nbytes` are free.
        """
        path = writable_path_of(self._root, key)
        with self._connections.session() as session:
            space = files.space_at(session, parent_of(path))
            if space is not None and space.free_nbytes < nbytes:
                why = f"{nbytes:,} bytes are needed and {space.free_nbytes:,} free"
                raise Status(Code.FAILURE, why, kind="full")
        return SFTPUpload(self._connections, self._root, path, nbytes, part_bytes)

    def part_bytes(self, nbytes: int) -> int:  # noqa: ARG002 - there may be any number
        """8 MiB."""
        return PART_NBYTES

    def delete(self, keys: Sequence[str]) -> None:
        """Remove files, and the folders that have nothing in them then."""
        paths = [path_of(self._root, key) for key in keys if is_possible(key)]
        if paths:
            with self._connections.session() as session:
                files.remove(session, self._root, paths)

    # --------------------------------------------------------------- unfinished

    def unfinished(self) -> list[Unfinished]:
        """The temporary files below the root."""
        with self._connections.session() as session:
            keys = [key for key, _ in self._walk(session, "", [], is_flat=True)]
        return [Unfinished(owner, key) for key in keys if (owner := owner_of(key)) is not None]

    def abort_unfinished(self, upload: Unfinished) -> None:
        """Remove one."""
        if owner_of(upload.token) != upload.key or not is_possible(upload.token):
            raise Fault("refused", f"{upload.token!r} is no temporary file")
        self.delete([upload.token])

    def close(self) -> None:
        """Close the connections that are idle now, and the others when they are."""
        self._connections.close()

    # ----------------------------------------------------------------- helpers

    def _walk(
        self, session: Session, prefix: str, folders: list[str], *, is_flat: bool
    ) -> Iterator[tuple[str, Attributes]]:
        """Files (and links to files) below a prefix; `folders` takes what is not gone into."""
        if prefix and not (prefix.endswith("/") and is_possible(prefix[:-1])):
            return
        level = [prefix]
        while level:
            links: list[str] = []
            deeper: list[str] = []
            # A root's path has no slash at its end, except the server's own root.
            keys = {path_of(self._root, key).rstrip("/") or "/": key for key in level}
            for path, names in session.folders(list(keys)):
                for name, found in names:
                    key = keys[path] + name
                    if found.is_folder:
                        deeper.append(key)
                    elif found.is_link:
                        links.append(key)
                    elif found.is_file:
                        yield key, found
            for key, answer in zip(links, session.each(Request.STAT, [text(path_of(self._root, key)) for key in links], Answer.ATTRS), strict=True):  # fmt: skip
                if isinstance(answer, bytes) and (target := Body(answer).attributes()).is_file:
                    yield key, target
            if not is_flat:
                folders += deeper
                return
            level = [f"{key}/" for key in deeper]

    @contextlib.contextmanager
    def _temporary(self, path: str, nbytes: int) -> Iterator[tuple[Session, str]]:
        """A name that is removed if the block fails and the connection lives."""
        temporary = temporary_path(path)
        with files.writing(self._connections, path, nbytes) as session:
            try:
                yield session, temporary
            except Status:
                files.remove(session, self._root, [temporary])
                raise
