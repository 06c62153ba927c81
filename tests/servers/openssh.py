"""OpenSSH's sftp server with key authentication, without touching the system: an unprivileged sshd of our own."""

from __future__ import annotations

import importlib.util
import itertools
import os
import pwd
import shutil
from pathlib import Path
from typing import Any, Final

from tests.servers.cache import cached, run
from tests.servers.process import ServerProcess, ServerUnavailableError

_PACKAGES: Final = ("openssh-server", "openssh-sftp-server", "libwrap0", "libnsl2", "libtirpc3")

_CONFIG: Final = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
UsePAM no
UseDNS no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 200
MaxSessions 100
Subsystem sftp internal-sftp
"""


class SftpServer:
    """OpenSSH. Files are below `files`, owned by the user `username`, which is not root.

    As root it would want a system user and a folder in /run; any other user's sshd wants neither, and lets
    in that user alone.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("paramiko") is None:
            raise ServerUnavailableError("paramiko is not installed: pip install -e '.[servers]'")
        installed = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
        unpacked = None if installed else _unpacked()
        user = pwd.getpwnam("daemon") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())

        def command(port: int, folder: Path) -> list[str]:
            (folder / "files").mkdir(exist_ok=True)
            for name in ("host_key", "user_key"):
                _make_key(folder / name)
            (folder / "sshd_config").write_text(_CONFIG.format(port=port, folder=folder))
            program = folder / "program"
            if unpacked:  # a copy, because the other user cannot read our home folder
                shutil.copytree(unpacked, program, dirs_exist_ok=True)
            for path in (folder, *folder.iterdir()):
                shutil.chown(path, user.pw_uid, user.pw_gid)
            sshd = ["-D", "-e", "-f", str(folder / "sshd_config")]
            if installed:
                return [installed, *sshd]
            return ["env", f"LD_LIBRARY_PATH={program}", str(program / "sshd"), *sshd]

        self._process = ServerProcess(
            "sshd",
            command,
            user=user if os.geteuid() == 0 else None,
        )
        self._numbers = itertools.count()
        self.port = self._process.port
        self.username = user.pw_name
        self.key_file = self._process.folder / "user_key"
        self.host_key = (self._process.folder / "host_key.pub").read_text()
        self.files = self._process.folder / "files"

    @property
    def url(self) -> str:
        """The folder that `fresh` makes roots in."""
        return f"sftp://127.0.0.1{self.files}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """What fsspec needs to reach the server."""
        return self.options_at(self.port)

    def options_at(self, port: int) -> dict[str, Any]:
        """The same through a proxy at `port`."""
        return {
            "port": port,
            "username": self.username,
            "key_filename": str(self.key_file),
            "look_for_keys": False,
            "allow_agent": False,
        }

    def fresh(self, name: str = "run") -> str:
        """A root that nothing has been written to, whose folder is not there yet."""
        return f"{self.url}/{name}-{next(self._numbers)}"

    def stop(self) -> None:
        """End the server; what it stored is gone."""
        self._process.stop()


def _make_key(path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as to
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(to.Encoding.PEM, to.PrivateFormat.OpenSSH, to.NoEncryption())
    path.write_bytes(private)
    path.chmod(0o600)
    public = key.public_key().public_bytes(to.Encoding.OpenSSH, to.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public + b"\n")


def _unpacked() -> Path:
    """The folder of an sshd with the libraries that it needs beyond the usual ones."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise ServerUnavailableError(
            "OpenSSH's server is taken from Debian's packages, and apt-get is missing"
        )
    return cached("openssh", _unpack)


def _unpack(folder: Path) -> None:
    """Debian's packages without installing them, which needs no rights and changes nothing of the system."""
    packages = folder / "packages"
    packages.mkdir()
    try:
        run("apt-get", "download", *_PACKAGES, cwd=packages)
    except ServerUnavailableError:
        # The system has no list of packages, or an old one: fetch one of our own.
        state = folder / "apt"
        for name in ("lists/partial", "archives/partial"):
            (state / name).mkdir(parents=True)
        own = (
            "-o",
            f"Dir::State::Lists={state}/lists",
            "-o",
            f"Dir::Cache={state}",
            "-o",
            "APT::Sandbox::User=root",
        )
        run("apt-get", *own, "update", cwd=packages)
        run("apt-get", *own, "download", *_PACKAGES, cwd=packages)
        shutil.rmtree(state)
    for package in packages.glob("*.deb"):
        run("dpkg", "-x", str(package), str(packages), cwd=packages)
    for path in (packages / "usr/sbin/sshd", *packages.glob("**/*.so.*")):
        shutil.copy(path, folder)
    shutil.rmtree(packages)
