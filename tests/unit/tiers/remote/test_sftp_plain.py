"""SFTP as the protocol's draft has it, without OpenSSH's extensions: paramiko's own server, in a thread."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest

from shardstore.tiers.remote.link import Link
from shardstore.tiers.remote.sftp import SFTPStore
from tests.unit.tiers.remote.store_suite import ObjectStoreSuite


class _Login(paramiko.ServerInterface):  # type: ignore[misc]
    def check_auth_password(self, username: str, password: str) -> Any:
        is_right = (username, password) == ("me", "secret")
        return paramiko.AUTH_SUCCESSFUL if is_right else paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> Any:
        return paramiko.OPEN_SUCCEEDED

    def get_allowed_auths(self, username: str) -> str:
        return "password"


def _answer(call: Any, *args: Any) -> Any:
    try:
        found = call(*args)
    except NotADirectoryError:
        return paramiko.SFTP_NO_SUCH_FILE
    except OSError as error:
        return paramiko.SFTPServer.convert_errno(error.errno or errno.EIO)
    return paramiko.SFTP_OK if found is None else found


class _Handle(paramiko.SFTPHandle):  # type: ignore[misc]
    def stat(self) -> Any:
        self.writefile.flush()
        return paramiko.SFTPAttributes.from_stat(os.fstat(self.readfile.fileno()))


class _Files(paramiko.SFTPServerInterface):  # type: ignore[misc]
    def open(self, path: str, flags: int, attr: Any) -> Any:
        def opened() -> Any:
            handle = _Handle(flags)
            is_writing = bool(flags & os.O_WRONLY)
            file = os.fdopen(os.open(path, flags, 0o644), "wb" if is_writing else "rb")
            handle.readfile = handle.writefile = file
            return handle

        return _answer(opened)

    def list_folder(self, path: str) -> Any:
        def listed() -> Any:
            names = os.listdir(path)
            return [
                paramiko.SFTPAttributes.from_stat(os.lstat(f"{path}/{name}"), name)
                for name in names
            ]

        return _answer(listed)

    def stat(self, path: str) -> Any:
        return _answer(lambda: paramiko.SFTPAttributes.from_stat(os.stat(path)))

    def remove(self, path: str) -> Any:
        return _answer(os.remove, path)

    def rename(self, oldpath: str, newpath: str) -> Any:
        def renamed() -> None:
            os.link(oldpath, newpath)  # the draft: an error where the new name exists
            os.remove(oldpath)

        return _answer(renamed)

    def mkdir(self, path: str, attr: Any) -> Any:
        return _answer(os.mkdir, path)

    def rmdir(self, path: str) -> Any:
        return _answer(os.rmdir, path)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    key = paramiko.RSAKey.generate(2048)
    listener = socket.create_server(("127.0.0.1", 0))
    transports: list[paramiko.Transport] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            transport = paramiko.Transport(connection)
            transports.append(transport)
            transport.add_server_key(key)
            transport.set_subsystem_handler("sftp", paramiko.SFTPServer, _Files)
            transport.start_server(threading.Event(), _Login())

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    for transport in transports:
        transport.close()


@pytest.mark.nightly
class TestPlainServer(ObjectStoreSuite):
    part_nbytes = 100_000

    @pytest.fixture(autouse=True)
    def _folder(self, port: int, disk_folder: Path) -> None:
        self.port = port
        self.files = disk_folder

    def make_store(self, root: str, link: Link) -> SFTPStore:
        options = {
            "port": self.port, "username": "me", "password": "secret", "allow_agent": False, "look_for_keys": False,
        }  # fmt: skip
        return SFTPStore("127.0.0.1", f"{self.files}/{root}", storage_options=options, link=link)

    def raw_objects(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.files)): path.read_bytes()
            for path in self.files.rglob("*")
            if path.is_file() and not path.name.endswith(".tmp")
        }
