"""One file on its way to an SFTP server."""

from __future__ import annotations

from shardstore.tiers.remote import sftp_files as files
from shardstore.tiers.remote.sftp_codec import Code, Flags, Status
from shardstore.tiers.remote.sftp_connections import Connections
from shardstore.tiers.remote.sftp_paths import temporary_path
from shardstore.tiers.remote.sftp_session import Session


class SFTPUpload:
    """A file that is written in parts, under a name of its own."""

    def __init__(
        self, connections: Connections, root: str, path: str, nbytes: int, part_bytes: int
    ) -> None:
        """Nothing is on the server yet."""
        self._connections = connections
        self._root = root
        self._path = path
        self._nbytes = nbytes
        self._part_bytes = part_bytes
        self._temporary = temporary_path(path)
        self._was_renamed = False

    def put(self, index: int, data: memoryview) -> None:
        """Write a part at its place."""
        with (
            files.writing(self._connections, self._path, len(data)) as session,
            files.opened(session, files.create_file(session, self._temporary)) as handle,
        ):
            session.write(handle, index * self._part_bytes, data)

    def complete(self) -> None:
        """Sync the file and rename it over what has its name."""
        with files.writing(self._connections, self._path, 0) as session:
            try:
                handle = (
                    session.open(self._temporary, Flags.WRITE)
                    if self._nbytes
                    else files.create_file(session, self._temporary)
                )
            except Status as answer:
                if answer.code == Code.NO_SUCH_FILE and self._is_there(session):
                    return
                raise
            with files.opened(session, handle):
                found = session.handle_attributes(handle).nbytes
                if found != self._nbytes:
                    why = f"{found:,} of {self._nbytes:,} bytes are on the server"
                    raise Status(Code.FAILURE, why, kind="broken")
                files.sync(session, handle)
            self._was_renamed = True  # or may have been, from here on
            files.replace(session, self._temporary, self._path)

    def abort(self) -> None:
        """Remove what was written, and the folders that have nothing in them then."""
        with self._connections.session() as session:
            files.remove(session, self._root, [self._temporary])

    def _is_there(self, session: Session) -> bool:
        found = session.attributes(self._path) if self._was_renamed else None
        return found is not None and found.is_file and found.nbytes == self._nbytes
