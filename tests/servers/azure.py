"""Azurite: Azure's blob storage, from npm."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import shutil
import uuid
from pathlib import Path
from typing import Any, Final

from tests.servers.cache import cached, run
from tests.servers.process import ServerProcess, ServerUnavailableError

VERSION: Final = "3.35.0"
ACCOUNT: Final = "devstoreaccount1"
ACCOUNT_KEY: Final = (  # Azurite's own, the same everywhere
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


def azure_options(port: int) -> dict[str, Any]:
    """Options for fsspec's Azure client: the test account, and the server (or proxy) at `port`."""
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    parts = {
        "DefaultEndpointsProtocol": "http",
        "AccountName": ACCOUNT,
        "AccountKey": ACCOUNT_KEY,
        "BlobEndpoint": endpoint,
    }
    return {"connection_string": ";".join(f"{name}={value}" for name, value in parts.items())}


class AzuriteServer:
    """Azurite: exclusive create is honoured; objects are files in a folder of its own."""

    def __init__(self) -> None:
        if importlib.util.find_spec("azure.storage.blob") is None:
            raise ServerUnavailableError(
                "Azure's client is not installed: pip install -e '.[servers]'"
            )
        program = cached(f"azurite-{VERSION}", _install) / "node_modules" / ".bin" / "azurite-blob"
        self._process = ServerProcess(
            "azurite",
            lambda port, folder: [
                str(program), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder / "objects"),
                "--silent", "--skipApiVersionCheck", "--disableTelemetry",
            ],
        )  # fmt: skip
        self._numbers = itertools.count()
        self.port = self._process.port
        self.container = self.fresh_bucket()

    @property
    def url(self) -> str:
        """The container that `fresh` makes roots in."""
        return f"az://{self.container}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """What fsspec needs to reach the server."""
        return azure_options(self.port)

    def options_at(self, port: int) -> dict[str, Any]:
        """The same through a proxy at `port`."""
        return azure_options(port)

    def fresh(self, name: str = "run") -> str:
        """A root that nothing has been written to."""
        return f"{self.url}/{name}-{next(self._numbers)}"

    @functools.cached_property
    def client(self) -> Any:
        """A plain synchronous client, to look at a container past what is tested."""
        from azure.storage.blob import BlobServiceClient

        return BlobServiceClient.from_connection_string(
            azure_options(self.port)["connection_string"]
        )

    def fresh_bucket(self) -> str:
        """A new, empty container: its name."""
        name = f"container-{uuid.uuid4().hex[:12]}"
        self.client.create_container(name)
        return name

    def stop(self) -> None:
        """End the server; what it stored is gone."""
        self.client.close()
        self._process.stop()


def _install(folder: Path) -> None:
    if shutil.which("node") is None:
        raise ServerUnavailableError("Azurite needs node, which is not installed")
    run(
        "npm",
        "install",
        "--no-audit",
        "--no-fund",
        "--prefix",
        str(folder),
        f"azurite@{VERSION}",
        cwd=folder,
    )
